"""A LoRA extracted from two models adds what the one has more than the other, as far as its rank goes."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from adapted import adapter
from safetensors import safe_open
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines
from original_checkpoints import write_original

from prep.errors import ConfigError, ModelError, PathError
from prep.models.families.registry import FAMILIES
from prep.models.hub import locate
from prep.training.schema import Lora
from train.merging.directory import MergeRequest, merge
from train.merging.extract import ExtractRequest, extract, pair_of
from train.merging.reduced import Reduced
from train.models.principal import directions_of, directions_of_product


def weights(model, family):
    return {name: value for path in (model / FAMILIES[family].denoiser).glob("*.safetensors")
            for name, value in load_file(path).items()}


def change(folder, family, **changes):
    """Adds to tensors of the denoiser, by name."""
    path = next((folder / FAMILIES[family].denoiser).glob("*.safetensors"))
    tensors = load_file(path)
    with safe_open(path, "pt") as file:
        facts = file.metadata()
    save_file({**tensors, **{name: tensors[name] + value for name, value in changes.items()}}, path, facts)


def extracted(base, tuned, output, rank=8, **more):
    settings = {"targets": "all-linear", **more.pop("lora", {})}
    return extract(pair_of(ExtractRequest(base=base, tuned=tuned, output=output, rank=rank, lora=Lora(**settings),
                                          **more)), torch.device("cpu"))


@pytest.mark.few("sd3", "zimage")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_and_what_was_extracted_are_the_tuned_model(family, tmp_path):
    """In both forms of names, if the rank suffices; with the metadata of a run, so that all read it."""
    base = tiny_pipelines.save(family, tmp_path / "base")
    targets = "kohya" if "kohya" in FAMILIES[family].lora.presets else "all-linear"  # all of which have kohya's names
    path = adapter(family, base, tmp_path / "lora.safetensors", targets=targets, rank=3, alpha=2.0)
    tuned = merge(MergeRequest(lora=path, model=base, output=tmp_path / "tuned")).output
    before, wanted = weights(base, family), weights(tuned, family)
    for form in ("auto", *(["kohya"] if FAMILIES[family].lora.kohya else [])):
        done = extracted(base, tuned, tmp_path / f"{form}.safetensors", lora={"format": form, "targets": targets})
        assert done.kept > 0.9999 and {each.rank for each in done.layers} <= set(range(1, 9))
        again = merge(MergeRequest(lora=done.output, model=base, output=tmp_path / f"again-{form}"))
        found = weights(again.output, family)
        assert found.keys() == wanted.keys() and again.notes == ()
        largest = max(float((value - before[name]).abs().max()) for name, value in wanted.items())
        assert all(torch.allclose(found[name], value, atol=1e-5 * max(largest, 1.0)) for name, value in wanted.items())
        assert len(done.layers) == sum(not torch.equal(value, before[name]) for name, value in wanted.items())


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A model, and one whose weights, norms, biases and text encoder were changed."""
    root = tmp_path_factory.mktemp("models")
    base = tiny_pipelines.save("sd15", root / "base")
    tuned = shutil.copytree(base, root / "tuned")
    drawn = torch.Generator().manual_seed(0)
    tensors = weights(base, "sd15")
    change(tuned, "sd15", **{name: 0.1 * torch.randn(value.shape, generator=drawn) for name, value in tensors.items()
                             if "to_q" in name or "norm" in name or "conv1" in name})
    path = next((tuned / "text_encoder").glob("*.safetensors"))
    encoder = load_file(path)
    name = next(name for name in encoder if "fc1.weight" in name)
    save_file({**encoder, name: encoder[name] + 0.01}, path, {"format": "pt"})
    return base, tuned


