"""Texts embedded into the space of pictures: rows as the library makes them, remembered by model and text."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
from safetensors.torch import load_file, save_file
from vision_models import READING, build, library_texts

from prep.dataset.facts import open_facts
from prep.embedding.survey import open_vision
from prep.errors import ModelError
from prep.fs.memo import Memo, memo_path
from prep.models.vision import text_encoder, texts
from prep.progress import silent

TEXTS = ["a red circle", "A Red, Circle!", "two blue squares, éclair", "the fox " * 60, '{"tags": "a, b"}', "x"]


@pytest.fixture(scope="module", params=READING)
def folder(request, tmp_path_factory):
    """A model that reads texts."""
    return build(tmp_path_factory.mktemp("reading") / request.param, request.param, reads=True)


@pytest.fixture(autouse=True)
def own_memory(monkeypatch, tmp_path):
    """A memory for each test."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "own"))


def opened(folder):
    return open_vision(str(folder), open_facts())


def memory():
    return Memo(memo_path(*texts.MEMORY))


def test_rows_are_those_of_the_library_and_remembered(folder, monkeypatch):
    model, kind = opened(folder), folder.name
    assert model.reading.tokens == (77 if kind == "clip" else 64)
    kept = memory()
    lacking = texts.lacking_texts(model, [*TEXTS, " ", "", TEXTS[0]], kept)
    assert lacking == TEXTS
    texts.embed_texts(model, lacking, kept, device="cpu", progress=silent)
    kept.close()
    found, rows = texts.remembered_rows(memory(), model.expected.digest, [*TEXTS, "unheard of"], model.width)
    assert found == TEXTS and rows.dtype == np.float16
    wanted = library_texts(folder, kind, TEXTS)
    np.testing.assert_allclose(rows.astype(np.float32), wanted, atol=2e-3)
    apart = np.abs(wanted[:, None] - wanted).max(axis=2) + np.eye(len(TEXTS))
    assert apart[2:, 2:].min() > 0.02  # texts differ
    monkeypatch.setattr(text_encoder, "TextEncoder", lambda *_, **__: pytest.fail("the model is loaded again"))
    texts.embed_texts(model, texts.lacking_texts(model, TEXTS, memory()), memory(), device="cpu", progress=silent)
    assert texts.remembered_rows(memory(), model.expected.digest, TEXTS, model.width + 1)[0] == []


def test_another_tokenizer_or_model_embeds_again(folder, tmp_path):
    model, kept = opened(folder), memory()
    texts.embed_texts(model, texts.lacking_texts(model, TEXTS, kept), kept, device="cpu", progress=silent)
    copy = shutil.copytree(folder, tmp_path / folder.name)
    config = copy / "tokenizer_config.json"
    said = json.loads(config.read_text())
    config.write_text(json.dumps({**said, "name_or_path": "elsewhere"}))
    assert texts.lacking_texts(opened(copy), TEXTS, kept) == []
    config.write_text(json.dumps({**said, "cls_token": "x"}))
    changed = opened(copy)
    assert texts.lacking_texts(changed, TEXTS, kept) == TEXTS and changed.expected.digest == model.expected.digest
    for reading, wanted in ((model.reading, TEXTS), (changed.reading, [])):
        assert texts.remembered_rows(kept, model.expected.digest, TEXTS, model.width, reading.digest)[0] == wanted
    with pytest.raises(ModelError, match=r"the tokenizer in .* changed while this command ran: its fingerprint is"):
        texts.embed_texts(model.__class__(**{name: getattr(changed if name == "folder" else model, name)
                                             for name in model.__slots__}), ["a"], kept, device="cpu", progress=silent)
    for name in ("tokenizer_config.json", "tokenizer.json", "spiece.model"):
        (copy / name).unlink(missing_ok=True)
    assert opened(copy).reading is None  # it sees pictures all the same


def _changed(name, **values):
    def change(folder):
        path = folder / name
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
    return change


def _broken(folder):
    for name in ("tokenizer.json", "spiece.model"):
        if (folder / name).exists():
            (folder / name).write_text("{")


def _without_numbers(folder):
    path, name = folder / "model.safetensors", "text_model.final_layer_norm.weight"
    tensors = {key: value.clone() for key, value in load_file(path).items()}
    path.unlink()
    save_file(tensors | {name: tensors[name] * float("nan")}, path, metadata={"format": "pt"})


FOX = {"content": "fox", "lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": False}
CONFIG = "tokenizer_config.json"
FAULTS = [(_broken, "the tokenizer in "), (_without_numbers, "makes no finite numbers of 1 text"),
          (_changed(CONFIG, auto_map={"AutoTokenizer": ["a.B", None]}), "asks for custom code, which is never run"),
          (_changed(CONFIG, model_max_length="x"), "cannot load the tokenizer in "),
          (_changed(CONFIG, added_tokens_decoder={"100000": FOX}, tokenizer_class="SiglipTokenizer"),
           "makes the token 100000, but the model knows 520, numbered from 0")]


@pytest.mark.parametrize(("spoil", "said"), FAULTS, ids=["broken", "nan", "code", "length", "token"])
def test_faulty_files_of_texts_stop_no_command(folder, tmp_path, spoil, said):
    """Pictures have been embedded by then: what is wrong is a note, and texts have no rows."""
    if "100000" in said and folder.name != "siglip":
        pytest.skip("only SigLIP's class takes tokens from that file alone")
    spoil(copy := shutil.copytree(folder, tmp_path / folder.name))
    done = texts.embed_lacking(opened(copy), ["the fox"], kept := memory(), device="cpu", progress=silent)
    assert (done.made, done.reused) == (0, 0)
    assert done.note.startswith("texts are not compared with pictures: ") and said in done.note
    assert texts.lacking_texts(opened(copy), ["the fox"], kept) == ["the fox"]


def test_nothing_is_embedded_where_nothing_is_remembered(folder):
    """As on Windows: each run would do it again, and find nothing."""
    done = texts.embed_lacking(opened(folder), TEXTS, Memo(None, trust=False), device="none", progress=silent)
    assert (done.made, done.reused, done.note) == (
        0, 0, "texts are not compared with pictures: on this computer nothing is remembered")


def test_a_row_that_is_not_finite_is_none_and_batches_are_halved(folder, monkeypatch):
    model, kept = opened(folder), memory()
    forward, given = text_encoder.TextEncoder._forward, []

    def tight(self, some):
        given.append(len(some))
        if len(some) > 3:
            raise MemoryError
        return [None if text == "x" else row for text, row in zip(some, forward(self, some), strict=True)]

    monkeypatch.setattr(text_encoder.TextEncoder, "_forward", tight)
    unseen = [f"{text} again" for text in TEXTS[:4]] + ["x"]
    texts.embed_texts(model, unseen, kept, device="cpu", progress=silent)
    assert given == [1, 5, 2, 2, 1] and texts.lacking_texts(model, unseen, kept) == ["x"]
    monkeypatch.setattr(text_encoder.TextEncoder, "_forward", lambda *_: 1 / 0)
    with pytest.raises(ModelError, match="cannot embed a text: division by zero"):
        texts.embed_texts(model, ["x"], kept, device="cpu", progress=silent)
    monkeypatch.setattr(text_encoder.TextEncoder, "_forward", lambda *_: [np.ones(3, np.float16)])
    with pytest.raises(ModelError, match=r"makes 3 numbers of a text, expected \d+, as of a picture"):
        texts.embed_texts(model, ["x"], kept, device="cpu", progress=silent)
