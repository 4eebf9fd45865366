"""`train merge A B`: of LoRA files the average of what they add, of full runs that of their weights; nothing else."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from lora_tensors import DOWN, UP, drawn, metadata
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

from runs import go

from prep.errors import CacheError, ModelError, PathError
from prep.fs import atomic
from train.merging.average import AverageRequest, average


def kohya(path, rank, alpha, seed, dtype=torch.float32, said=None, **more):
    """A linear layer, a 3x3 convolution, Tucker's decomposition of another, a whole difference with a bias, a word."""
    shapes = {"lora_unet_a" + DOWN: (rank, 20), "lora_unet_a" + UP: (10, rank), "lora_unet_c" + DOWN: (rank, 8, 3, 3),
              "lora_unet_c" + UP: (12, rank, 1, 1), "lora_unet_t" + DOWN: (rank, 8, 1, 1),
              "lora_unet_t" + UP: (12, rank, 1, 1), "lora_unet_t.lora_mid.weight": (rank, rank, 3, 3),
              "lora_unet_d.diff": (6, 5), "lora_unet_d.diff_b": (6,), "bundle_emb.word": (2, 4)}
    tensors = {name: drawn(*shape, seed=seed * 100 + number, dtype=dtype)
               for number, (name, shape) in enumerate(shapes.items())}
    tensors |= {f"lora_unet_{each}.alpha": torch.tensor(alpha, dtype=dtype) for each in "act"} | more
    save_file(tensors, path, {"ss_network_dim": str(rank), **(said or {})})
    return tensors


