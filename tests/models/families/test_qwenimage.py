"""Qwen-Image's text rows: the caption and the end of the template, without padding."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_files import write_json

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.qwenimage import DROPPED, FAMILY, TEMPLATE
from prep.models.family import TextOptions

CPU = torch.device("cpu")
LONG = "a caption {with braces} of many words " * 40


@pytest.fixture(scope="module")
def pipeline() -> object:
    return tiny_pipelines.build("qwenimage")


def rows(pipeline, captions, most=512):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode(pipeline, captions, TextOptions(max_length=most), CPU)]


def test_the_template_is_the_pipeline_s(pipeline):
    assert pipeline.prompt_template_encode == TEMPLATE
    assert pipeline.prompt_template_encode_start_idx == DROPPED
    assert pipeline.tokenizer_max_length == FAMILY.text.longest


def test_rows_have_the_tokens_after_those_dropped(pipeline):
    short, long = rows(pipeline, ["a cat", LONG])
    assert len(short) == len(pipeline.tokenizer(TEMPLATE.format("a cat"))["input_ids"]) - DROPPED
    assert long.shape == (512, 32)
    (alone,) = rows(pipeline, ["a cat"])
    assert torch.allclose(short, alone, atol=1e-6)


def test_a_shorter_row_is_the_start_of_a_longer_one(pipeline):
    (short,), (long,) = rows(pipeline, [LONG], most=100), rows(pipeline, [LONG], most=1024)
    assert len(short) == 100 and len(long) == 1024
    assert torch.allclose(short, long[:100], atol=1e-5)


def test_the_row_without_a_prompt_is_of_a_space(pipeline):
    with torch.no_grad():
        found = FAMILY.text.unconditional(pipeline, TextOptions(max_length=512), CPU)["hidden"]
    space, empty = rows(pipeline, [" ", ""])
    assert torch.allclose(found, space, atol=1e-6) and len(space) == len(empty) + 1


@pytest.mark.parametrize("config", [{"hidden_size": 96}, {"text_config": {"hidden_size": 96}},
                                    {"hidden_size": 7, "text_config": {"hidden_size": 96}}])
def test_the_width_of_old_and_new_configs(config, tmp_path: Path):
    write_json(tmp_path / "text_encoder" / "config.json", config)
    assert FAMILY.text.shapes(Configs(tmp_path), TextOptions(max_length=512)) == {"hidden": (512, 96)}
