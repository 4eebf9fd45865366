"""A merged model draws what its base draws with the LoRA; nothing is replaced, nothing is half-written."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from adapted import adapter
from hub_caches import hub_cache
from pictures import draw
from runs import go
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.errors import CacheError, ModelError, PathError, Problem, UsageError
from prep.fs.place import Local
from prep.models.families.registry import FAMILIES
from prep.training.schema import Lora
from train.merging import directory, streamed
from train.merging.directory import MergeRequest, merge
from train.merging.trained import find_lora
from train.models import lora
from train.models.naming import naming_of
from train.sample import SampleRequest, show


def picture(folder, path=None, strength=1.0):
    with tiny_pipelines.known_warnings(), torch.no_grad():
        pipeline = tiny_pipelines.load(folder)
        if path is not None:
            pipeline.load_lora_weights(path.parent, weight_name=path.name, adapter_name="one")
            pipeline.set_adapters(["one"], [strength])
        return tiny_pipelines.draw(pipeline)


@pytest.fixture(scope="module")
def sd15(tmp_path_factory):
    """A pipeline directory and a LoRA file for it."""
    root = tmp_path_factory.mktemp("sd15")
    tiny_pipelines.save("sd15", root / "model")
    return root / "model", adapter("sd15", root / "model", root / "lora.safetensors", targets="kohya")


@pytest.mark.few("sd15-settings1", "flux")
@pytest.mark.parametrize(("family", "settings", "strength"), [
    pytest.param("sd15", {"targets": "kohya"}, 1.0, marks=pytest.mark.slow),
    ("sd15", {"targets": "kohya", "format": "diffusers"}, -0.5),
    pytest.param("sd15", {"targets": "kohya-conv", "conv_rank": 3, "conv_alpha": 5.0}, 1.0, marks=pytest.mark.slow),
    ("sd15", {"targets": "kohya-conv", "format": "diffusers", "rslora": True,
              "layers": ({"match": "to_q", "rank": 4, "alpha": 3.0},)}, 1.0),
    pytest.param("sd15", {"targets": "kohya-conv", "dora": True}, 1.0, marks=pytest.mark.slow),
    ("flux", {"targets": "attention", "dora": True}, 1.0),
    pytest.param("flux2", {"targets": "all-linear", "format": "kohya"}, 0.7, marks=pytest.mark.slow),
    pytest.param("flux", {"targets": "all-linear"}, 1.0, marks=pytest.mark.slow),
    ("zimage", {"targets": "all-linear", "format": "kohya"}, 1.0),
    pytest.param("lumina2", {"targets": "kohya", "format": "kohya"}, 1.0, marks=pytest.mark.slow),
    ("sd3", {"targets": "kohya", "format": "kohya", "dora": True}, 1.0)])
def test_the_merged_model_draws_what_the_lora_draws(tmp_path, family, settings, strength):
    folder = tiny_pipelines.save(family, tmp_path / "model")
    path = adapter(family, folder, tmp_path / "lora.safetensors", **settings)
    done = merge(MergeRequest(lora=path, model=folder, output=tmp_path / "merged", strength=strength))
    kohya = FAMILIES[family].lora.kohya
    if settings.get("dora") or (kohya is not None and not kohya.imported):  # diffusers reads these in its own names
        shown = adapter(family, folder, tmp_path / "shown.safetensors", **{**settings, "format": "diffusers"})
    else:
        shown = path
    wanted = picture(folder, shown, strength)
    change = np.abs(wanted - picture(folder)).max()
    assert change > 1e-3 and np.abs(picture(tmp_path / "merged") - wanted).max() < 0.01 * change
    assert done.layers == len([name for name in load_file(path) if "lora_A" in name or "lora_down" in name]) or (
        settings.get("format") == "kohya")
    kept, names = ({path.relative_to(place) for path in place.rglob("*") if path.is_file()}
                   for place in (folder, tmp_path / "merged"))
    assert names == {*kept, Path("README.md")}
    for name in kept:
        if name.parts[0] != FAMILIES[family].denoiser:
            assert (folder / name).read_bytes() == (tmp_path / "merged" / name).read_bytes()


@pytest.mark.slow
def test_dora_is_merged_from_both_names_and_by_strength(tmp_path):
    """Half a strength is half of the way."""
    folder, found = tiny_pipelines.save("sd15", tmp_path / "model"), {}
    for layout in ("kohya", "diffusers"):
        path = adapter("sd15", folder, tmp_path / f"{layout}.safetensors", targets="kohya-conv", dora=True,
                       format=layout)
        for strength in (0.0, 0.5, 1.0):
            done = merge(MergeRequest(lora=path, model=folder, output=tmp_path / f"{layout}{strength}",
                                      strength=strength))
            found[layout, strength] = load_file(next((done.output / "unet").glob("*.safetensors")))
    base = load_file(next((folder / "unet").glob("*.safetensors")))
    for name, value in base.items():
        assert torch.equal(found["kohya", 1.0][name], found["diffusers", 1.0][name])
        assert torch.equal(found["kohya", 0.0][name], value)
        assert torch.allclose(found["kohya", 0.5][name], (value + found["kohya", 1.0][name]) / 2, atol=1e-6)
    assert not all(torch.equal(found["kohya", 1.0][name], value) for name, value in base.items())


@pytest.mark.few("loha")
@pytest.mark.parametrize("settings", [
    {"kind": "loha", "rank": 2, "alpha": 1.0, "conv_rank": 2, "conv_alpha": 1.0},
    {"kind": "lokr", "rank": 1, "alpha": 0.5, "conv_rank": 1, "conv_alpha": 0.5},
    {"kind": "lokr", "rank": 90, "alpha": 45.0, "conv_rank": 90, "conv_alpha": 45.0}], ids=str)
def test_products_are_merged(tmp_path, settings):
    """The merged model draws what the adapted one draws, and the weights of a part are not taken for the whole."""
    folder = tiny_pipelines.save("sd15", tmp_path / "model")
    path = adapter("sd15", folder, tmp_path / "other.safetensors", targets="kohya-conv", **settings)
    done = merge(MergeRequest(lora=path, model=folder, output=tmp_path / "merged"))
    with tiny_pipelines.known_warnings(), torch.no_grad():
        pipeline, chosen = tiny_pipelines.load(folder), Lora(targets="kohya-conv", **settings)
        found = lora.attach(pipeline.unet, chosen, 0, FAMILIES["sd15"].lora.presets)
        values = lora.unpack(load_file(path), found, naming_of(FAMILIES["sd15"]))
        for name, value in found.items():
            value.copy_(values[name])
        wanted = tiny_pipelines.draw(pipeline)
    change = np.abs(wanted - picture(folder)).max()
    assert change > 1e-3 and np.abs(picture(tmp_path / "merged") - wanted).max() < 0.01 * change
    tensors = load_file(path)
    assert done.layers == len([name for name in tensors if name.endswith(".alpha")])
    name = next(name for name in tensors if name.endswith(("hada_w1_a", "lokr_w1")))
    save_file({**tensors, name: torch.zeros(7, 3)}, path)
    with pytest.raises(ModelError, match=rf"has '{name}' and others that do not make a weight of shape \["):
        merge(MergeRequest(lora=path, model=folder, output=tmp_path / "again"))


def test_differences_of_weights_biases_and_norms_are_merged(tmp_path):
    """Each by the strength; of a bias only if the layer has one."""
    folder, path = tiny_pipelines.save("sd15", tmp_path / "model"), tmp_path / "full.safetensors"
    base = load_file(next((folder / "unet").glob("*.safetensors")))
    drawn, tensors = torch.Generator().manual_seed(0), {}
    for name, value in base.items():
        norm = base[name.rpartition(".")[0] + ".weight"].ndim == 1
        end = ("w_norm", "b_norm") if norm else ("diff", "diff_b")
        stem = f"lora_unet_{name.rpartition('.')[0].replace('.', '_')}"
        tensors[f"{stem}.{end[name.endswith('.bias')]}"] = torch.randn(value.shape, generator=drawn)
    save_file(tensors, path)
    done = merge(MergeRequest(lora=path, model=folder, output=tmp_path / "merged", strength=0.5))
    found = load_file(next((done.output / "unet").glob("*.safetensors")))
    for (name, value), change in zip(base.items(), tensors.values(), strict=True):
        assert torch.allclose(found[name], value + 0.5 * change, atol=1e-6), name
    layer = next(name.removesuffix(".weight") for name in base if name.endswith("to_q.weight"))
    save_file({f"{layer}.diff_b": torch.ones(len(base[f"{layer}.weight"]))}, path)
    with pytest.raises(ModelError, match=f"it adds to a bias of {layer}, which has none in this model".removeprefix(
            "it ")):
        merge(MergeRequest(lora=path, model=folder, output=tmp_path / "again"))


@pytest.mark.slow
def test_a_run_is_merged_with_its_own_model(train, make, setup_of, tmp_path, monkeypatch):
    made = make()
    go(setup_of(made, batch_size=4, steps=2, validation={"every": 0}, sample={"every": 0}, lora={"rank": 2}),
       tmp_path / "run")
    result = train("merge", tmp_path / "run", "-o", tmp_path / "merged", "--dtype", "bfloat16")
    assert result.code == 0 and "layers changed" in result.out, result.err
    weights = next((tmp_path / "merged" / "unet").glob("*.safetensors"))
    assert {value.dtype for value in load_file(weights).values()} == {torch.bfloat16}
    with safe_open(weights, "pt") as file:
        facts = file.metadata()
    assert json.loads(facts["latentry.merged"])[0]["name"] == "lora.safetensors" and "latentry.base" in facts
    again = train("merge", tmp_path / "run", "-o", tmp_path / "merged")
    assert again.code == 5 and f"{tmp_path / 'merged'} exists, expected a new directory" in again.err
    monkeypatch.chdir(tmp_path / "run" / "checkpoints")
    for number, step in enumerate((tmp_path / "run" / "checkpoints" / "step-000002", "step-000002")):
        result = train("merge", step, "-o", tmp_path / f"of a checkpoint {number}", "--dtype", "bfloat16")
        assert result.code == 0, result.err
        found = tmp_path / f"of a checkpoint {number}" / "unet" / weights.name
        assert all(torch.equal(value, load_file(weights)[name]) for name, value in load_file(found).items())


@pytest.mark.few("sd15")
@pytest.mark.parametrize("family", ["sd15", "sd3"])
def test_a_full_run_becomes_a_whole_model(prep, train, tmp_path, family):
    """Which draws the run's own sample, and which diffusers loads as it is: nothing is asked of a network."""
    tiny_pipelines.save(family, tmp_path / "model")
    for number in range(4):
        draw(tmp_path / "photos" / f"{number}.png", (64, 64), seed=number).with_suffix(".txt").write_text("a thing")
    (tmp_path / "prompts.txt").write_text("a thing\n")
    assert prep("encode", tmp_path / "photos", "--model", tmp_path / "model", "--cache", tmp_path / "cache", "-o",
                tmp_path / "m.json", "--prompts", tmp_path / "prompts.txt", "--resolution", 64, "--step", 32,
                "--device", "cpu", "--quiet").code == 0
    run, component = tmp_path / "run", FAMILIES[family].denoiser
    result = train("run", tmp_path / "m.json", "-o", run, "--method", "full", "--steps", 3, "--lr", "0.01",
                   "--precision", "fp32", "--device", "cpu", "--quiet", "--set", "ema.decay=0.5", "--set",
                   "sample.every=0", "--set", "checkpoint.every=2", "--batch-size", 2)
    assert result.code == 0, result.err
    result = train("merge", run, "-o", tmp_path / "merged")
    assert result.code == 0, result.err
    assert result.out.startswith(f"wrote {tmp_path / 'merged'}: the weights of {run / component}/diffusion_pytorch_"
                                 "model.safetensors, and the other parts of ")
    with tiny_pipelines.known_warnings(), torch.no_grad():
        wanted = tiny_pipelines.load(tmp_path / "model")
        trained = type(getattr(wanted, component)).from_pretrained(run / component)
        wanted.register_modules(**{component: trained})
        before = picture(tmp_path / "model")
        assert np.array_equal(picture(tmp_path / "merged"), tiny_pipelines.draw(wanted))
        assert np.abs(picture(tmp_path / "merged") - before).max() > 1e-3
    grids = []
    for which, model in (("after", None), ("before", str(tmp_path / "merged"))):
        shown = show(SampleRequest(run=Local(run), which=(which,), steps=2, model=model), torch.device("cpu"),
                     tmp_path / f"{which}.png")
        grids.append(shown.pictures)
    assert len(grids[0]) == 1 and np.array_equal(*grids)
    folder, kept = tmp_path / "model", tmp_path / "merged"
    names = {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}
    assert {path.relative_to(kept) for path in kept.rglob("*") if path.is_file()} == {*names, Path("README.md")}
    assert all((folder / name).read_bytes() == (kept / name).read_bytes() for name in names
               if name.parts[0] != component)
    told = (kept / "README.md").read_text()
    with safe_open(run / component / "diffusion_pytorch_model.safetensors", "pt") as opened:
        said = opened.metadata()
    for line in ("Its weights are now those of | diffusion\\_pytorch\\_model\\.safetensors |",
                 f"Fingerprint of denoiser | {json.loads(said['latentry.base'])['denoiser']} |",
                 "Steps | 3 |", "Seed | 0 |",
                 f"Manifest | {said['latentry.manifest']} |", 'method = "full"\n', "ema.decay = 0.5\n"):
        assert line in told, (line, told)
    ours = load_file(kept / component / "diffusion_pytorch_model.safetensors")
    average = load_file(run / "checkpoints" / "step-000003" / "ema.safetensors")
    assert all(torch.equal(value, ours[name]) for name, value in average.items())
    result = train("merge", run / "checkpoints" / "step-000002", "-o", tmp_path / "earlier", "--dtype", "bfloat16")
    assert result.code == 0, result.err
    earlier = load_file(tmp_path / "earlier" / component / "diffusion_pytorch_model.safetensors")
    average = load_file(run / "checkpoints" / "step-000002" / "ema.safetensors")
    assert all(torch.equal(value.bfloat16(), earlier[name]) for name, value in average.items())


