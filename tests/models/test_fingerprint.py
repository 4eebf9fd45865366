"""Fingerprints tell weights by their bytes; a model is found in a directory or in the Hub's cache, never elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hub_caches import hub_cache

from prep.errors import ModelError
from prep.models import fingerprint
from prep.models.fingerprint import text_fingerprint, vae_fingerprint
from prep.models.hub import locate
from prep.models.pipeline import infer_family, weight_files


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    path = tmp_path / "model"
    shutil.copytree(tiny_model, path)
    return path


def edit(path: Path, **changes) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}, indent=3))


def test_where_it_lies_how_it_is_spelled_and_who_saved_it_do_not_count(model, tiny_model):
    edit(model / "vae" / "config.json", _diffusers_version="9.9", _name_or_path="x")
    edit(model / "text_encoder" / "config.json", transformers_version="9.9", dtype="float16")
    edit(model / "tokenizer" / "tokenizer_config.json", name_or_path="x")
    assert vae_fingerprint(model) == vae_fingerprint(tiny_model)
    assert text_fingerprint(model) == text_fingerprint(tiny_model)


@pytest.mark.parametrize("part", ["vae/config.json", "vae/diffusion_pytorch_model.safetensors"])
def test_what_decides_a_latent_counts(model, tiny_model, part):
    path = model / part
    if part.endswith(".json"):
        edit(path, latent_channels=16)
    else:
        path.write_bytes(path.read_bytes()[:-1] + b"x")
    assert vae_fingerprint(model) != vae_fingerprint(tiny_model)
    assert text_fingerprint(model) == text_fingerprint(tiny_model)


@pytest.mark.parametrize("part", ["text_encoder/config.json", "text_encoder/model.safetensors", "tokenizer/vocab.json",
                                  "tokenizer/merges.txt", "tokenizer/tokenizer_config.json",
                                  "tokenizer/special_tokens_map.json"])
def test_what_decides_a_text_row_counts(model, tiny_model, part):
    path = model / part
    if path.name.endswith("config.json"):
        edit(path, another=1)
    else:
        path.write_bytes(path.read_bytes()[:-1] + b" ")
    assert text_fingerprint(model) != text_fingerprint(tiny_model)
    assert vae_fingerprint(model) == vae_fingerprint(tiny_model)


def test_weights_in_several_files(model):
    folder = model / "vae"
    single = folder / "diffusion_pytorch_model.safetensors"
    single.rename(folder / "part-1.safetensors")
    (folder / "part-2.safetensors").write_bytes(b"two")
    index = folder / "diffusion_pytorch_model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "part-2.safetensors", "b": "part-1.safetensors"}}))
    assert [path.name for path in weight_files(folder, "diffusion_pytorch_model")] == ["part-1.safetensors",
                                                                                      "part-2.safetensors"]
    before = vae_fingerprint(model)
    (folder / "part-2.safetensors").write_bytes(b"three")
    assert vae_fingerprint(model) != before
    index.write_text(json.dumps({"weight_map": {"a": "../../secret.safetensors"}}))
    with pytest.raises(ModelError, match=r"has no diffusion_pytorch_model\.safetensors"):
        vae_fingerprint(model)


def test_a_file_of_weights_beside_an_index_is_refused(model):
    """transformers would load the file, diffusers what the index names."""
    for part, stem, fingerprint_of in (("vae", "diffusion_pytorch_model", vae_fingerprint),
                                       ("text_encoder", "model", text_fingerprint)):
        index = model / part / f"{stem}.safetensors.index.json"
        index.write_text(json.dumps({"weight_map": {"a": "part-1.safetensors"}}))
        with pytest.raises(ModelError) as error:
            fingerprint_of(model)
        assert error.value.message.endswith(f"{part} has two sets of weights, {stem}.safetensors and {index.name}")
        assert error.value.hint == "libraries differ in which they load; remove one"


@pytest.mark.parametrize(("gone", "message"), [
    (["tokenizer_config.json"], "tokenizer has no tokenizer_config.json"),
    (["vocab.json"], "tokenizer has no vocabulary, "
                     "expected tokenizer.json, vocab.json with merges.txt, or spiece.model\n"),
    (["vocab.json", "merges.txt"], "tokenizer has no vocabulary, expected tokenizer.json, vocab.json with merges"),
])
def test_a_tokenizer_that_would_be_loaded_in_part(prep, photos, model, tmp_path, gone, message):
    """transformers takes one without a config for endless, and one without words for one that knows none."""
    for name in gone:
        (model / "tokenizer" / name).unlink()
    result = prep("encode", photos, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                  "--resolution", 96, "--step", 16)
    assert result.code == 6 and message in result.err
    assert "hint: fetch the model again, or save its tokenizer with transformers" in result.err


def test_a_blob_of_the_hub_is_not_read(model, tmp_path, monkeypatch):
    snapshot = hub_cache(tmp_path / "hub", model, "someone/tiny")
    monkeypatch.setattr(fingerprint, "digest_parts", lambda _: pytest.fail("a weight file was read"))
    assert vae_fingerprint(snapshot)


def test_a_hub_id_is_found_in_the_local_cache(prep, photos, model, tmp_path, monkeypatch):
    snapshot = hub_cache(tmp_path / "hub", model, "someone/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert locate("someone/tiny").resolve() == snapshot.resolve()
    result = prep("encode", photos, "--model", "someone/tiny", "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                  "--resolution", 96, "--step", 16)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "m.json").read_text())["model"] == {"hub": "someone/tiny"}


def test_a_model_that_is_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="is neither a directory nor in the local Hub cache") as error:
        locate("someone/nothing")
    assert "--download" in error.value.hint and error.value.exit_code == 6
    with pytest.raises(ModelError, match="is not a directory, and not a Hub id either"):
        locate("./some/where/else")


@pytest.mark.parametrize("part", ["model_index.json", "vae", "vae/config.json", "text_encoder/model.safetensors",
                                  "tokenizer", "scheduler"])
def test_a_missing_part_is_named(prep, photos, model, tmp_path, part):
    path = model / part
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    result = prep("encode", photos, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                  "--resolution", 96, "--step", 16)
    assert result.code == 6 and Path(part).name.split(".")[0] in result.err, result.err
    assert "Traceback" not in result.err


def test_the_family_comes_from_the_pipelines_class(model, tmp_path):
    assert infer_family(model) == "sd15"
    edit(model / "model_index.json", _class_name="OtherPipeline")
    with pytest.raises(ModelError, match="OtherPipeline, which belongs to no family known here"):
        infer_family(model)
    (model / "model_index.json").write_text("{")
    with pytest.raises(ModelError, match="is not JSON"):
        infer_family(model)
    with pytest.raises(ModelError, match="is not a directory"):
        infer_family(tmp_path / "nothing")


def test_pickled_weights_are_not_read(model):
    (model / "vae" / "diffusion_pytorch_model.safetensors").rename(model / "vae" / "diffusion_pytorch_model.bin")
    with pytest.raises(ModelError, match=r"has no diffusion_pytorch_model\.safetensors") as error:
        vae_fingerprint(model)
    assert "safe_serialization=True" in error.value.hint