def added(tensors, stem, alpha=None):
    """What a layer's tensors add, by hand."""
    down, up = tensors[stem + DOWN].double(), tensors[stem + UP].double()
    if (core := tensors.get(f"{stem}.lora_mid.weight")) is not None:
        product = torch.einsum("ij...,oi,jc->oc...", core.double(), up.flatten(1), down.flatten(1)).flatten(1)
    else:
        product = up.flatten(1) @ down.flatten(1)
    return product * float(tensors[f"{stem}.alpha"] if alpha is None else alpha) / up.shape[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_lora_of_several_adds_the_average_of_what_they_add(tmp_path, dtype):
    """Whatever their ranks and alphas; averages of the matrices by themselves would add something else."""
    paths, parts = [tmp_path / f"{name}.safetensors" for name in "xyz"], []
    for number, (path, rank, alpha) in enumerate(zip(paths, (4, 2, 4), (2.0, 8.0, -1.0), strict=True)):
        said = {"latentry.resized": "{}", "ss_output_name": path.stem}
        parts.append(kohya(path, rank, alpha, number, dtype, said))
    weights, wanted = (1.0, 2.0, 1.0), (0.25, 0.5, 0.25)
    done = average(AverageRequest(sources=paths, weights=weights, output=tmp_path / "mean.safetensors"))
    found, off = load_file(tmp_path / "mean.safetensors"), {torch.float32: 1e-6, torch.float16: 2e-3}.get(dtype, 1.5e-2)
    for stem in ("lora_unet_a", "lora_unet_c", "lora_unet_t"):
        mean = sum(weight * added(each, stem) for weight, each in zip(wanted, parts, strict=True))
        assert (added(found, stem) - mean).norm() <= off * mean.norm()
        assert found[stem + UP].shape[1] == 10 == float(found[f"{stem}.alpha"]) and found[stem + UP].dtype == dtype
    for name in ("lora_unet_d.diff", "lora_unet_d.diff_b", "bundle_emb.word"):
        mean = sum(weight * each[name].double() for weight, each in zip(wanted, parts, strict=True))
        assert torch.allclose(found[name].double(), mean, atol=off)
    one, two = (sum(weight * each["lora_unet_a" + kind].double() for weight, each in
                    zip((0.5, 0.5), (parts[0], parts[2]), strict=True)) for kind in (UP, DOWN))
    half = (added(parts[0], "lora_unet_a") + added(parts[2], "lora_unet_a")) / 2
    assert (one @ two - half).norm() > 0.1 * half.norm()
    said = metadata(tmp_path / "mean.safetensors")
    listed = json.loads(said["latentry.averaged"])
    assert [(each["name"], each["weight"]) for each in listed] == list(zip(
        ("x.safetensors", "y.safetensors", "z.safetensors"), wanted, strict=True))
    assert [each["sha256"] for each in listed] == [part.sha256 for part in done.parts]
    assert said["ss_network_dim"] == "10" and said["ss_output_name"] == "x" and "latentry.resized" not in said
    assert len(said["sshs_model_hash"]) == 64 and done.size == (tmp_path / "mean.safetensors").stat().st_size
    lower = average(AverageRequest(sources=paths, weights=weights, output=tmp_path / "less.safetensors", rank=3,
                                   dtype="float32"))
    less = load_file(tmp_path / "less.safetensors")
    whole = sum(weight * added(each, "lora_unet_a") for weight, each in zip(wanted, parts, strict=True))
    left, values, right = torch.linalg.svd(whole, full_matrices=False)
    best = (left[:, :3] * values[:3]) @ right[:3]
    assert (added(less, "lora_unet_a") - best).norm() < 1e-5 * best.norm() and 0.3 < lower.kept < 1
    assert "latentry.averaged" in metadata(tmp_path / "less.safetensors")
    assert {path.suffix for path in tmp_path.iterdir()} == {".safetensors"}, "nothing is left"


def test_an_average_of_one_file_with_itself_is_that_file(tmp_path):
    before = kohya(tmp_path / "x.safetensors", 3, 1.5, 7)
    average(AverageRequest(sources=[tmp_path / "x.safetensors"] * 2, weights=(0.3, 0.7),
                           output=tmp_path / "y.safetensors", rank=3))
    after = load_file(tmp_path / "y.safetensors")
    for stem in ("lora_unet_a", "lora_unet_c", "lora_unet_t"):
        assert torch.allclose(added(after, stem), added(before, stem), atol=1e-5)
    assert torch.equal(after["lora_unet_d.diff_b"], before["lora_unet_d.diff_b"]), "to the bit, by differences"


def test_names_without_alpha_keep_one_rank_and_a_directory_of_peft_its_settings(tmp_path):
    layers = {"base_model.model.x.to_q": (5, 12), "base_model.model.y.to_q": (2, 12)}
    for folder, seed in (("one", 0), ("two", 50)):
        (tmp_path / folder).mkdir()
        tensors = {}
        for number, (name, shape) in enumerate(layers.items()):
            tensors[f"{name}.lora_A.weight"] = drawn(*shape, seed=seed + 2 * number)
            tensors[f"{name}.lora_B.weight"] = drawn(*shape[::-1], seed=seed + 2 * number + 1)
        save_file(tensors, tmp_path / folder / "adapter_model.safetensors")
        (tmp_path / folder / "adapter_config.json").write_text(json.dumps(
            {"peft_type": "LORA", "r": 5, "lora_alpha": 10, "rank_pattern": {"y.to_q": 2}, "target_modules": ["to_q"]}))
    average(AverageRequest(sources=[tmp_path / "one", tmp_path / "two"], weights=(0.5, 0.5),
                           output=tmp_path / "mean.safetensors"))
    parts = [load_file(tmp_path / each / "adapter_model.safetensors") for each in ("one", "two", "mean.safetensors")]
    said = json.loads((tmp_path / "mean.safetensors" / "adapter_config.json").read_text())
    assert (said["r"], said["rank_pattern"], said["alpha_pattern"]) in (
        (10, {"y.to_q": 4}, {"y.to_q": 4}), (4, {"x.to_q": 10}, {"x.to_q": 10}))
    for name, scale in (("x.to_q", 10 / 5), ("y.to_q", 10 / 2)):
        stem = f"base_model.model.{name}.lora_"
        one, two, mean = (each[f"{stem}B.weight"] @ each[f"{stem}A.weight"] for each in parts)
        assert torch.allclose(mean, scale * (one + two) / 2, atol=1e-4)


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory):
    """`runs_of(made, setup_of, method)`: two short runs of different seeds, made once for each method."""
    done = {}

    def make(made, setup_of, method):
        if method not in done:
            root = tmp_path_factory.mktemp(method)
            for seed in (0, 1):
                go(setup_of(made, batch_size=4, steps=2, validation={"every": 0}, sample={"every": 0}, method=method,
                            seed=seed, optimizer={"lr": 0.01}, lora={"rank": 2}), root / str(seed))
            done[method] = [root / "0", root / "1"]
        return done[method]

    return make


