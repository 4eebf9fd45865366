"""Loading runs no code of a model directory, and loads no byte that its fingerprint does not cover."""

from __future__ import annotations

import errno
import json
import logging
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from model_files import change_json
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from prep.errors import ModelError, OutOfMemoryError
from prep.formatting import format_bytes
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.fingerprint import text_files, text_fingerprint, vae_fingerprint
from prep.models.loading import dtype_keyword, quiet_libraries
from prep.models.text.encoder import TextEncoder
from prep.models.text.pipeline import load_encoder
from prep.models.text.truncation import TruncationFinder
from prep.models.vae import VaeEncoder, load_vae
from train.config.load import parse
from train.models.denoiser import load

EVIL = "open({!r}, 'w').close()\nfrom transformers import CLIPTokenizer\nclass Evil(CLIPTokenizer): pass\n"
VAE = "vae/diffusion_pytorch_model.safetensors"


@pytest.fixture
def model(tiny_model, tmp_path) -> Path:
    return shutil.copytree(tiny_model, tmp_path / "model")


@pytest.fixture
def ran(model, tmp_path) -> Path:
    """A file that is there once the code in the model's directories has run."""
    for folder in ("tokenizer", "text_encoder", "."):
        (model / folder / "mod.py").write_text(EVIL.format(str(tmp_path / "ran")))
    return tmp_path / "ran"


def encode(prep, photos, model, folder: Path, *options: object):
    return prep("encode", photos, "--model", model, "--cache", folder / "cache", "-o", folder / "m.json",
                "--resolution", 96, "--step", 16, "--device", "cpu", *options)


def hidden(model: Path) -> np.ndarray:
    encoder = TextEncoder(model, FAMILIES["sd15"], TextOptions(max_length=77), device="cpu", compute="float32",
                          dtype="float32")
    return np.stack([row["hidden"] for row in encoder.encode(["a red dog", ""])])


class Unread:
    """A stdin that nobody may ask."""

    def readline(self, *_: object) -> str:
        pytest.fail("stdin was read")

    read = readline


def test_a_scan_runs_no_tokenizer_of_the_model(prep, photos, model, ran, monkeypatch):
    """transformers asks on stdin whether it may, and takes "y" from whoever writes there."""
    monkeypatch.setattr(sys, "stdin", Unread())
    change_json(model / "tokenizer" / "tokenizer_config.json", auto_map={"AutoTokenizer": ["mod.Evil", None]},
                tokenizer_class="Evil")
    result = prep("scan", photos, "--model", model)
    assert result.code == 6 and "asks for custom code, which is never run" in result.err
    assert not ran.exists()


@pytest.mark.parametrize(("part", "named"), [("tokenizer", ["mod", "Evil"]), ("text_encoder", ["mod", "Evil"]),
                                             ("vae", ["mod", "Evil"])])
def test_no_component_is_of_a_class_of_the_model(prep, photos, model, ran, tmp_path, part, named):
    change_json(model / "model_index.json", **{part: named})
    result = encode(prep, photos, model, tmp_path)
    assert result.code == 6 and f"{part} in {model / 'model_index.json'} is ['mod', 'Evil'], expected " in result.err
    assert not ran.exists() and not (tmp_path / "cache").exists()


def test_a_pipeline_of_a_class_of_the_model(prep, photos, model, ran, tmp_path):
    change_json(model / "model_index.json", _class_name=["mod", "Evil"])
    result = encode(prep, photos, model, tmp_path)
    assert result.code == 6 and "is a ['mod', 'Evil'], which belongs to no known family" in result.err
    assert not ran.exists()


def test_a_tokenizers_config_leads_to_no_other_vocabulary(model, tiny_model, tmp_path):
    """transformers takes the paths in it for arguments."""
    words = json.loads((model / "tokenizer" / "vocab.json").read_text())
    other = dict(zip(words, reversed(words.values()), strict=True))
    (tmp_path / "vocab.json").write_text(json.dumps(other))
    change_json(model / "tokenizer" / "tokenizer_config.json", vocab_file=str(tmp_path / "vocab.json"))
    np.testing.assert_array_equal(hidden(model), hidden(tiny_model))
    one, other = (TruncationFinder(root, FAMILIES["sd15"], TextOptions(max_length=77)) for root in (model, tiny_model))
    assert one.count(["a red dog"]) == other.count(["a red dog"])


