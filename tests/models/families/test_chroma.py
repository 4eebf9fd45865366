"""Chroma's text rows: a caption's tokens and one of padding.

Chroma's transformer ignores padding, with and without gradient checkpointing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.chroma import FAMILY
from prep.models.family import Conditions, TextOptions
from prep.models.text.lengths import LengthCounter
from train.config.load import parse
from train.models.denoiser import Denoiser, load, predict

CPU = torch.device("cpu")
LONG = "a caption of many words " * 30


@pytest.fixture(scope="module")
def pipeline() -> object:
    return tiny_pipelines.build("chroma")


def rows(pipeline, captions, most=512):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode(pipeline, captions, TextOptions(max_length=most), CPU)]


@pytest.mark.parametrize("most", [64, 512])
def test_a_row_has_the_caption_s_tokens_and_one_of_padding(pipeline, most):
    hidden, _, _, *_ = tiny_pipelines.encode_prompts(pipeline, ["a cat"], max_sequence_length=most)
    tokens = len(pipeline.tokenizer("a cat")["input_ids"])
    short, long = rows(pipeline, ["a cat", LONG], most)
    assert torch.allclose(short, hidden[0, :tokens + 1], atol=1e-6)
    assert long.shape == (most, 32), "a caption that fills the row leaves no place for padding"


def test_rows_do_not_depend_on_the_longest_row(pipeline):
    assert torch.allclose(rows(pipeline, ["a cat"], 64)[0], rows(pipeline, ["a cat", LONG])[0], atol=1e-6)


def test_the_row_without_a_prompt_is_the_encoding_of_nothing(pipeline):
    end_and_padding = 2
    row = FAMILY.text.unconditional(pipeline, TextOptions(max_length=512), CPU)["hidden"]
    assert row.shape == (end_and_padding, 32)
    assert torch.equal(row, rows(pipeline, [""])[0])


def test_lengths_are_counted(pipeline, tmp_path: Path):
    model, options = tiny_pipelines.save("chroma", tmp_path / "model"), TextOptions(max_length=512)
    assert dict(FAMILY.text.shapes(Configs(model), options)) == {"hidden": (512, 32)}
    counter = LengthCounter(model, FAMILY, options)
    sixteen = "a" * (16 - len(pipeline.tokenizer("")["input_ids"]) - 1)  # one more for T5's mark of a word's start
    assert len(pipeline.tokenizer(sixteen)["input_ids"]) == 16
    assert counter.groups(["a", sixteen[1:], sixteen, LONG]) == [16, 16, 32, 512]
    assert counter.unconditional() == 16


LENGTHS = (5, 16, 5, 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipelines.save("chroma", tmp_path_factory.mktemp("chroma") / "model")


def loaded(model: Path, *, checkpointing: bool) -> Denoiser:
    return load(model, parse({"precision": "fp32", "gradient_checkpointing": checkpointing}, ""), "flow", CPU)


def texts(padding: float) -> dict[str, torch.Tensor]:
    """Rows of unequal lengths, with `padding` behind them."""
    hidden = torch.randn(len(LENGTHS), 16, 32, generator=torch.Generator().manual_seed(0))
    mask = torch.arange(16)[None] < torch.tensor(LENGTHS)[:, None]
    return {"hidden": torch.where(mask[..., None], hidden, torch.tensor(padding)), "attention_mask": mask.byte()}


def stepped(denoiser: Denoiser, text: dict[str, torch.Tensor], chosen: Any = slice(None)) -> torch.Tensor:
    noised = torch.randn(len(LENGTHS), 16, 8, 8, generator=torch.Generator().manual_seed(1))[chosen]
    text = {name: array[chosen] for name, array in text.items()}
    time = torch.tensor([100, 300, 500, 700])[chosen]
    return predict(denoiser, noised, time, Conditions(text=text, sizes_B6=torch.zeros(len(noised), 6)))


def gradients(denoiser: Denoiser) -> dict[str, torch.Tensor]:
    found = {}
    for name, value in denoiser.parameters.items():
        assert value.grad is not None, name
        found[name], value.grad = value.grad, None
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
def test_padding_makes_no_difference(model, checkpointing):
    denoiser = loaded(model, checkpointing=checkpointing)
    together = stepped(denoiser, texts(0.0))
    assert torch.allclose(together, stepped(denoiser, texts(3.0)), atol=1e-5)
    alone = [stepped(denoiser, texts(0.0), [number]) for number in range(len(LENGTHS))]
    assert torch.allclose(together, torch.cat(alone), atol=1e-5)
    assert not torch.allclose(alone[0], alone[2], atol=1e-3)


def test_gradients_are_the_same_with_checkpointing(model):
    found = []
    for checkpointing in (False, True):
        denoiser = loaded(model, checkpointing=checkpointing)
        with torch.no_grad():
            for name, value in denoiser.parameters.items():
                if "lora_B" in name:
                    value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
        stepped(denoiser, texts(0.0)).square().mean().backward()
        found.append(gradients(denoiser))
    plain, recomputed = found
    assert plain.keys() == recomputed.keys()
    for name, value in plain.items():
        assert value.any() and torch.allclose(value, recomputed[name], rtol=1e-4, atol=1e-7), name


def test_samples_of_one_length_share_a_call_and_have_no_mask(model):
    denoiser = loaded(model, checkpointing=True)
    seen: list[dict[str, Any]] = []
    denoiser.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    stepped(denoiser, texts(0.0))
    assert [tuple(kwargs["encoder_hidden_states"].shape[:2]) for kwargs in seen] == [(2, 5), (1, 16), (1, 9)]
    assert all(kwargs["attention_mask"] is None for kwargs in seen)


def test_the_mask_of_a_batch_is_boolean_and_covers_the_picture(model):
    denoiser = loaded(model, checkpointing=False)
    seen: list[dict[str, Any]] = []
    denoiser.model.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    stepped(denoiser, texts(0.0))
    stepped(denoiser, texts(0.0), [0, 2])
    mask = seen[0]["attention_mask"]
    assert mask.dtype is torch.bool and mask.sum(dim=1).tolist() == [length + 16 for length in LENGTHS]
    assert mask[:, 16:].all() and seen[1]["attention_mask"] is None