def test_weights_of_full_runs_are_averaged_and_go_where_a_runs_result_goes(make, setup_of, runs_of, train, tmp_path):
    made = make()
    runs = runs_of(made, setup_of, "full")
    result = train("merge", *runs, "--weights", "3,1", "-o", tmp_path / "mean.safetensors")
    assert result.code == 0 and "note: the weights sum to 4, so they are divided by that: 0.75, 0.25" in result.err
    name = "unet/diffusion_pytorch_model.safetensors"
    one, two, mean = (load_file(path) for path in (runs[0] / name, runs[1] / name, tmp_path / "mean.safetensors"))
    for each, value in mean.items():
        wanted = one[each].double() + 0.25 * (two[each].double() - one[each].double())
        assert torch.allclose(value.double(), wanted, rtol=1e-6, atol=1e-8) and value.dtype == one[each].dtype
    assert any(not torch.equal(value, one[each]) for each, value in mean.items())
    said = metadata(tmp_path / "mean.safetensors")
    assert said["latentry.base"] == metadata(runs[0] / name)["latentry.base"] and "modelspec.merged_from" in said
    model = made.manifest.model
    result = train("merge", tmp_path / "mean.safetensors", "--model", model, "-o", tmp_path / "model")
    assert result.code == 0, result.err
    assert all(torch.equal(value, mean[each]) for each, value in load_file(tmp_path / "model" / name).items())
    half = average(AverageRequest(sources=[run / "checkpoints/step-000002" for run in runs], weights=(1, 1),
                                  output=tmp_path / "half.safetensors", dtype="bfloat16"))
    assert half.full and [part.weight for part in half.parts] == [0.5, 0.5]
    assert {value.dtype for value in load_file(tmp_path / "half.safetensors").values()} == {torch.bfloat16}


def test_an_average_that_is_stopped_leaves_nothing(make, setup_of, runs_of, monkeypatch, tmp_path):
    """At any change of the disk: the file is whole, or not there."""
    files = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    for number, path in enumerate(files):
        kohya(path, 2, 2.0, number)
    sources = {"full": runs_of(make(), setup_of, "full"), "lora": files}
    real, output = atomic.write, tmp_path / "out" / "mean.safetensors"
    output.parent.mkdir()
    for kind, rank in (("lora", None), ("lora", 1), ("full", None)):
        for last in range(0, 12, 4):
            left = [last]

            def failing(handle, data, left=left):
                left[0] -= 1
                if left[0] < 0:
                    raise OSError(28, "No space left on device")
                real(handle, data)

            with monkeypatch.context() as patch, pytest.raises((OSError, PathError)):
                patch.setattr(atomic, "write", failing)
                average(AverageRequest(sources=sources[kind], weights=(1, 1), output=output, rank=rank))
            assert not list(output.parent.iterdir())


def test_what_cannot_be_averaged_is_refused_in_one_message(make, setup_of, runs_of, tmp_path):
    x, y, out = (tmp_path / f"{name}.safetensors" for name in ("x", "y", "out"))
    one, a = kohya(x, 2, 2.0, 0, said={"modelspec.architecture": "flux-1-dev/lora"}), "lora_unet_a"
    none = {f"{a}{UP}": None, f"{a}{DOWN}": None, f"{a}.alpha": None}
    for changes, said, message in [
        (none, {}, f"{y} has no '{a}', which {x} has"),
        ({f"lora_unet_b{UP}": drawn(4, 2), f"lora_unet_b{DOWN}": drawn(2, 4)}, {},
         f"{x} has no 'lora_unet_b', which {y} has"),
        ({f"{a}{UP}": drawn(11, 2)}, {}, f"{y} has '{a}' of sides [11, 20], but {x} of sides [10, 20]"),
        ({"lora_unet_d.diff_b": drawn(7)}, {}, f"{y} has 'lora_unet_d.diff_b' with shape [7], but {x} with shape [6]"),
        ({**none, f"{a}.diff": drawn(10, 20)}, {}, f"{y} and {x} adapt {a} in different ways"),
        ({f"{a}.dora_scale": drawn(10, 1)}, {},
         f"{y} has the lengths of DoRA of {a}: the average of such files is none of their kind"),
        ({**none, f"{a}.lokr_w1": drawn(2, 2), f"{a}.lokr_w2": drawn(5, 10)}, {},
         f"{y} has a LoKr of {a}, which is no product of two matrices"),
        ({}, {"modelspec.architecture": "stable-diffusion-v1/lora"},
         f"{y} is of 'stable-diffusion-v1/lora', but {x} of 'flux-1-dev/lora'")]:
        save_file({name: value for name, value in {**one, **changes}.items() if value is not None}, y, said)
        with pytest.raises(ModelError) as caught:
            average(AverageRequest(sources=[x, y], weights=(1, 1), output=out))
        assert caught.value.message == message and caught.value.hint
    full, other = runs_of(make(), setup_of, "full")
    weights = full / "unet/diffusion_pytorch_model.safetensors"
    save_file({name: value for name, value in load_file(weights).items() if name != "conv_in.weight"}, y,
              metadata(weights))
    for sources, message in [((x, full), f"{weights} has all weights, but {x} is a LoRA"),
                             ((full, x), f"{x} is a LoRA, but {weights} has all weights")]:
        with pytest.raises(ModelError) as caught:
            average(AverageRequest(sources=sources, weights=(1, 1), output=out))
        assert caught.value.message == message
    with pytest.raises(ModelError, match=r"has 'conv_in.weight' with no such tensor, but .* with shape \["):
        average(AverageRequest(sources=[other, y], weights=(1, 1), output=out))
    x.write_bytes(x.read_bytes()[:-5])
    with pytest.raises(CacheError, match="expected"):
        average(AverageRequest(sources=[y, x], weights=(1, 1), output=out))
    assert not out.exists()