@pytest.fixture(scope="module")
def full_run(tmp_path_factory, sd15):
    """A directory like a full run's, with a result and a checkpoint, and its model."""
    run = tmp_path_factory.mktemp("full") / "run"
    shutil.copytree(sd15[0] / "unet", run / "unet")
    (run / "run.json").write_text("{}")
    return run


def test_a_full_run_that_cannot_be_merged(sd15, full_run, tmp_path):
    error = refused(sd15, tmp_path, UsageError, lora=full_run, strength=0.5)
    weights = full_run / "unet" / "diffusion_pytorch_model.safetensors"
    assert error.message == f"--strength is 0.5, which is for a LoRA, but {weights} has all weights"
    tensors, other = load_file(weights), shutil.copytree(full_run, tmp_path / "other")
    there = other / "unet" / weights.name
    name, value = "conv_in.weight", tensors["conv_in.weight"]
    save_file({**tensors, name: value[:3].clone()}, there)
    error = refused(sd15, tmp_path, lora=other)
    assert error.message == (f"{there} has '{name}' with shape {[3, *value.shape[1:]]}, but {sd15[0]} has shape "
                             f"{list(value.shape)}")
    assert error.hint == "name the model of the run with --model"
    save_file({**tensors, "more": torch.zeros(2)}, there)
    assert refused(sd15, tmp_path, lora=other).message == (
        f"{there} has 'more' with shape [2], but {sd15[0]} has no such tensor")
    save_file({each: value for each, value in tensors.items() if each != name}, there)
    assert refused(sd15, tmp_path, lora=other).message == f"{there} lacks '{name}', which {sd15[0]} has"
    there.write_bytes(b"no file of tensors")
    assert str(there) in refused(sd15, tmp_path, CacheError, lora=other).message
    step = tmp_path / "divided" / "checkpoints" / "step-000002"
    (step / "unet" / "diffusion_pytorch_model").mkdir(parents=True)
    (step / "state.json").write_bytes(b"")
    error = refused(sd15, tmp_path, PathError, lora=step)
    assert error.message.startswith(f"{step} has the weights in pieces")
    assert error.hint.endswith(f"then name the run: {tmp_path / 'divided'}")