def test_a_versioned_tokenizer_is_refused(prep, photos, model, tmp_path):
    """transformers would load tokenizer.4.0.0.json, which no fingerprint covers."""
    change_json(model / "tokenizer" / "tokenizer_config.json", fast_tokenizer_files=["tokenizer.4.0.0.json"])
    result = encode(prep, photos, model, tmp_path)
    assert result.code == 6 and "names tokenizers that the fingerprint does not cover" in result.err


def test_an_adapter_beside_the_text_encoder_is_refused(prep, photos, model, tmp_path):
    (model / "text_encoder" / "adapter_config.json").write_text('{"base_model_name_or_path": "/elsewhere"}')
    result = encode(prep, photos, model, tmp_path)
    assert result.code == 6 and "an adapter beside the weights is not in the fingerprint" in result.err


@pytest.mark.parametrize("links", [True, False])
def test_rows_do_not_depend_on_how_the_files_are_handed_over(model, tiny_model, monkeypatch, links):
    def no_links(*_: object) -> None:
        raise OSError("no privilege")

    if not links:
        monkeypatch.setattr("prep.models.checkpoints.staging.os.symlink", no_links)
    for folder in (model / "vae", model / "text_encoder"):
        (folder / "pytorch_model.bin").write_bytes(b"no pickle")
    np.testing.assert_array_equal(hidden(model), hidden(tiny_model))
    pixels = np.full((1, 64, 64, 3), 77, np.uint8)
    rows = [VaeEncoder(one, device="cpu", compute="float32", dtype="float32").encode(pixels)[0]["latent"]
            for one in (model, tiny_model)]
    np.testing.assert_array_equal(*rows)


def replace_weights(path: Path) -> None:
    tensors = load_file(path)
    save_file({name: value * 1.5 for name, value in tensors.items()}, path.with_name("new"), metadata={"format": "pt"})
    path.with_name("new").replace(path)


@pytest.mark.few("VAE")
@pytest.mark.parametrize(("part", "what"), [
    (VAE, "VAE"), ("tokenizer/special_tokens_map.json", "text encoder"),
    pytest.param("text_encoder/model.safetensors", "text encoder", marks=pytest.mark.slow)])
def test_a_model_that_changes_after_its_digest_makes_no_rows(prep, photos, model, tmp_path, monkeypatch, part, what):
    """Rows of the new weights would lie under the keys of the old ones."""
    from prep.encode import execute

    begin = execute._run_engine

    def changed(*arguments: object) -> object:
        if part.endswith(".json"):
            (model / part).write_text((model / part).read_text() + "\n")
        else:
            replace_weights(model / part)
        return begin(*arguments)

    monkeypatch.setattr(execute, "_run_engine", changed)
    expected = (vae_fingerprint if what == "VAE" else text_fingerprint)(model)[:12]
    result = encode(prep, photos, model, tmp_path)
    found = (vae_fingerprint if what == "VAE" else text_fingerprint)(model)[:12]
    assert result.code == 6 and (f"the {what} of {model} changed while this command ran: its fingerprint is {found}, "
                                 f"expected {expected}") in result.err
    assert "hint: wait until no program writes to the model" in result.err
    kept = {path.parts[-2] for path in (tmp_path / "cache" / "shards").glob("*/*/*/zarr.json")}
    assert "latent" not in kept and ("hidden" in kept) is (what == "VAE")
    monkeypatch.undo()
    assert encode(prep, photos, model, tmp_path).code == 0


def test_weights_in_memory_are_no_mapping_of_the_file(model):
    vae = load_vae(model, torch.float32)
    before = {name: value.clone() for name, value in vae.state_dict().items()}
    with (model / VAE).open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\0" * 4096)
    assert all(torch.equal(value, before[name]) for name, value in vae.state_dict().items())


def test_what_a_library_cannot_read_is_no_bug(model):
    """A dtype that no library knows."""
    data = (model / VAE).read_bytes()
    (model / VAE).write_bytes(data.replace(b'"F32"', b'"F99"', 1))
    with pytest.raises(ModelError) as error:
        load_vae(model, torch.float32)
    assert error.value.message.startswith(f"{model / VAE} has a tensor of ")
    assert "F99, expected one of: F64, F32" in error.value.message
    assert error.value.hint.startswith("download the model again")