def test_runs_on_different_models_are_noted(tmp_path):
    for name, base in (("x", "a"), ("y", "b")):
        kohya(tmp_path / f"{name}.safetensors", 2, 2.0, 0, said={"latentry.base": json.dumps({"denoiser": base * 64})})
    done = average(AverageRequest(sources=[tmp_path / "x.safetensors", tmp_path / "y.safetensors"], weights=(1, 1),
                                  output=tmp_path / "z.safetensors"))
    assert done.notes == ("y.safetensors was trained on another model than x.safetensors",)


def test_options_go_with_one_result_or_with_several(train, tmp_path):
    for number, name in enumerate("xy"):
        kohya(tmp_path / f"{name}.safetensors", 2, 2.0, number)
    x, y, out = tmp_path / "x.safetensors", tmp_path / "y.safetensors", tmp_path / "out.safetensors"
    several = "is for the merge of one result, which is added to its model, but several are named"
    for words, message in [
        ((x, "--weights", "1"), "--weights is for the merge of several results, but one is named"),
        ((x, "--rank", "4"), "--rank is for the merge of several results, but one is named"),
        ((x, y, "--model", tmp_path), f"--model {several}"), ((x, y, "--strength", "0.5"), f"--strength {several}"),
        ((x, y, "--weights", "0.5"), "--weights is '0.5', expected 2 numbers above 0 with commas between them"),
        ((x, y, "--weights", "1,-1"), "--weights is '1,-1', expected 2"), ((x, y, "--weights", "1,nan"), "is '1,nan'"),
        ((x, y, "--weights", "1,b"), "--weights is '1,b', expected 2")]:
        result = train("merge", *words, "-o", out)
        assert result.code == 2 and message in result.err, result.err
    result = train("merge", x, y, "-o", tmp_path / "out")
    assert result.code == 2 and "has no name of a file of weights, expected one that ends in .safetensors" in result.err
    result = train("merge", x, y, "-o", out, "--rank", "2")
    assert result.code == 0 and result.out.startswith(f"wrote {out}: the average of 2 results, 4 layers, "), result
    assert "of the whole change kept, " in result.out
    result = train("merge", x, y, "-o", out)
    assert f"{out} exists, so it is not replaced" in result.err and "--force" not in result.err


def test_a_part_may_be_any_number_above_0(tmp_path):
    """Only their proportion counts."""
    paths = [tmp_path / "x.safetensors", tmp_path / "y.safetensors"]
    for number, path in enumerate(paths):
        kohya(path, 2, 2.0, number)
    for number, weights in enumerate([(0.2, 0.6), (1, 3), (1e-3, 3e-3)]):
        average(AverageRequest(sources=paths, weights=weights, output=tmp_path / f"out-{number}.safetensors"))
    files = [load_file(tmp_path / f"out-{number}.safetensors") for number in range(3)]
    assert all(torch.allclose(one[name], two[name]) for one, two in pairwise(files) for name in one)