def test_a_checkpoint_of_a_full_run_is_compared_with_its_digest(make, setup_of, tmp_path):
    made = make()
    go(setup_of(made, batch_size=4, steps=2, validation={"every": 0}, sample={"every": 0}, method="full"),
       tmp_path / "run")
    step = tmp_path / "run" / "checkpoints" / "step-000002"
    weights = step / "unet" / "diffusion_pytorch_model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CacheError, match="its bytes do not match their digest"):
        merge(MergeRequest(lora=step, model=made.manifest.model, output=tmp_path / "merged"))
    assert not (tmp_path / "merged").exists()


def test_a_checkpoint_without_its_optimizer_and_one_that_was_set_aside_are_merged(make, setup_of, tmp_path):
    """As from a store, of which only the weights are downloaded."""
    go(setup_of(make(), batch_size=4, steps=2, validation={"every": 0}, sample={"every": 0}, method="full"),
       tmp_path / "run")
    (step,) = (tmp_path / "run" / "checkpoints").iterdir()
    aside = shutil.copytree(step, step.with_name(f"aside-{step.name}"))
    (step / "optimizer.safetensors").unlink()
    model, merged = setup_of(make()).model.path, []
    for number, folder in enumerate((step, aside)):
        merge(MergeRequest(lora=folder, model=model, output=tmp_path / str(number)))
        merged.append((tmp_path / str(number) / "unet/diffusion_pytorch_model.safetensors").read_bytes())
    assert merged[0] == merged[1]