@pytest.mark.parametrize(("version", "keyword"), [("4.50.0", "torch_dtype"), ("4.55.4", "torch_dtype"),
                                                  ("4.56.0", "dtype"), ("4.57.0.dev0", "dtype"), ("5.0.0rc1", "dtype"),
                                                  ("5.23.0", "dtype")])
def test_each_version_of_transformers_gets_its_own_keyword(version, keyword):
    assert dtype_keyword(version) == keyword


def test_bitsandbytes_asks_for_no_kernels():
    logger = logging.getLogger("bitsandbytes")
    before = logger.level
    try:
        logger.setLevel(logging.NOTSET)
        quiet_libraries()
        assert not logging.getLogger("bitsandbytes.backends.cpu.ops").isEnabledFor(logging.WARNING)
    finally:
        logger.setLevel(before)


@pytest.mark.parametrize("error", [
    MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    OSError(errno.ENOMEM, "Cannot allocate memory"), SafetensorError("Cannot allocate memory (os error 12)")],
    ids=lambda error: type(error).__name__)
def test_too_little_memory_is_no_broken_download(model, monkeypatch, error):
    def fail(*_args, **_options):
        raise error

    monkeypatch.setattr("prep.models.checkpoints.stored._read", fail)
    with pytest.raises(OutOfMemoryError) as caught:
        load_vae(model, torch.float32)
    assert caught.value.exit_code == 9 and "too little memory to load the VAE" in caught.value.message
    assert "download" not in caught.value.hint and "--encoder-memory" in caught.value.hint


@pytest.mark.parametrize(("quantization", "bytes_of"), [
    ("none", 2.0), ("fp8", 1.0), ("nf4", 0.5), ("int8", 1.0), ("fp8-w8a8", 1.0)])
def test_memory_that_is_not_there_is_said_before_it_is_taken(model, monkeypatch, quantization, bytes_of):
    """The system would end the process otherwise, without a word."""
    settings = parse({"precision": "bf16", "quantization": quantization}, "test")
    values = load_file(model / "unet" / "diffusion_pytorch_model.safetensors").values()
    size = int(sum(value.numel() * (bytes_of if value.ndim == 2 else 2) for value in values))
    monkeypatch.setattr("prep.models.loading.available", lambda: size)
    load(model, settings, "epsilon", torch.device("cpu"), adapt=False)
    monkeypatch.setattr("prep.models.loading.available", lambda: size - 1)
    monkeypatch.delattr("prep.models.checkpoints.stored._read")
    with pytest.raises(OutOfMemoryError) as caught:
        load(model, settings, "epsilon", torch.device("cpu"), adapt=False)
    assert caught.value.exit_code == 9 and "download" not in caught.value.hint
    assert caught.value.message == (f"the denoiser in {model / 'unet'} takes {format_bytes(size)} of memory, and "
                                    f"{format_bytes(size - 1)} are available")
    assert "quantization" in caught.value.hint


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_text_encoders_are_copied_once(model, monkeypatch, dtype):
    """Out of their mapped file, as it may change; what is cast has memory of its own already."""
    cloned, clone = [], torch.Tensor.clone
    family, files = FAMILIES["sd15"], text_files(model)
    monkeypatch.setattr(torch.Tensor, "clone", lambda value: cloned.append(value) or clone(value))
    encoder = load_encoder(model, family, "text_encoder", files, dtype)
    monkeypatch.undo()
    assert bool(cloned) == (dtype == torch.float32)
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    with (model / "text_encoder" / "model.safetensors").open("r+b") as file:
        file.seek(-4096, 2)
        file.write(b"\0" * 4096)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())


def test_memory_for_a_text_encoder_is_asked_for_before_it_is_loaded(model, monkeypatch):
    family, files = FAMILIES["sd15"], text_files(model)
    encoder = load_encoder(model, family, "text_encoder", files, torch.bfloat16)
    size = sum(value.nbytes for value in encoder.parameters())
    monkeypatch.setattr("prep.models.loading.available", lambda: size)
    load_encoder(model, family, "text_encoder", files, torch.bfloat16)
    monkeypatch.setattr("prep.models.loading.available", lambda: size - 1)
    with pytest.raises(OutOfMemoryError) as caught:
        load_encoder(model, family, "text_encoder", files, torch.bfloat16)
    assert caught.value.exit_code == 9 and caught.value.message.startswith(
        f"the text encoder in {model / 'text_encoder'} takes ") and "--encoder-memory" in caught.value.hint