def test_what_is_kept_is_the_best_of_its_rank(models, tmp_path):
    base, tuned = models
    done = extracted(base, tuned, tmp_path / "a.safetensors", rank=2, lora={"targets": "kohya-conv"})
    before, after = weights(base, "sd15"), weights(tuned, "sd15")
    for each in done.layers:
        values = torch.linalg.svdvals((after[f"{each.layer}.weight"] - before[f"{each.layer}.weight"]).flatten(1))
        assert each.kept == pytest.approx(float(values[:2].norm() / values.norm()), abs=1e-4)
        assert each.norm == pytest.approx(float(values.norm()), rel=1e-4) and each.before == len(values)
    kept = extracted(base, tuned, tmp_path / "b.safetensors", rank=64, keep=0.8, lora={"targets": "kohya-conv"})
    assert all(each.kept >= 0.8 for each in kept.layers) and len({each.rank for each in kept.layers}) > 1
    assert extracted(base, tuned, tmp_path / "c.safetensors", rank=64, keep=0.8, lora={
        "targets": "kohya-conv"}).layers == kept.layers
    one, other = (load_file(tmp_path / f"{name}.safetensors") for name in "bc")
    assert one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())
    merged = merge(MergeRequest(lora=tmp_path / "b.safetensors", model=base, output=tmp_path / "merged")).output
    found = weights(merged, "sd15")
    for each in kept.layers:
        name = f"{each.layer}.weight"
        off = float((found[name] - after[name]).norm()) / each.norm
        assert off == pytest.approx((1 - each.kept**2) ** 0.5, abs=1e-3)


def test_notes_say_what_the_file_does_not_hold(models, tmp_path):
    base, tuned = models
    done = extracted(base, tuned, tmp_path / "a.safetensors", lora={"targets": "attention"})
    told = "\n".join(done.notes)
    assert "norms and other tensors differ by " in told and "biases differ by" in told
    assert "other layers differ by " in told and "which the LoRA does not hold; most '" in told
    assert "1 tensor of the text encoder differs by" in told and "vae" not in told


def test_the_metadata_name_both_models(models, tmp_path):
    base, tuned = models
    extracted(base, tuned, tmp_path / "mine.safetensors", rank=3, dtype="bfloat16")
    with safe_open(tmp_path / "mine.safetensors", "pt") as file:
        facts = file.metadata()
    made = json.loads(facts["latentry.extracted"])
    assert made["name"] == "tuned" and made["rank"] == 3 and made["targets"] == "all-linear"
    assert made["denoiser"] != json.loads(facts["latentry.base"])["denoiser"]
    assert facts["modelspec.title"] == "mine" and facts["modelspec.architecture"].endswith("/lora")
    assert facts["ss_network_dim"] == "3" and str(tmp_path) not in json.dumps(facts)
    values = load_file(tmp_path / "mine.safetensors")
    assert {value.dtype for name, value in values.items() if not name.endswith(".alpha")} == {torch.bfloat16}


def test_single_files_are_compared_as_their_directories(models, tmp_path):
    base, tuned = models
    done = extracted(base, tuned, tmp_path / "a.safetensors", rank=4)
    files = [locate(f"{write_original(model, tmp_path / f'{model.name}.safetensors')}@{model}") for model in models]
    for number, pair in enumerate([files, [base, files[1]]]):
        found = extracted(*pair, tmp_path / f"{number}.safetensors", rank=4)
        assert [each.layer for each in found.layers] == [each.layer for each in done.layers]
        one, other = load_file(tmp_path / f"{number}.safetensors"), load_file(tmp_path / "a.safetensors")
        assert all(torch.allclose(one[name], value, atol=1e-5) for name, value in other.items())
        assert any("1 tensor of the text encoder differs" in note or
                   "name the tensors of their text encoder differently, so these are not compared" in note
                   for note in found.notes)