def test_a_model_is_no_full_run(sd15, tmp_path):
    assert "has no trained weights" in (refused(sd15, tmp_path, PathError, lora=sd15[0]).message)


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("settings", [{"prediction": "v_prediction"}, {"prediction": "v_prediction",
                                                                      "zero_terminal_snr": True}], ids=str)
def test_the_merged_model_makes_pictures_as_the_run_did(make, setup_of, tmp_path, method, settings):
    """Of a run that taught its model to predict v, on its noise schedule."""
    made = make()
    setup = setup_of(made, batch_size=4, steps=1, validation={"every": 0}, sample={"every": 0}, method=method,
                     lora={"rank": 2}, **settings)
    go(setup, tmp_path / "run")
    merge(MergeRequest(lora=tmp_path / "run", model=setup.model.path, output=tmp_path / "merged"))
    with tiny_pipelines.known_warnings():
        schedule = tiny_pipelines.load(tmp_path / "merged").scheduler
    rescaled = settings.get("zero_terminal_snr", False)
    assert schedule.config.prediction_type == "v_prediction"
    assert (float(schedule.alphas_cumprod[-1]) == 0) == rescaled
    if rescaled:
        schedule.set_timesteps(1)
        assert schedule.timesteps.tolist() == [999]


def test_a_lora_of_a_run(tmp_path):
    with pytest.raises(PathError, match="has no trained weights, expected a run with a result or a checkpoint, or a L"):
        find_lora(tmp_path)
    with pytest.raises(PathError, match=r"gone does not exist, expected a LoRA file or a run"):
        find_lora(tmp_path / "gone")
    step = tmp_path / "checkpoints" / "step-000002"
    step.mkdir(parents=True)
    for name in ("state.json", "lora.safetensors", "ema.safetensors"):
        (step / name).write_bytes(b"")
    assert find_lora(tmp_path) == step / "ema.safetensors"
    assert find_lora(step) == step / "ema.safetensors"  # as --init-from takes it
    (tmp_path / "lora.safetensors").write_bytes(b"")
    assert find_lora(tmp_path) == tmp_path / "lora.safetensors"
    (step / "ema.safetensors").unlink()
    assert find_lora(step) == step / "lora.safetensors"


