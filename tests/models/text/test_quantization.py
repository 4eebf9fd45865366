"""Text encoders in 8 and 4 bits: near the whole ones, alike alone and in a batch, with keys of their own."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from pictures import draw

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")
pytest.importorskip("bitsandbytes")

import tiny_pipelines

from prep.errors import UsageError
from prep.models.device.offload import compute_on, weight_bytes
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions, options_of
from prep.models.fingerprint import text_files
from prep.models.text import quantization
from prep.models.text.encoder import TextEncoder
from prep.models.text.pipeline import load_encoder
from prep.models.text.quantization import encoder_bytes, is_quantized, require_library
from prep.models.weights import read_shapes

BITS = (pytest.param("8bit", marks=pytest.mark.slow), "4bit")
CAPTIONS = ["two dogs on a green bench", "a cat", "a very long photo of nothing in particular " * 3]
SMALL = ("--resolution", 64, "--step", 32, "--device", "cpu", "--quiet")


@pytest.fixture(scope="module")
def sd3(tmp_path_factory):
    """Two CLIP encoders and T5."""
    path = tmp_path_factory.mktemp("sd3") / "model"
    tiny_pipelines.save("sd3", path)
    return path


def encoder_of(model, quantization, *, compute="bfloat16", memory=None):
    return TextEncoder(model, FAMILIES["sd3"], TextOptions(max_length=32, quantization=quantization), device="cpu",
                       compute=compute, dtype="float32", memory=memory)


def t5_of(model, quantization="none", dtype=torch.bfloat16):
    return load_encoder(model, FAMILIES["sd3"], "text_encoder_3", text_files(model), dtype, quantization)


def hidden(encoder, ids=((1, 5, 7, 2), (3, 4, 2, 2))):
    with torch.inference_mode():
        return encoder(torch.tensor(ids)).last_hidden_state.float()


def far(found, wanted):
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize(("bits", "least", "most"), [
    pytest.param("8bit", 0.001, 0.03, marks=pytest.mark.slow), pytest.param("4bit", 0.03, 0.5, marks=pytest.mark.slow)])
def test_rows_are_near_those_of_whole_weights(sd3, bits, least, most):
    """What CLIP makes of a caption is not quantized: the same bits.

    4 bits are 0.14 off, or 0.31: on some processors bitsandbytes 0.50 mixes up the scales of matrices whose rows are
    no multiple of 64 long. Those of published encoders are.
    """
    whole, found = (encoder_of(sd3, kind).encode(CAPTIONS) for kind in ("none", bits))
    for row, wanted in zip(found, whole, strict=True):
        np.testing.assert_array_equal(row["pooled"], wanted["pooled"])
        assert least < far(row["hidden"], wanted["hidden"]) < most


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_a_row_does_not_depend_on_the_others_of_its_batch(sd3, bits, monkeypatch):
    """With a threshold that values of a tiny model exceed: one caption would keep columns of the others whole."""
    options = quantization.bitsandbytes_options
    monkeypatch.setattr("prep.models.text.pipeline.bitsandbytes_options", lambda *given: {
        **options(*given), **({"llm_int8_threshold": 2.0} if bits == "8bit" else {})})
    encoder = encoder_of(sd3, bits, compute="float32")
    together = encoder.encode(CAPTIONS)
    for caption, row in zip(CAPTIONS, together, strict=True):
        (alone,) = encoder.encode([caption])
        for name, values in row.items():
            np.testing.assert_allclose(values, alone[name], rtol=1e-4, atol=1e-4 * np.abs(alone[name]).max())


@pytest.mark.parametrize("bits", BITS)
def test_a_layer_at_a_time_gives_the_same_and_keeps_nothing(sd3, bits):
    """Layers of an encoder beyond --encoder-memory are copied, with the scales of their weights."""
    wanted, encoder = hidden(t5_of(sd3, bits)), t5_of(sd3, bits)
    before = weight_bytes(encoder)
    compute_on(encoder, torch.device("cpu"))
    for _ in range(2):
        assert torch.equal(hidden(encoder), wanted)
    assert weight_bytes(encoder) == before
    states = [part.state for part in encoder.modules() if hasattr(part, "state")]
    assert len(states) == (12 if bits == "8bit" else 0) and all(one.CB is None for one in states)


@pytest.mark.slow
@pytest.mark.parametrize("bits", BITS)
def test_in_float32_the_rest_computes_in_float32_and_then_again_as_before(sd3, bits):
    encoder = encoder_of(sd3, bits)
    (usual,) = encoder.encode(CAPTIONS[:1])
    with encoder._encoders.in_float32():
        (again,) = encoder.encode(CAPTIONS[:1])
        module = encoder._encoders._module
        assert {part.compute_dtype for part in module.modules() if hasattr(part, "compute_dtype")} <= {torch.float32}
        assert module.dtype == torch.float32
    assert 0 < far(again["hidden"], usual["hidden"]) < 0.05
    (after,) = encoder.encode(CAPTIONS[:1])
    np.testing.assert_array_equal(after["hidden"], usual["hidden"])


def test_one_encoder_alone_computes_in_float32_and_then_again_as_before(tmp_path):
    tiny_pipelines.save("zimage", tmp_path / "model")
    encoder = TextEncoder(tmp_path / "model", FAMILIES["zimage"], TextOptions(max_length=64, quantization="4bit"),
                          device="cpu", compute="bfloat16", dtype="float32")
    module = encoder._encoders._module
    dtypes = [tensor.dtype for tensor in (*module.parameters(), *module.buffers())]
    with encoder._encoders.in_float32():
        assert module.dtype == torch.float32
        encoder.encode(CAPTIONS[:1])
    assert [tensor.dtype for tensor in (*module.parameters(), *module.buffers())] == dtypes
    assert {part.compute_dtype for part in module.modules() if hasattr(part, "compute_dtype")} == {torch.bfloat16}


# Every class of text encoder that a family has.
@pytest.mark.few("flux", "zimage")
@pytest.mark.parametrize("build", ["sd3", "zimage", "qwenimage", "flux2", "flux2_klein", "lumina2", "cogview4",
                                   "auraflow", "krea2", "flux3", "kolors"])
def test_bytes_are_told_from_the_headers_of_the_files(build, tmp_path):
    with tiny_pipelines.known_warnings():
        tiny_pipelines.save(build, tmp_path / "model")
    family = next(one for name, one in FAMILIES.items() if name.replace("-", "_") == build)
    files = text_files(tmp_path / "model")
    name = sorted(files.encoders)[-1]
    shapes = read_shapes(files.encoders[name].weights)
    whole = weight_bytes(load_encoder(tmp_path / "model", family, name, files, torch.bfloat16))
    for bits in ("8bit", "4bit"):
        encoder = load_encoder(tmp_path / "model", family, name, files, torch.bfloat16, bits)
        stored = encoder.state_dict()  # ChatGLM's has its frequencies
        buffers = sum(buffer.nbytes for name, buffer in encoder.named_buffers() if name not in stored)
        told = encoder_bytes(type(encoder).__name__, shapes, bits, 2)
        assert told == weight_bytes(encoder) - buffers < whole


def test_what_is_quantized():
    assert is_quantized("T5EncoderModel", "8bit") and is_quantized("Qwen3Model", "4bit")
    assert not is_quantized("CLIPTextModelWithProjection", "8bit") and not is_quantized("T5EncoderModel", "none")


def test_without_bitsandbytes(sd3, monkeypatch):
    monkeypatch.setattr(quantization, "find_spec", lambda name: None)
    require_library("none")
    with pytest.raises(UsageError) as caught:
        encoder_of(sd3, "4bit")
    assert caught.value.message == ("text encoders with weights of 4 bits need the package bitsandbytes, which is not "
                                    "installed")
    assert caught.value.hint == "pip install 'latentry[bnb]'"


def test_a_context_says_how_text_was_encoded():
    context = {"max_length": 77, "quantization": "8bit"}
    assert options_of(context) == replace(options_of({"max_length": 77}), quantization="8bit")


@pytest.mark.slow
def test_from_the_cache_to_sample_prompts(prep, sd3, tmp_path, caplog):
    """`prep prompts` and `prep diff` follow the manifest; `--dry-run` names the smaller weights."""
    draw(tmp_path / "photos" / "0.png", (64, 64), seed=0).with_suffix(".txt").write_text("a red cat")
    words = ("encode", tmp_path / "photos", "--model", sd3, "--cache", tmp_path / "cache", *SMALL)
    assert prep(*words, "-o", tmp_path / "whole.json").code == 0
    asked = (*words, "-o", tmp_path / "small.json", "--text-quantization", "8bit")
    sizes = [prep(*words, "--dry-run", "--json", *more).json["estimate"]["weights"]
             for more in (("--clip-skip", 1), ("--text-quantization", "8bit"))]
    assert sizes == [weight_bytes(t5_of(sd3)), weight_bytes(t5_of(sd3, "8bit"))]
    assert prep(*asked, "--dry-run", "--measure", "--json").json["estimate"]["measured"]["rows"] == {"text": 2}
    logging.getLogger("bitsandbytes").setLevel(logging.NOTSET)
    result = prep(*asked, "--json")
    assert result.json["encoded"] == {"latent": 0, "mask": 0, "text": 2}, result.err
    assert not [one for one in caplog.records if one.name.startswith("bitsandbytes")], "no line for each layer"
    contexts = [json.loads((tmp_path / f"{name}.json").read_text())["fields"]["text"]["context"]
                for name in ("whole", "small")]
    assert contexts[1] == {**contexts[0], "quantization": "8bit"} and "quantization" not in contexts[0]
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\n")
    result = prep("prompts", tmp_path / "prompts.txt", "--manifest", tmp_path / "small.json", "--device", "cpu",
                  "--json")
    assert (result.json["encoded"], result.json["reused"]) == (1, 2), result.err
    said = prep("diff", tmp_path / "whole.json", tmp_path / "small.json").out
    assert "the weights of T5 or the language model: 8bit, were the default" in said
