"""Fingerprints tell weights by their bytes; a model is found in a directory or in the Hub's cache, never elsewhere."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from hub_caches import hub_cache
from model_files import write_model, write_safetensors
from original_checkpoints import write_original

from prep.errors import ModelError
from prep.manifest.document import read_manifest
from prep.models.fingerprint import (
    bytes_of,
    digest_file,
    text_files,
    text_fingerprint,
    ticking,
    vae_files,
    vae_fingerprint,
)
from prep.models.hub import locate
from prep.models.pipeline import family_of, infer_family, open_single


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


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("remembered", [False, True])
def test_every_byte_of_weights_is_counted(tiny_model, tmp_path, monkeypatch, single, remembered):
    monkeypatch.setattr("prep.models.fingerprint._BLOCK", 1 << 10)
    model = open_single(write_original(tiny_model, tmp_path / "x.safetensors"), tiny_model) if single else tiny_model
    counts = []
    counted = ticking((lambda path, part, _: digest_file(path, part)) if remembered else digest_file, counts.append)
    assert (vae_fingerprint(model, counted), text_fingerprint(model, counted)) == (
        vae_fingerprint(model), text_fingerprint(model))
    components = [vae_files(model), *text_files(model).encoders.values()]
    assert sum(counts) == bytes_of(components) and (len([count for count in counts if count]) == 2) is remembered
    if not single:
        assert sum(counts) == sum(path.stat().st_size for files in components for path in files.weights)


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


def test_scales_beside_weights_count_as_applied(tmp_path):
    """The same bytes made other rows when they were read without their scales."""
    digests = []
    for scale in ("b.scale_weight", "b.scale_width"):
        model = write_model(tmp_path / scale)
        write_safetensors(model / "vae" / "diffusion_pytorch_model.safetensors", {"b.weight": [3], scale: [1]})
        digests.append(vae_fingerprint(model, lambda path: "the same"))
    assert digests[0] != digests[1]


@pytest.mark.parametrize("parts", [False, True])
def test_fingerprints_of_ordinary_models_are_what_they_always_were(tmp_path, parts):
    """Digests that the first release computed: keys of caches hang on them."""
    model = write_model(tmp_path, parts=parts)
    assert vae_fingerprint(model) == ("9642978d2daa1b30fb7dacf4baef8cc180686a4ae315f8f0ebe0bf5494815ffc" if parts else
                                      "35c90da975c42a012fb3d0afc04ebb63db06a83aa21a2c40ac80d0ee21b27a2c")
    assert text_fingerprint(model) == "93a069cb191ce699dec99bb0a4d57a9754b0db95ec993084655157f08152025a"


def test_every_encoder_and_tokenizer_that_the_index_names_counts(tmp_path):
    model = write_model(tmp_path)
    plain = text_fingerprint(model)
    for name in ("text_encoder", "tokenizer"):
        shutil.copytree(model / name, model / f"{name}_2")
    assert text_fingerprint(model) == plain
    edit(model / "model_index.json", text_encoder_2=["transformers", "CLIPTextModelWithProjection"])
    second = text_fingerprint(model)
    edit(model / "model_index.json", tokenizer_2=["transformers", "CLIPTokenizer"], text_encoder_3=[None, None])
    both = text_fingerprint(model)
    edit(model / "text_encoder_2" / "config.json", hidden_act="gelu")
    other = text_fingerprint(model)
    (model / "tokenizer_2" / "vocab.json").write_text('{"a": 1, "b": 0}')
    assert len({plain, second, both, other, text_fingerprint(model)}) == 5


@pytest.mark.parametrize("part", ["vae/diffusion_pytorch_model-00001-of-00002.safetensors",
                                  "vae/diffusion_pytorch_model-00002-of-00002.safetensors"])
def test_each_of_several_files_of_weights_counts(tmp_path, part):
    model = write_model(tmp_path, parts=True)
    before = vae_fingerprint(model)
    (model / part).write_bytes((model / part).read_bytes()[:-1] + b"x")
    assert vae_fingerprint(model) != before


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
    assert "hint: download the model again, or save its tokenizer with transformers" in result.err


def test_weights_written_through_a_link_of_the_hub_are_other_weights(model, tmp_path):
    """The blob keeps its name, which was the SHA-256 of other bytes."""
    snapshot = hub_cache(tmp_path / "hub", model, "someone/tiny")
    assert vae_fingerprint(snapshot) == vae_fingerprint(model)
    weights = snapshot / "vae" / "diffusion_pytorch_model.safetensors"
    with weights.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"x")
    assert weights.is_symlink() and vae_fingerprint(snapshot) != vae_fingerprint(model)


def test_a_hub_id_is_found_in_the_local_cache(prep, photos, model, tmp_path, monkeypatch):
    snapshot = hub_cache(tmp_path / "hub", model, "someone/tiny")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert locate("someone/tiny").resolve() == snapshot.resolve()
    result = prep("encode", photos, "--model", "someone/tiny", "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                  "--resolution", 96, "--step", 16)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "m.json").read_text())["model"] == {"hub": "someone/tiny"}


def test_a_revision_of_a_hub_id(prep, photos, model, tmp_path, monkeypatch):
    snapshot = hub_cache(tmp_path / "hub", model, "someone/tiny")
    refs = snapshot.parents[1] / "refs"
    (refs / "main").unlink()
    (refs / "v1").write_text("a" * 40)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for revision in ("v1", "a" * 40):
        assert locate(f"someone/tiny@{revision}").resolve() == snapshot.resolve()
    for lacking in ("someone/tiny", "someone/tiny@v2"):
        with pytest.raises(ModelError, match="is neither a directory nor in the local Hub cache"):
            locate(lacking)
    result = prep("encode", photos, "--model", "someone/tiny@v1", "--cache", tmp_path / "cache", "-o",
                  tmp_path / "m.json", "--resolution", 96, "--step", 16)
    assert result.code == 0, result.err
    assert read_manifest(tmp_path / "m.json").model == "someone/tiny@v1"


def test_a_directory_that_is_gone_is_no_hub_id(tmp_path, monkeypatch):
    """A manifest that was moved without its model names such a path: nothing is looked up, or downloaded."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: pytest.fail("it was looked up"))
    for download in (False, True):
        with pytest.raises(ModelError, match="the model's directory moved/model does not exist") as error:
            locate(Path("moved/model"), download=download)
        assert "--model DIR" in error.value.hint