def test_a_large_model_keeps_its_files(sd15, tmp_path):
    """Weights in several files with an index: each is merged, and the index has the new size."""
    folder = shutil.copytree(sd15[0], tmp_path / "model")
    with tiny_pipelines.known_warnings():
        unet = tiny_pipelines.load(folder).unet
    shutil.rmtree(folder / "unet")
    unet.save_pretrained(folder / "unet", max_shard_size="200KB")
    assert len(list((folder / "unet").glob("*.safetensors"))) > 1
    merge(MergeRequest(lora=sd15[1], model=folder, output=tmp_path / "merged", dtype="float16"))
    index = json.loads(next((tmp_path / "merged" / "unet").glob("*.index.json")).read_text())
    parts = [load_file(path) for path in sorted((tmp_path / "merged" / "unet").glob("*.safetensors"))]
    assert index["metadata"]["total_size"] == sum(value.numel() * 2 for part in parts for value in part.values())
    whole = merge(MergeRequest(lora=sd15[1], model=sd15[0], output=tmp_path / "whole", dtype="float16"))
    other = load_file(next((whole.output / "unet").glob("*.safetensors")))
    assert all(torch.equal(other[name], value) for part in parts for name, value in part.items())


@pytest.mark.parametrize(("trained", "dtype"), [("lora", None), ("full", None), ("full", "bfloat16")])
def test_no_two_weights_are_in_memory(sd15, full_run, tmp_path, monkeypatch, trained, dtype):
    """Each is read, changed and written before the next one is read."""
    read, weights = [], sd15[0] / "unet" / "diffusion_pytorch_model.safetensors"

    def tracked(path, info):
        assert not [each for each in read if each() is not None], "an earlier weight is still there"
        value = before(path, info)
        read.append(weakref.ref(value))
        return value

    before = streamed.read_tensor
    monkeypatch.setattr(streamed, "read_tensor", tracked)
    done = merge(MergeRequest(lora=full_run if trained == "full" else sd15[1], model=sd15[0],
                              output=tmp_path / "merged", dtype=dtype))
    assert len(read) == len(load_file(weights)) == len(load_file(done.output / "unet" / weights.name))


