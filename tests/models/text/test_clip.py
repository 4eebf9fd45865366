"""CLIP by hand: skipped layers and windows, beside computations that share no code with it."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")

import tiny_pipelines

from prep.models.families import sd15, sdxl
from prep.models.family import TextOptions, options_of
from prep.models.text import clip

CAPTIONS = ["a red cat", "", "two dogs on a long green bench in the rain, " * 8]
CPU = torch.device("cpu")


@cache
def pipeline(family: str) -> Any:
    return tiny_pipelines.text_only(tiny_pipelines.build(family))


def rows(family: Any, pipe: Any, **options: Any) -> Any:
    with torch.no_grad():
        return family.encode(pipe, CAPTIONS, TextOptions(max_length=77, **options), CPU)


def shortened(encoder: Any, skip: int) -> Any:
    """An encoder of the same class and weights without its last layers."""
    config = type(encoder.config).from_dict(encoder.config.to_dict())
    config.num_hidden_layers -= skip
    short = type(encoder)(config).eval()
    short.load_state_dict({name: value for name, value in encoder.state_dict().items() if name in short.state_dict()})
    return short


def ids(tokenizer: Any, text: str) -> torch.Tensor:
    return tokenizer([text], padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids


def test_a_skipped_layer_is_one_that_the_encoder_might_not_have():
    pipe = pipeline("sd15")
    for skip in (1, 2):
        short = shortened(pipe.text_encoder, skip)
        for caption, row in zip(CAPTIONS, rows(sd15, pipe, clip_skip=skip), strict=True):
            with torch.no_grad():
                wanted = short(ids(pipe.tokenizer, caption)).last_hidden_state[0]
            assert torch.allclose(row["hidden"], wanted, atol=1e-6)
    assert not torch.allclose(rows(sd15, pipe)[0]["hidden"], rows(sd15, pipe, clip_skip=1)[0]["hidden"], atol=1e-3)


def test_sdxl_skips_layers_of_both_encoders():
    """One layer more than in SD 1.x, and no norm: the last hidden states of encoders that lack two layers."""
    pipe = pipeline("sdxl")
    given = [(pipe.tokenizer, shortened(pipe.text_encoder, 2)), (pipe.tokenizer_2, shortened(pipe.text_encoder_2, 2))]
    for windows in (1, 2):
        for caption, row in zip(CAPTIONS, rows(sdxl, pipe, clip_skip=1, windows=windows), strict=True):
            with torch.no_grad():
                wanted = torch.cat([encoder(ids(tokenizer, caption), output_hidden_states=True).hidden_states[-1][0]
                                    for tokenizer, encoder in given], dim=-1)
            assert torch.allclose(row["hidden"][:77], wanted, atol=1e-6)


@pytest.mark.parametrize(("name", "family"), [("sd15", sd15), ("sdxl", sdxl)])
def test_one_window_is_what_the_pipeline_encodes(name, family):
    pipe, options = pipeline(name), TextOptions(max_length=77)
    skip = 0 if family is sd15 else 1
    with torch.no_grad():
        made = clip.encode(pipe.tokenizer, pipe.text_encoder, CAPTIONS, options, CPU)
    states = clip.joined(made.hidden_states[-1 - skip], options)
    for row, state in zip(rows(family, pipe), states, strict=True):
        wanted = pipe.text_encoder.final_layer_norm(state) if family is sd15 else state
        assert torch.allclose(row["hidden"][:, :state.shape[-1]], wanted, atol=1e-6)


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize(("name", "family"), [("sd15", sd15), ("sdxl", sdxl)])
def test_windows_are_rows_of_75_tokens_side_by_side(name, family, count):
    """The tiny tokenizers have a token per letter, so a caption is cut by counting letters."""
    pipe = pipeline(name)
    whole, = family.encode(pipe, [CAPTIONS[2]], TextOptions(max_length=77, windows=count), CPU)
    tokens = [token for word in CAPTIONS[2].split()
              for token in pipe.tokenizer(word, add_special_tokens=False).input_ids]
    assert whole["hidden"].shape[0] == 77 * count and len(tokens) > 75 * count
    start, end, pad = (getattr(pipe.tokenizer, f"{mark}_token_id") for mark in ("bos", "eos", "pad"))
    for number in range(count):
        part = [start, *tokens[75 * number:75 * number + 75], end]
        given = torch.tensor([part + [pad] * (77 - len(part))])
        with torch.no_grad():
            made = pipe.text_encoder(given, output_hidden_states=True)
        wanted = made.last_hidden_state[0] if family is sd15 else made.hidden_states[-2][0]
        there = whole["hidden"][77 * number:77 * number + 77, :wanted.shape[-1]]
        assert torch.allclose(there, wanted, atol=1e-6), number


def test_short_captions_fill_the_other_windows_with_nothing():
    pipe = pipeline("sd15")
    one, many = rows(sd15, pipe), rows(sd15, pipe, windows=2)
    assert torch.allclose(many[0]["hidden"][:77], one[0]["hidden"], atol=1e-6)
    assert torch.allclose(many[0]["hidden"][77:], one[1]["hidden"], atol=1e-6)


def test_the_pooled_vector_is_that_of_the_first_window():
    pipe = pipeline("sdxl")
    for one, many in zip(rows(sdxl, pipe), rows(sdxl, pipe, windows=3), strict=True):
        assert torch.allclose(one["pooled"], many["pooled"], atol=1e-6)
        width = one["hidden"].shape[1]
        assert torch.allclose(one["hidden"], many["hidden"][:77, :width], atol=1e-6)


@pytest.mark.parametrize(("name", "family"), [("sd15", sd15), ("sdxl", sdxl)])
def test_the_row_without_a_prompt_is_as_long(name, family):
    pipe = pipeline(name)
    with torch.no_grad():
        one, three = (family.TEXT.unconditional(pipe, TextOptions(max_length=77, windows=count), CPU)
                      for count in (1, 3))
    assert three["hidden"].shape[0] == 231 and torch.equal(three["hidden"][154:], one["hidden"])
    assert one.keys() == three.keys()


def test_options_come_back_from_the_context_of_keys():
    assert options_of({"max_length": 77}) == TextOptions(max_length=77)
    assert options_of({"max_length": 77, "clip_skip": 2, "text_windows": 3}) == TextOptions(
        max_length=77, clip_skip=2, windows=3)
    assert TextOptions(max_length=77, windows=3).tokens == 231