def test_a_hub_that_is_out_of_reach(tmp_path, model, monkeypatch):
    """The errors of the library that connects have no class of the Hub's library."""
    class Unreachable(Exception):
        pass

    def fail(*_, **__):
        raise Unreachable("Name or service not known")

    snapshot = hub_cache(tmp_path / "hub", model, "someone/tiny")
    monkeypatch.setattr("huggingface_hub.list_repo_files", fail)
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda *_, **__: str(snapshot))
    assert locate("someone/tiny", download=True) == snapshot, "it is in the cache"
    monkeypatch.setattr("huggingface_hub.snapshot_download", fail)
    with pytest.raises(ModelError, match="model 'someone/none' could not be downloaded: Name or service") as error:
        locate("someone/none", download=True)
    assert error.value.exit_code == 6 and "network" in error.value.hint


def test_a_model_that_is_nowhere(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub._snapshot_download.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelError, match="is neither a directory nor in the local Hub cache") as error:
        locate("someone/nothing")
    assert "--download" in error.value.hint and error.value.exit_code == 6
    with pytest.raises(ModelError, match="is neither a directory nor a Hub id"):
        locate("./some/where/else")
    for url in ("s3://user:word@bucket/m", "s3://bucket/m?token=word"):
        with pytest.raises(ModelError, match=r"^model s3:/+bucket/m is neither") as error:
            locate(url)
        assert "word" not in error.value.message


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
    with pytest.raises(ModelError, match="OtherPipeline, which belongs to no known family"):
        infer_family(model)
    assert infer_family(model, "sd15") == family_of(model, "sd15") == "sd15"
    with pytest.raises(ModelError, match="no known family, and its components are not those of 'flux'"):
        infer_family(model, "flux")
    edit(model / "model_index.json", _class_name="StableDiffusionPipeline")
    assert infer_family(model, "flux") == family_of(model, "") == "sd15"
    with pytest.raises(ModelError) as error:
        family_of(model, "flux")
    assert str(error.value) == f"{model} is of family 'sd15', but family in [model] of the recipe is 'flux'"
    assert error.value.hint == "leave family out of [model]: it is read from the model"
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
