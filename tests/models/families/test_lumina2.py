"""Lumina 2's text rows: captions behind a system prompt, negative prompts without it, no padding.

Lumina 2's transformer counts time from noise to picture, and has positions for sides of some length.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families.lumina2 import FAMILY, SYSTEM_PROMPT, longest_side
from prep.models.family import Conditions, TextOptions
from prep.models.text.encoder import TextEncoder
from train.config.load import parse
from train.models.denoiser import load, predict

CPU, OPTIONS = torch.device("cpu"), TextOptions(max_length=256)
LONG = "a caption of many words " * 20


@pytest.fixture(scope="module")
def pipeline() -> object:
    return tiny_pipelines.build("lumina2")


def rows(pipeline, captions, *, negative=False, options=OPTIONS):
    with torch.no_grad():
        return [row["hidden"] for row in FAMILY.text.encode_texts(pipeline, captions, options, CPU, negative=negative)]


def test_the_system_prompt_is_the_pipeline_s(pipeline):
    assert pipeline.system_prompt == SYSTEM_PROMPT == FAMILY.text.constants["system_prompt"]


def test_captions_are_behind_the_system_prompt_and_negative_prompts_are_not(pipeline):
    hidden, mask, against, against_mask = tiny_pipelines.encode_prompts(pipeline, ["a cat", LONG],
                                                                        negative_prompt=["a dog", ""])
    for number, row in enumerate(rows(pipeline, ["a cat", LONG])):
        assert torch.allclose(row, hidden[number][mask[number].bool()], atol=1e-6)
    for number, row in enumerate(rows(pipeline, ["a dog", ""], negative=True)):
        assert torch.allclose(row, against[number][against_mask[number].bool()], atol=1e-6)
    assert len(rows(pipeline, ["a dog"])[0]) > len(SYSTEM_PROMPT) > len(rows(pipeline, ["a dog"], negative=True)[0])


def test_the_system_prompt_counts_in_the_length(pipeline):
    assert [len(row) for row in rows(pipeline, [LONG, "a cat"], options=TextOptions(max_length=64))] == [64, 64]


def test_the_row_without_a_prompt_is_that_of_an_empty_negative_prompt(pipeline):
    row = FAMILY.text.unconditional(pipeline, OPTIONS, CPU)["hidden"]
    assert row.shape == (1, 32), "the token that starts a text"
    assert torch.equal(row, rows(pipeline, [""], negative=True)[0])


def test_a_model_may_have_the_pipeline_s_former_name(pipeline, tmp_path: Path):
    model = tiny_pipelines.save("lumina2", tmp_path / "model")
    index = json.loads((model / "model_index.json").read_text())
    (model / "model_index.json").write_text(json.dumps({**index, "_class_name": "Lumina2Text2ImgPipeline"}))
    assert dict(FAMILY.text.shapes(Configs(model), OPTIONS)) == {"hidden": (256, 32)}
    encoder = TextEncoder(model, FAMILY, OPTIONS, device="cpu", compute="float32", dtype="float32")
    (row,) = encoder.encode(["a cat"])
    assert torch.allclose(torch.from_numpy(row["hidden"]), rows(pipeline, ["a cat"])[0], atol=1e-5)


CPU = torch.device("cpu")


def test_time_and_prediction_are_reversed(tmp_path):
    model = tiny_pipelines.save("lumina2", tmp_path / "model")
    denoiser = load(model, parse({"precision": "fp32"}, ""), "flow", CPU, adapt=False)
    text = {"hidden": torch.randn(2, 16, 32), "attention_mask": torch.ones(2, 16, dtype=torch.uint8)}
    noised, time = torch.randn(2, 16, 8, 8), torch.tensor([0, 999])
    with torch.no_grad():
        found = predict(denoiser, noised, time, Conditions(text=text, sizes_B6=torch.zeros(2, 6)))
        usual = denoiser.model(noised, 1 - denoiser.levels[time], text["hidden"], text["attention_mask"]).sample
    assert torch.allclose(found, -usual, atol=1e-6)
    assert denoiser.levels[999] == 1 and denoiser.levels[0] < 0.01


@pytest.mark.parametrize(("config", "longest"), [
    ({}, 8192), ({"axes_lens": [300, 512, 256]}, 4096), ({"axes_lens": None}, None), ({"axes_lens": ["a", "b"]}, None),
])
def test_the_longest_side_has_a_position_for_each_patch(config, longest):
    assert longest_side(config) == longest


def test_a_side_is_as_long_as_its_positions_allow(tmp_path):
    """The tiny model has 64 positions a side."""
    transformer = tiny_pipelines.build("lumina2").transformer
    mask = torch.ones(1, 4, dtype=torch.uint8)
    text = {"encoder_hidden_states": torch.randn(1, 4, 32), "encoder_attention_mask": mask}
    assert longest_side(transformer.config) == 64 * 16
    with torch.no_grad():
        assert transformer(torch.randn(1, 16, 128, 2), torch.tensor([0.5]), **text).sample.shape == (1, 16, 128, 2)
        with pytest.raises(RuntimeError):
            transformer(torch.randn(1, 16, 130, 2), torch.tensor([0.5]), **text)
