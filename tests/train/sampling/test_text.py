"""Text rows that `train sample --prompt` makes itself."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from prep.errors import ModelError
from prep.loader.index import open_index
from prep.models.text import encoder
from prep.recipe.prompts import parse_prompt
from train.sampling import text
from train.sampling.text import encode_prompts

CPU = torch.device("cpu")


def test_rows_of_the_cache_are_taken_from_it_and_no_encoder_is_loaded(make, tiny_model, monkeypatch):
    made = make()
    monkeypatch.setattr(text, "TextEncoder", None)
    index = open_index(made.manifest)
    (one,) = encode_prompts(index, tiny_model, [parse_prompt("a red circle --n blurry --d 3", "x")], CPU)
    assert one.prompt == "a red circle" and one.settings.seed == 3
    assert not isinstance(one.positive, torch.Tensor) and not isinstance(one.negative, torch.Tensor)
    (one,) = encode_prompts(index, tiny_model, [parse_prompt("a red circle", "x")], CPU)
    assert one.negative == index.ref(**made.manifest.document["prompts"]["unconditional"])


def test_rows_of_another_shape_are_refused(make, tiny_model):
    """The rows of this small manifest have 8 tokens, those of the model 77."""
    index = open_index(make().manifest)
    with pytest.raises(ModelError, match=r"the text encoder of .*tiny returns rows {.hidden.: \(77, 32\)}, expected "
                                         r"{.hidden.: \(8, 32\)}, as in the cache") as caught:
        encode_prompts(index, tiny_model, [parse_prompt("unheard of", "x")], CPU)
    assert caught.value.hint == "pass the model that encoded the cache: --model"


def test_a_row_that_is_not_finite_is_refused(make, tiny_model, monkeypatch):
    monkeypatch.setattr(encoder.TextEncoder, "encode", lambda self, texts, **options: [None for _ in texts])
    with pytest.raises(ModelError, match=r"the text encoder of .*tiny returns values that are not finite for "
                                         r"'unheard of'"):
        encode_prompts(open_index(make().manifest), tiny_model, [parse_prompt("unheard of", "x")], CPU)


def test_no_text_encoder_is_left_in_memory(make, tiny_model, monkeypatch):
    load, encoders = encoder.load_encoder, []

    def watched(*args):
        encoders.append(weakref.ref(found := load(*args)))
        return found

    monkeypatch.setattr(encoder, "load_encoder", watched)
    monkeypatch.setattr(text, "is_shape_of", lambda *_: True)
    index = open_index(make().manifest)
    before = gc.get_threshold()
    gc.set_threshold(0)  # by chance, the collector would find it
    try:
        encode_prompts(index, tiny_model, [parse_prompt("unheard of", "x")], CPU)
    finally:
        gc.set_threshold(*before)
    assert encoders and encoders[0]() is None