def refused(sd15, tmp_path, kind=ModelError, **changes):
    """The error; nothing is left of the output."""
    asked = {"lora": sd15[1], "model": sd15[0], "output": tmp_path / "merged", **changes}
    before = sorted(tmp_path.iterdir())
    with pytest.raises(Problem) as error:
        merge(MergeRequest(**asked))
    assert isinstance(error.value, kind) and sorted(tmp_path.iterdir()) == before
    return error.value


@pytest.mark.parametrize("shards", [False, True])
def test_a_model_of_a_variant_becomes_one_without(sd15, tmp_path, shards):
    """As its card loads it: diffusers looks for one variant of all components."""
    pipe, model = tiny_pipelines.load(sd15[0]), tmp_path / "fp16"
    pipe.to(torch.float16).save_pretrained(model, variant="fp16", max_shard_size="200KB" if shards else "10GB")
    merge(MergeRequest(lora=sd15[1], model=model, output=tmp_path / "out"))
    assert not list((tmp_path / "out").rglob("*.index.fp16.json"))
    assert shards or not list((tmp_path / "out").rglob("*fp16*"))
    made = tiny_pipelines.load(tmp_path / "out")
    for name in ("vae", "text_encoder"):
        old, new = (getattr(each, name).state_dict() for each in (
            tiny_pipelines.load(model, variant="fp16"), made))
        assert old.keys() == new.keys() and all(torch.equal(old[each], new[each]) for each in old)


