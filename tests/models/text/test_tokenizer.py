"""A text has the same tokens each time, whatever its tokenizer was trained with."""

from __future__ import annotations

import json

import pytest
import transformers
from tokenizers import Tokenizer, models

from prep.models.files import ComponentFiles
from prep.models.text.tokenizer import load_tokenizer

VOCABULARY = {token: number for number, token in enumerate(["?", "a", "b", "ab", "abab"])}
TEXT = "abab" * 8


@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "PixtralProcessor"])
def test_dropout_of_merges_is_off(tmp_path, name):
    """These classes take it from tokenizer.json."""
    backend = Tokenizer(models.BPE(VOCABULARY, [("a", "b"), ("ab", "ab")], dropout=0.5, unk_token="?"))
    small = {"tokenizer.json": backend.to_str().encode(), "tokenizer_config.json": b'{"model_max_length": 77}'}
    for part, data in small.items():
        (tmp_path / part).write_bytes(data)
    kind = getattr(transformers, name) if name != "PixtralProcessor" else transformers.AutoTokenizer
    drawn = {tuple(kind.from_pretrained(tmp_path)(TEXT)["input_ids"]) for _ in range(20)}
    assert len(drawn) > 1, "transformers draws no more: then nothing has to be switched off"
    tokenizer = load_tokenizer(name, ComponentFiles(folder=tmp_path, config=json.loads(small["tokenizer_config.json"]),
                                                    small=small, weights=()))
    assert {tuple(tokenizer(TEXT)["input_ids"]) for _ in range(20)} == {(VOCABULARY["abab"],) * 8}