def test_other_models_and_equal_ones_are_refused(models, tmp_path):
    base, tuned = models
    with pytest.raises(ModelError, match="have the same weights in all"):
        extracted(base, shutil.copytree(base, tmp_path / "copy"), tmp_path / "a.safetensors")
    other = tiny_pipelines.save("flux", tmp_path / "flux")
    with pytest.raises(ModelError, match=r"is of family 'flux', but .* is of family 'sd15'"):
        extracted(base, other, tmp_path / "a.safetensors")
    path = next((tmp_path / "copy" / "unet").glob("*.safetensors"))
    tensors = load_file(path)
    save_file({**tensors, "conv_in.weight": tensors["conv_in.weight"][:, :1].contiguous()}, path, {"format": "pt"})
    with pytest.raises(ModelError, match=r"has 'conv_in\.weight' with shape \[\d+, 1, 3, 3\], but .* with shape \["):
        extracted(base, tmp_path / "copy", tmp_path / "a.safetensors")
    save_file({**tensors, (name := next(name for name in tensors if "to_q.weight" in name)): tensors[name] / 0}, path,
              {"format": "pt"})
    with pytest.raises(ModelError, match=r"has NaN or infinity in .*copy or "):
        extracted(base, tmp_path / "copy", tmp_path / "a.safetensors")
    with pytest.raises(PathError, match="is no run that trained all weights, expected one with its result or a"):
        extracted(base, tuned, tmp_path / "a.safetensors", run=True)
    with pytest.raises(ConfigError, match="names 'to_x'"):
        extracted(base, tuned, tmp_path / "a.safetensors", lora={"targets": ("to_x",)})
    assert not (tmp_path / "a.safetensors").exists()


def test_the_command_takes_models_and_runs(train, models, tmp_path):
    base, tuned = models
    result = train("extract", base, tuned, "-o", tmp_path / "a.safetensors", "--rank", 2, "--targets", "to_q",
                   "--targets", "to_k", "--json", "--device", "cpu")
    assert result.code == 0, result.err
    assert result.json["format"] == "latentry/extract" and result.json["layers"]
    assert all(each["name"].endswith(("to_q", "to_k")) for each in result.json["layers"])
    assert "note: " in result.err and "of their size" in result.err
    result = train("extract", base, tuned, "-o", tmp_path / "a.safetensors", "--device", "cpu")
    assert result.code == 5 and "exists, so it is not replaced" in result.err
    result = train("extract", base, tuned, "-o", tmp_path / "b.safetensors", "--format", "x")
    assert result.code == 2 and "--format is 'x', expected one of: auto, kohya, diffusers" in result.err
    run = tmp_path / "run"
    (run / "unet").mkdir(parents=True)
    shutil.copy(next((tuned / "unet").glob("*.safetensors")), run / "unet" / "diffusion_pytorch_model.safetensors")
    (run / "run.json").write_text("{}")
    result = train("extract", base, run, "-o", tmp_path / "c.safetensors", "--rank", 2, "--device", "cpu")
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1].startswith(f"wrote {tmp_path / 'c.safetensors'}: ")


def test_models_of_different_dtypes_have_a_note(models, tmp_path):
    base, tuned = models
    half = shutil.copytree(tuned, tmp_path / "half")
    path = next((half / "unet").glob("*.safetensors"))
    save_file({name: value.half() for name, value in load_file(path).items()}, path, {"format": "pt"})
    done = extracted(base, half, tmp_path / "a.safetensors")
    assert any("has its weights in F32, the other model in F16: rounding is a part" in note for note in done.notes)


def test_fast_and_whole_decompositions_agree():
    """Where the fast one has room for every direction, and where values fall slowly."""
    drawn = torch.Generator().manual_seed(0)
    up, down = torch.randn(200, 5, generator=drawn), torch.randn(5, 300, generator=drawn)
    whole, fast = directions_of(up @ down, None, 0), directions_of(up @ down, 8, 0)
    exact = directions_of_product(up, down)
    for found in (fast, exact):
        assert torch.allclose(found.values[:5].double(), whole.values[:5].double(), rtol=1e-4)
        left, right = found.factors(5)
        assert torch.allclose((left @ right).float(), up @ down, atol=1e-3)
    left, right = (torch.linalg.qr(torch.randn(side, 200, generator=drawn))[0] for side in (200, 300))
    slow = left * torch.arange(1.0, 201.0) ** -0.25 @ right.T
    assert directions_of(slow, 16, 0).kept(16) == pytest.approx(directions_of(slow, None, 0).kept(16), rel=5e-3)
    assert torch.equal(directions_of(slow, 16, 0).left, directions_of(slow, 16, 0).left)
    assert Reduced(layer="x", before=5, rank=5, norm=1.0, kept=1.0).kept == 1.0
