"""Single-file checkpoints become directories that have every weight of the file, and none of anything else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from original_checkpoints import write_original
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")

import tiny_pipelines

from prep.models.pipeline import infer_family

BUILT = {"sd15": {}, "sdxl": {"second_width": 48}}


@pytest.fixture(scope="module", params=BUILT)
def model(request, tmp_path_factory) -> Path:
    return tiny_pipelines.save(request.param, tmp_path_factory.mktemp(request.param) / "model", **BUILT[request.param])


@pytest.fixture
def bare(model, tmp_path) -> Path:
    """The configs and tokenizers of the model, without any weights."""
    return shutil.copytree(model, tmp_path / "config", ignore=shutil.ignore_patterns("*.safetensors"))


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a pipeline directory; transformers names those of CLIP with a prefix or without."""
    return {f"{path.parent.name}.{name.removeprefix('text_model.')}": value
            for path in folder.rglob("*.safetensors") for name, value in load_file(path).items()}


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_every_weight_of_the_original_file_arrives(prep, model, bare, tmp_path):
    file = write_original(model, tmp_path / "my model.safetensors")
    result = prep("convert", file, "--config", bare, "-o", tmp_path / "out")
    assert result.code == 0 and result.out == f"wrote {tmp_path / 'out'}\n"
    assert equal(weights(tmp_path / "out"), weights(model))
    assert infer_family(tmp_path / "out") == infer_family(model)
    assert type(tiny_pipelines.load(tmp_path / "out")) is type(tiny_pipelines.load(model))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config", "my model.safetensors", "out"]
    for path in (tmp_path / "out").rglob("*.json"):
        assert str(tmp_path) not in path.read_text() and "latentry-model-" not in path.read_text()


def test_the_dtype_is_the_file_s(prep, model, bare, tmp_path):
    file = write_original(model, tmp_path / "full.safetensors")
    halved = {name: value.half() for name, value in load_file(file).items()}
    save_file(halved, file)
    assert prep("convert", file, "--config", bare, "-o", tmp_path / "out", "--quiet").code == 0
    assert {value.dtype for value in weights(tmp_path / "out").values()} == {torch.float16}


def test_what_the_file_lacks_comes_from_the_directory(prep, model, tmp_path):
    """A file with only a UNet, which is another than the directory's."""
    file = write_original(model, tmp_path / "unet.safetensors")
    kept = {name: value + 1 for name, value in load_file(file).items() if name.startswith("model.diffusion_model.")}
    save_file(kept, file)
    assert prep("convert", file, "--config", model, "-o", tmp_path / "out").code == 0
    made, before = weights(tmp_path / "out"), weights(model)
    assert made.keys() == before.keys()
    for name, value in made.items():
        assert torch.equal(value, before[name] + 1 if name.startswith("unet.") else before[name]), name


def test_what_is_in_neither_is_named(prep, model, bare, tmp_path):
    file = write_original(model, tmp_path / "unet.safetensors")
    save_file({name: value for name, value in load_file(file).items() if "diffusion_model" in name}, file)
    result = prep("convert", file, "--config", bare, "-o", tmp_path / "out")
    assert result.code == 6 and "unet.safetensors has no text encoder, and neither has " in result.err
    assert not (tmp_path / "out").exists()
    assert "hint: name where its configs and tokenizers are, after an @: " in result.err


def test_a_weight_that_is_missing_is_named(prep, model, bare, tmp_path):
    file = write_original(model, tmp_path / "x.safetensors")
    whole = load_file(file)
    for lost, said in (("model.diffusion_model.time_embed.2.bias", "unet: time_embedding.linear_2.bias"),
                       ("conditioner.embedders.1.model.text_projection", "text encoder 2: text_projection.weight")):
        save_file({name: value for name, value in whole.items() if name != lost}, file)
        result = prep("convert", file, "--config", bare, "-o", tmp_path / "out")
        if lost not in whole:
            continue
        assert result.code == 6 and not (tmp_path / "out").exists()
        assert f"x.safetensors lacks weights of the {said}" in result.err


def test_files_that_are_not_taken(prep, model, bare, tmp_path):
    (tmp_path / "x.ckpt").write_bytes(b"\x80\x02}q\x00.")
    result = prep("convert", tmp_path / "x.ckpt", "--config", bare, "-o", tmp_path / "out")
    assert result.code == 6 and ("x.ckpt is a pickle, which can run code when it is loaded: only safetensors and "
                                 "GGUF are read\n") in result.err
    assert "hint: look for NAME.safetensors of the same model" in result.err
    save_file({}, tmp_path / "none.safetensors")
    result = prep("convert", tmp_path / "none.safetensors", "--config", model, "-o", tmp_path / "out")
    assert result.code == 6 and "none.safetensors has no tensors" in result.err and not (tmp_path / "out").exists()
    file = write_original(model, tmp_path / "cut.safetensors")
    file.write_bytes(file.read_bytes()[:-5])
    result = prep("convert", file, "--config", bare, "-o", tmp_path / "out")
    assert result.code == 6 and "bytes, expected" in result.err
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.txt").write_text("x")
    result = prep("convert", file, "--config", bare, "-o", tmp_path / "out")
    assert result.code == 5 and "out exists, expected a new or empty directory" in result.err
    result = prep("convert", file, "--config", bare, "-o", tmp_path / "no" / "out")
    assert result.code == 5 and "out cannot be written: there is no directory" in result.err


def test_a_config_directory_runs_no_code(prep, model, bare, tmp_path):
    file = write_original(model, tmp_path / "x.safetensors")
    index = json.loads((bare / "model_index.json").read_text())
    for changes, said in (({"scheduler": ["mod", "Evil"]}, "scheduler in"), ({"vae": ["mod", "Evil"]}, "vae in"),
                          ({"scheduler": ["diffusers", "os"]}, "expected one of diffusers")):
        (bare / "model_index.json").write_text(json.dumps({**index, **changes}))
        (bare / "mod.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nclass Evil: pass\n")
        result = prep("convert", file, "--config", bare, "-o", tmp_path / "out")
        assert result.code == 6 and said in result.err and not (tmp_path / "ran").exists()


