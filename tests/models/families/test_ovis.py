"""Ovis-Image's text rows: behind a system prompt, without the template's first tokens, with zeros at the end.

Ovis-Image's transformer is given numbered text tokens, in float32 whatever the precision.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.ovis import FAMILY, SYSTEM_PROMPT, TEMPLATE_TOKENS, numbers, predict
from prep.models.family import Conditions, TextOptions

CPU, OPTIONS = torch.device("cpu"), TextOptions(max_length=256)


@pytest.fixture
def pipeline() -> object:
    return tiny_pipelines.build("ovis")


def rows(pipeline, captions, options=OPTIONS):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode(pipeline, captions, options, CPU)]


def test_the_constants_in_the_keys_are_the_pipeline_s(pipeline):
    assert (pipeline.system_prompt, pipeline.user_prompt_begin_id) == (SYSTEM_PROMPT, TEMPLATE_TOKENS)
    assert FAMILY.text.constants == {"system_prompt": SYSTEM_PROMPT, "template_tokens": TEMPLATE_TOKENS}


def test_rows_are_of_these_constants_with_a_pipeline_that_has_others(pipeline):
    usual = rows(pipeline, ["a cat"])[0]
    pipeline.system_prompt, pipeline.user_prompt_begin_id = "Draw: ", 3
    assert torch.allclose(usual, rows(pipeline, ["a cat"])[0], atol=1e-6)


def test_rows_are_the_pipeline_s_with_zeros_behind_the_caption(pipeline):
    hidden, *_ = tiny_pipelines.encode_prompts(pipeline, ["a cat", "two dogs on a bench"])
    short, long = rows(pipeline, ["a cat", "two dogs on a bench"])
    assert short.shape == long.shape == (256, 32)
    assert torch.allclose(short, hidden[0], atol=1e-6) and torch.allclose(long, hidden[1], atol=1e-6)
    ends = [int(row.any(dim=1).nonzero().max()) for row in (short, long)]
    assert ends[1] - ends[0] == len("two dogs on a bench") - len("a cat")


def test_a_shorter_row_is_cut_off(pipeline, tmp_path: Path):
    model, options = tiny_pipelines.save("ovis", tmp_path / "model"), TextOptions(max_length=64)
    assert dict(FAMILY.text.shapes(Configs(model), options)) == {"hidden": (64, 32)}
    assert torch.allclose(rows(pipeline, ["a cat"], options)[0], rows(pipeline, ["a cat"])[0][:64], atol=1e-5)


def test_the_row_without_a_prompt_is_the_encoding_of_nothing(pipeline):
    with torch.no_grad():
        row = FAMILY.text.unconditional(pipeline, OPTIONS, CPU)["hidden"]
    assert torch.equal(row, rows(pipeline, [""])[0])


def test_text_tokens_are_numbered_as_by_the_pipeline():
    pipeline = tiny_pipelines.build("ovis")
    hidden, _, wanted, _ = tiny_pipelines.encode_prompts(pipeline, ["a cat"])
    assert torch.equal(numbers(hidden.bfloat16()), wanted) and wanted[200].tolist() == [0, 200, 200]


def test_the_numbers_make_a_difference():
    transformer = tiny_pipelines.build("ovis").transformer
    text, noised = torch.randn(1, 8, 32), torch.randn(1, 16, 8, 8)
    found = []
    for hidden in (text, text.flip(1)):
        with torch.no_grad():
            found.append(predict(transformer, noised, torch.tensor([0.5]),
                                 Conditions(text={"hidden": hidden}, sizes_B6=torch.zeros(1, 6))))
    assert found[0].shape == (1, 16, 8, 8) and not torch.allclose(found[0], found[1], atol=1e-4)
