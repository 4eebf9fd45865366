"""Kolors' text rows: ChatGLM3's states of captions padded on the left, and one of the last token.

Its classes are diffusers' own, and its tokenizer reads its file with sentencepiece.
"""

from __future__ import annotations

import importlib.util
import io
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_files import change_json
from pictures import draw

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")
pytest.importorskip("sentencepiece", reason="its tokenizer needs it")

import tiny_pipelines

from prep.errors import ModelError, UsageError
from prep.models import family as families
from prep.models.checkpoints.classes import imported
from prep.models.configs import Configs
from prep.models.device.peaks import text_peak
from prep.models.families.kolors import FAMILY
from prep.models.family import TextOptions
from prep.models.fingerprint import text_files, text_fingerprint
from prep.models.text.encoder import TextEncoder
from prep.models.text.pipeline import assemble, load_encoder, tokenizers_of
from prep.models.text.truncation import TruncationFinder

CPU, OPTIONS = torch.device("cpu"), TextOptions(max_length=256)
CAPTIONS = ["a cat", "", "two dogs on a long green bench " * 20, "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipelines.save("kolors", tmp_path_factory.mktemp("kolors") / "model")


@pytest.fixture
def copy(tmp_path) -> Path:
    return tiny_pipelines.save("kolors", tmp_path / "model")


@pytest.fixture(scope="module")
def encoder(model) -> TextEncoder:
    return TextEncoder(model, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32")


def test_rows_are_the_pipeline_s(model, encoder):
    """Several at once are each alone, whatever lies beside them; also one that fills the row, and an empty one."""
    assert dict(FAMILY.text.shapes(Configs(model), OPTIONS)) == dict(encoder.shapes) == {
        "hidden": (256, 32), "pooled": (32,)}
    pipeline = tiny_pipelines.load(model)
    hidden, _, pooled, _ = tiny_pipelines.encode_prompts(pipeline, CAPTIONS)
    for number, row in enumerate(encoder.encode(CAPTIONS)):
        (alone,) = encoder.encode([CAPTIONS[number]])
        assert row["hidden"].dtype == np.float32 and not np.array_equal(row["pooled"], row["hidden"][-1])
        for name, theirs in (("hidden", hidden), ("pooled", pooled)):
            np.testing.assert_allclose(row[name], theirs[number], rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(row[name], alone[name], rtol=1e-5, atol=1e-6)


def test_they_are_chatglm_s_states_by_hand(model, encoder):
    """Before its last layer, and after it, without the norm; positions are counted from the first token of the text."""
    pipeline = tiny_pipelines.load(model)
    ids = pipeline.tokenizer("a cat")["input_ids"]
    states = []
    for layer in pipeline.text_encoder.encoder.layers:
        layer.register_forward_hook(lambda _, args, made: states.append((args[0], made[0])))
    with torch.no_grad():
        pipeline.text_encoder(torch.tensor([ids]))
    (row,) = encoder.encode(["a cat"])
    np.testing.assert_allclose(row["hidden"][-len(ids):], states[-1][0][:, 0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(row["pooled"], states[-1][1][-1, 0], rtol=1e-5, atol=1e-6)


def test_a_shorter_row_has_less_padding_and_the_same_text(model, encoder):
    short = TextEncoder(model, FAMILY, TextOptions(max_length=64), device="cpu", compute="float32", dtype="float32")
    (one,), (other,) = short.encode(["a cat"]), encoder.encode(["a cat"])
    assert one["hidden"].shape == (64, 32)
    np.testing.assert_allclose(one["hidden"][-7:], other["hidden"][-7:], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(one["pooled"], other["pooled"], rtol=1e-5, atol=1e-6)


def test_the_row_without_a_prompt_is_that_of_an_empty_one(copy, encoder):
    """Also where the pipeline would have zeros: it has no pooled vector then, and fails."""
    empty = encoder.encode([""])[0]
    for zeros in (False, True):
        change_json(copy / "model_index.json", force_zeros_for_empty_prompt=zeros)
        row = TextEncoder(copy, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32").unconditional()
        assert all(np.array_equal(row[name], empty[name]) for name in empty)
    pipeline = tiny_pipelines.load(copy)
    with pytest.raises(AttributeError, match="repeat"):
        pipeline("a cat", num_inference_steps=2, height=64, width=64)


def test_what_is_not_read_of_a_long_caption_is_known(model):
    finder = TruncationFinder(model, FAMILY, OPTIONS)
    counts = finder.count(CAPTIONS)
    assert (counts.encoder, counts.limit) == ("ChatGLM", 254) and counts.tokens[:2] == (6, 0)  # one starts the text
    found = list(finder.find(CAPTIONS))
    assert [loss is None for loss in found] == [True, True, False, True]
    assert found[2].tokens - found[2].read == len(found[2].lost) + found[2].lost.startswith(" ")


def test_code_that_its_config_asks_for_is_neither_run_nor_refused(copy):
    """The published configs name the code of ChatGLM's authors, which diffusers has."""
    for part in ("text_encoder/config.json", "tokenizer/tokenizer_config.json"):
        assert "auto_map" in json.loads((copy / part).read_bytes())
    change_json(copy / "text_encoder" / "config.json", transformers_weights="other.safetensors")
    with pytest.raises(ModelError, match="names weights that the fingerprint does not cover"):
        text_files(copy)


def test_the_tokenizer_s_file_is_in_the_fingerprint_and_must_be_there(copy):
    path, before = copy / "tokenizer" / "tokenizer.model", text_fingerprint(copy)
    (copy / "tokenizer" / "tokenizer.json").write_text("{}")  # which nothing reads
    assert text_fingerprint(copy) == before
    path.write_bytes(path.read_bytes() + b"\n")
    assert text_fingerprint(copy) != before
    path.unlink()
    with pytest.raises(ModelError, match=r"tokenizer has no vocabulary, expected tokenizer\.model"):
        text_files(copy)


@pytest.mark.parametrize("harm", [lambda data: b"", lambda data: data[:99], lambda data: b"\xff" * 64])
def test_a_damaged_tokenizer_is_an_error(copy, harm):
    """A worker reads it first."""
    path = copy / "tokenizer" / "tokenizer.model"
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ModelError, match=r"tokenizer in .*tokenizer cannot ") as error:
        tokenizers_of(copy, FAMILY, text_files(copy))
    assert error.value.hint == "take the tokenizer.model of the model's authors"


def test_a_tokenizer_that_makes_millions_of_characters_is_refused(copy, tmp_path):
    """Of a text that it is given; others have their tokens."""
    import sentencepiece

    rules, written = tmp_path / "rules.tsv", io.BytesIO()
    rules.write_text(f"6F\t{' '.join(['6F'] * 12_000)}\n")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a cat"]), model_writer=written, model_type="char", vocab_size=200,
        hard_vocab_limit=False, normalization_rule_tsv=str(rules), minloglevel=2)
    (copy / "tokenizer" / "tokenizer.model").write_bytes(written.getvalue())
    tokenizer = tokenizers_of(copy, FAMILY, text_files(copy))["tokenizer"]
    assert len(tokenizer(["a cat"])["input_ids"][0]) == 2 + 6
    with pytest.raises(ModelError, match=r"cannot take a text within its limits: it makes \d+ characters of 100$"):
        tokenizer(["a cat", "o" * 100], truncation=True, max_length=8)


def test_its_model_is_made_where_torch_is_told_to(model):
    """diffusers makes all of it in host memory by default."""
    kind = imported(("kolors", "ChatGLMModel"))
    assert kind.__name__ == "ChatGLMModel" and kind.__mro__[1].__name__ == "ChatGLMModel"
    with torch.device("meta"):
        made = kind(kind.config_class.from_pretrained(model / "text_encoder"))
    assert {value.device.type for value in (*made.parameters(), *made.buffers())} == {"meta"}


def test_it_is_loaded_whole_and_its_memory_is_known(model):
    loaded = load_encoder(model, FAMILY, "text_encoder", text_files(model), torch.bfloat16)
    theirs = tiny_pipelines.load(model).text_encoder
    assert all(torch.equal(value, theirs.state_dict()[name].bfloat16()) for name, value in loaded.state_dict().items())
    peak = text_peak(model, FAMILY, OPTIONS, "bfloat16", 4)
    weights = sum(value.numel() for value in (*loaded.parameters(), *loaded.buffers()))
    assert (peak.name, peak.weights) == ("text encoder", pytest.approx(2 * weights, rel=0.01))
    assert peak.each > 256 * 32 * 4 * 2  # its states in four places


@pytest.fixture
def without(monkeypatch):
    """sentencepiece as if it were not installed."""
    usual = importlib.util.find_spec
    monkeypatch.setattr(families, "find_spec", lambda name: None if name == "sentencepiece" else usual(name))


def test_without_its_library(model, without, prep, train, tmp_path):
    said = "text and sample pictures of family 'kolors' need the package sentencepiece, which is not installed"
    for call in (lambda: tokenizers_of(model, FAMILY, text_files(model)), lambda: assemble(model, FAMILY, {})):
        with pytest.raises(UsageError, match=said) as error:
            call()
        assert error.value.hint == "pip install 'latentry[kolors]'"
    draw(tmp_path / "photos" / "a.png", (64, 64), seed=1).with_suffix(".txt").write_text("a cat")
    result = prep("encode", tmp_path / "photos", "--model", model, "--cache", tmp_path / "cache", "-o",
                  tmp_path / "m.json", "--resolution", 64, "--step", 32, "--device", "cpu")
    assert (result.code, said in result.err, "latentry[kolors]" in result.err) == (2, True, True), result.err


@pytest.mark.slow
def test_rows_train_without_its_library_but_draw_no_pictures(model, prep, train, tmp_path, monkeypatch):
    draw(tmp_path / "photos" / "a.png", (64, 64), seed=1).with_suffix(".txt").write_text("a cat")
    result = prep("encode", tmp_path / "photos", "--model", model, "--cache", tmp_path / "cache", "-o",
                  tmp_path / "m.json", "--resolution", 64, "--step", 32, "--device", "cpu")
    assert result.code == 0, result.err
    monkeypatch.setattr(families, "find_spec", lambda name: None)
    check = ["check", tmp_path / "m.json", "--set", "batch_size=1"]
    assert "hint: pip install 'latentry[kolors]', or --set sample.every=0" in train(*check).err
    assert train(*check, "--set", "sample.every=0").code == 0


def test_sizes_are_given_as_to_sdxl():
    unet = tiny_pipelines.build("kolors").unet
    text = {"hidden": torch.randn(1, 8, 32), "pooled": torch.randn(1, 32)}
    answers = []
    for sizes in ([64.0, 64, 0, 0, 64, 64], [999.0, 64, 0, 0, 64, 64]):
        with torch.no_grad():
            answers.append(FAMILY.predict(unet, torch.ones(1, 4, 8, 8), torch.tensor([1099]), SimpleNamespace(
                text=text, sizes_B6=torch.tensor([sizes]))))
    assert answers[0].shape == (1, 4, 8, 8) and not torch.allclose(*answers, atol=1e-5)
