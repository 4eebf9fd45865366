"""What a tokenizer.json does with texts is tried in a worker, where it takes no more time or memory than it may."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_pipelines import save
from tokenizers import Tokenizer, models

from prep.errors import ModelError
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from prep.models.files import ComponentFiles
from prep.models.fingerprint import text_files
from prep.models.text import trial
from prep.models.text.pipeline import tokenizers_of
from prep.models.text.tokenizer import load_tokenizer
from prep.models.text.truncation import TruncationFinder
from prep.workers.service import Limits

LONG = "a photo of a cat sitting on a mat " * 100
# Steps grow with the cube of a text's length: none of the library's own limits ends that.
CUBIC = {"type": "Split", "pattern": {"Regex": r"[\w ]*?[\w ]*?(?!.)\w"}, "behavior": "Isolated", "invert": False}
TENFOLD = {"type": "Replace", "pattern": {"String": "o"}, "content": "o" * 10}
WORDS = {"type": "WhitespaceSplit"}


def made(folder: Path, *, config=(), **parts) -> ComponentFiles:
    """The files of a tokenizer with these parts, in `folder`."""
    document = json.loads(Tokenizer(models.WordLevel({"a": 0, "cat": 1, "x": 2}, unk_token="x")).to_str())
    small = {"tokenizer.json": json.dumps({**document, **parts}).encode(),
             "tokenizer_config.json": json.dumps({"model_max_length": 77, **dict(config)}).encode()}
    for name, data in small.items():
        (folder / name).write_bytes(data)
    return ComponentFiles(folder=folder, config=json.loads(small["tokenizer_config.json"]), small=small, weights=())


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(trial, "LIMITS", Limits(seconds=1, memory=2 << 30))


def chain(count):
    return {"type": "Sequence", "normalizers": [TENFOLD] * count}


HOSTILE = {
    "cubic": ({"pre_tokenizer": CUBIC}, "more than 1 seconds"),
    "long": ({"normalizer": chain(4)}, r"it makes \d+ characters of 3400"),
    "endless": ({"normalizer": chain(8)}, ""),
}


@pytest.mark.few("endless")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_tokenizer_that_takes_too_much_is_refused(tmp_path, quick, name):
    parts, said = HOSTILE[name]
    tokenizer = load_tokenizer("PreTrainedTokenizerFast", made(tmp_path, **parts))
    said = f"the tokenizer in {tmp_path} cannot take a text within its limits: {said}"
    for call in (lambda: tokenizer(LONG), lambda: tokenizer(["a", LONG], truncation=True),
                 lambda: tokenizer.tokenize(LONG),
                 lambda: tokenizer.backend_tokenizer.encode_batch_fast([LONG], add_special_tokens=False)):
        with pytest.raises(ModelError, match=said) as error:
            call()
        assert error.value.hint == trial.HINT
    assert len(tokenizer("a cat")["input_ids"]) == 1


@pytest.mark.slow
def test_so_is_one_whose_own_tokens_take_too_much(tmp_path, quick):
    """They are normalized when it is loaded."""
    token = {"id": 3, "content": "o" * 9, "single_word": False, "lstrip": False, "rstrip": False, "normalized": True,
             "special": False}
    for files in (made(tmp_path, normalizer=chain(8), added_tokens=[token]),
                  made(tmp_path, normalizer=chain(8), config={"pad_token": {**token, "__type": "AddedToken"}})):
        with pytest.raises(ModelError, match="cannot take a text within its limits: "):
            load_tokenizer("PreTrainedTokenizerFast", files)


def test_so_is_one_that_adds_thousands_of_tokens(tmp_path):
    added = [{"SpecialToken": {"id": "x", "type_id": 0}}] * 2000
    whole = {"type": "TemplateProcessing", "single": [*added, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [
        {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
             "special_tokens": {"x": {"id": "x", "ids": [2], "tokens": ["x"]}}}
    with pytest.raises(ModelError, match="it adds 2000 tokens to each text, expected at most 1000"):
        load_tokenizer("PreTrainedTokenizerFast", made(tmp_path, post_processor=whole))


def test_what_passes_has_the_tokens_that_it_had(tmp_path):
    parts = {"normalizer": {"type": "Lowercase"}, "pre_tokenizer": WORDS}
    tokenizer = load_tokenizer("PreTrainedTokenizerFast", made(tmp_path, **parts))
    texts = ["A cat", "", "cat dog " * 50]
    own = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer(texts)["input_ids"] == [one.ids for one in own.encode_batch(texts)]
    assert tokenizer(texts, truncation=True, max_length=3)["input_ids"][2] == [1, 2, 1]


def test_a_text_at_which_the_library_stops_is_refused(tmp_path):
    split = {**CUBIC, "pattern": {"Regex": "(a+)+$"}}
    tokenizer = load_tokenizer("PreTrainedTokenizerFast", made(tmp_path, pre_tokenizer=split))
    with pytest.raises(ModelError, match=r"within its limits: Onig: .*retry-limit-in-match"):
        tokenizer("a" * 40 + "!")


@pytest.mark.parametrize("name", sorted(FAMILIES))
def test_pipelines_whose_classes_make_their_parts_start_no_worker(tmp_path, name, monkeypatch):
    """Of the others each text is tried."""
    save(name, tmp_path)
    asked = []
    monkeypatch.setattr(trial.Trial, "_ask", lambda self, texts: asked.extend(texts))
    found = tokenizers_of(tmp_path, FAMILIES[name], text_files(tmp_path))
    for tokenizer in found.values():
        before = len(asked)
        tokenizer("a red cat")
        made_by_class = type(tokenizer).__mro__[1].__name__ not in ("TokenizersBackend", "ChatGLMTokenizer")
        assert (len(asked) == before) == made_by_class, type(tokenizer).__mro__


def test_captions_are_counted_within_limits(tmp_path, quick):
    save("cogview4", tmp_path)
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pre_tokenizer": CUBIC}))
    family = FAMILIES["cogview4"]
    with pytest.raises(ModelError, match="cannot take a text within its limits: "):
        finder = TruncationFinder(tmp_path, family, TextOptions(max_length=family.text.max_length))
        list(finder.find([LONG]))


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    files = made(tmp_path)
    with pytest.raises(ModelError, match=r"cannot load the tokenizer in .*: tokenizer.json is no tokenizer: "):
        load_tokenizer("PreTrainedTokenizerFast", replace(files, small={**files.small, "tokenizer.json": b"[1]"}))