def test_files_that_are_no_plain_lora(sd15, tmp_path):
    tensors = load_file(sd15[1])
    name = next(name for name in tensors if name.endswith("lora_down.weight"))
    path = tmp_path / "other.safetensors"
    save_file({"lora_te_text_model.lora_down.weight": torch.zeros(2, 2)}, path)
    assert refused(sd15, tmp_path, lora=path).message == f"{path} adapts text encoders only"
    save_file({**tensors, name: torch.zeros(2, 3)}, path)
    message = refused(sd15, tmp_path, lora=path).message
    assert re.fullmatch(r".* has 'down' of [a-z0-9_.]+ with shape \[2, 3\], expected \[2, .*\]", message)
    path = adapter("sd15", sd15[0], tmp_path / "dora.safetensors", dora=True, format="kohya")
    tensors = load_file(path)
    name = next(name for name in tensors if name.endswith("dora_scale"))
    save_file({**tensors, name: torch.zeros(1, 3)}, path)
    error, wanted = refused(sd15, tmp_path, lora=path), list(tensors[name].shape)
    assert error.message == f"{path} has '{name}' with shape [1, 3], expected {wanted}"
    save_file({}, path)
    assert refused(sd15, tmp_path, lora=path).message == f"{path} has no tensors, so it is no LoRA"
    path.write_bytes(b"no file of tensors")
    assert "name an undamaged LoRA file" in refused(sd15, tmp_path, CacheError, lora=path).hint


def test_text_encoders_are_left_out_with_a_note_and_directories_of_others_are_read(train, sd15, tmp_path):
    """Of PEFT and of diffusers; the merged weights are those of the file without text encoders."""
    tensors, merged = load_file(sd15[1]), []
    more = {"lora_te_text_model_encoder_layers_0_mlp_fc1.lora_down.weight": torch.zeros(2, 2)}
    for name, given in (("adapter_model", tensors | more), ("pytorch_lora_weights", tensors)):
        (tmp_path / name).mkdir()
        save_file(given, tmp_path / name / f"{name}.safetensors")
        result = train("merge", tmp_path / name, "-o", tmp_path / f"{name} merged", "--model", sd15[0])
        assert result.code == 0, result.err
        note = f"note: {name}.safetensors also adapts text encoders; 1 of its tensors are not used\n"
        assert (note in result.err) == (name == "adapter_model")
        merged.append(load_file(next((tmp_path / f"{name} merged" / "unet").glob("*.safetensors"))))
    assert all(torch.equal(value, merged[1][name]) for name, value in merged[0].items())


def test_a_lora_may_be_a_link(sd15, tmp_path):
    """Like one in a snapshot of the Hub's cache, whose settings are in another link beside it; named as file or as
    directory."""
    (tmp_path / "lora").mkdir()
    tensors = {name: value for name, value in load_file(sd15[1]).items() if not name.endswith(".alpha")}
    save_file(tensors, tmp_path / "lora" / "adapter_model.safetensors")
    (tmp_path / "lora" / "adapter_config.json").write_text(json.dumps({"r": 2, "lora_alpha": 6}))
    folder, merged = hub_cache(tmp_path / "hub", tmp_path / "lora", "someone/lora"), []
    for number, named in enumerate((tmp_path / "lora", folder, folder / "adapter_model.safetensors")):
        done = merge(MergeRequest(lora=named, model=sd15[0], output=tmp_path / str(number)))
        merged.append(load_file(done.output / "unet" / "diffusion_pytorch_model.safetensors"))
    base = load_file(next((sd15[0] / "unet").glob("*.safetensors")))
    assert any(not torch.equal(value, base[name]) for name, value in merged[0].items())
    assert all(torch.equal(value, other[name]) for name, value in merged[0].items() for other in merged[1:])


def test_a_damaged_checkpoint_names_the_one_before(sd15, tmp_path):
    run = tmp_path / "run"
    for step in ("step-000002", "step-000004"):
        (run / "checkpoints" / step).mkdir(parents=True)
        for name in ("state.json", "lora.safetensors"):
            (run / "checkpoints" / step / name).write_bytes(b"no file of tensors")
    hint = refused(sd15, tmp_path, CacheError, lora=run).hint
    assert hint.startswith(f"name another checkpoint: {run}/checkpoints/step-000002; or name an undamaged LoRA file")


def test_metadata_of_others_are_no_settings(sd15, tmp_path):
    tensors = load_file(sd15[1])
    for number, config in enumerate(("[" * 10**5, '"text"', "{", '{"zero_terminal_snr": 1, "prediction": []}')):
        save_file(tensors, tmp_path / "other.safetensors", metadata={"latentry.config": config})
        done = merge(MergeRequest(lora=tmp_path / "other.safetensors", model=sd15[0], output=tmp_path / str(number)))
        for name in ("model_index.json", "scheduler/scheduler_config.json"):
            assert (done.output / name).read_bytes() == (sd15[0] / name).read_bytes()


def test_weights_that_cannot_be_merged(sd15, tmp_path):
    folder = shutil.copytree(sd15[0], tmp_path / "model")
    weights = next((folder / "unet").glob("*.safetensors"))
    tensors = load_file(weights)
    save_file({name: value.double() if name == "conv_in.weight" else value for name, value in tensors.items()}, weights)
    assert refused(sd15, tmp_path, model=folder).message == (
        f"{weights} has 'conv_in.weight' in F64, expected F32 or F16 or BF16")
    save_file({**tensors, "conv_in.weight": tensors["conv_in.weight"] * 0 + 1e6}, weights)
    assert refused(sd15, tmp_path, model=folder, dtype="float16").message == (
        "'conv_in.weight' has values that float16 cannot hold")


def test_places_that_are_refused(sd15, tmp_path, monkeypatch):
    assert "lies in" in refused(sd15, tmp_path, PathError, output=sd15[0] / "merged").message
    monkeypatch.setattr(streamed.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(9, 8, 1))
    error = refused(sd15, tmp_path, PathError)
    assert re.search(r" has 1 byte of free space, expected \d.* for the merged model$", error.message)
    assert "name another place" in error.hint


def test_a_failure_leaves_nothing(sd15, tmp_path, monkeypatch):
    def fail(*_):
        raise PathError("the disk is gone")

    monkeypatch.setattr(directory, "_copy", fail)
    assert refused(sd15, tmp_path, PathError).message == "the disk is gone"


def test_a_file_that_cannot_be_copied(tmp_path):
    with pytest.raises(PathError, match=r"cannot copy .*gone to .*other: No such file"):
        directory._copy(tmp_path / "gone", tmp_path / "model" / "other")


def test_options(train, sd15, tmp_path):
    result = train("merge", tmp_path / "nowhere", "-o", tmp_path / "merged")
    assert result.code == 5 and f"{tmp_path / 'nowhere'} does not exist, expected a LoRA file or a run\n" in result.err
    result = train("merge", tmp_path / "nowhere", "-o", tmp_path / "merged", "--model", tmp_path / "no model")
    assert result.code == 5 and "nowhere does not exist" in result.err  # before torch is loaded
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text("{}")
    shutil.copy(sd15[1], tmp_path / "run" / "lora.safetensors")
    result = train("merge", tmp_path / "run" / "lora.safetensors", "-o", tmp_path / "merged")
    assert result.code == 2 and result.err.endswith(f"hint: name its run, {tmp_path / 'run'}, or add --model DIR\n")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "latentry.json").write_text("{}")
    for place, said in (("cache/merged", f"{tmp_path / 'cache' / 'merged'} lies in a cache"),
                        ("run/run.json/merged", f"{tmp_path / 'run' / 'run.json'} is not a directory")):
        result = train("merge", sd15[1], "-o", tmp_path / place, "--model", sd15[0])
        assert result.code == 5 and said in result.err, result.err
    result = train("merge", sd15[1], "-o", tmp_path / "merged")
    assert result.code == 2 and "--model is missing: a LoRA file does not say where its model is" in result.err
    result = train("merge", sd15[1], "-o", tmp_path / "merged", "--model", sd15[0], "--dtype", "int8")
    assert result.code == 2 and "--dtype is 'int8', expected one of: float32, float16, bfloat16" in result.err
