"""Text rows of Stable Diffusion 3 without T5, whose place is taken by zeros as wide as the transformer says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")

import tiny_pipelines

from prep.encode.resolve import _more_text
from prep.models.configs import Configs
from prep.models.families.sd3 import FAMILY
from prep.models.family import TextOptions
from prep.models.text.encoder import TextEncoder

JOINT = 96  # of the tiny transformer


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return tiny_pipelines.save("sd3", tmp_path_factory.mktemp("sd3") / "model", without_t5=True)


@pytest.mark.parametrize("options", [
    pytest.param(TextOptions(max_length=256), marks=pytest.mark.slow), TextOptions(max_length=7),
    pytest.param(TextOptions(max_length=256, clip_skip=1), marks=pytest.mark.slow)])
def test_rows_are_those_of_the_whole_pipeline(model, options):
    encoder = TextEncoder(model, FAMILY, options, device="cpu", compute="float32", dtype="float32")
    pipe = tiny_pipelines.load(model)
    hidden, _, pooled, _ = tiny_pipelines.encode_prompts(
        pipe, ["a cat"], max_sequence_length=options.max_length, clip_skip=options.clip_skip or None)
    (row,) = encoder.encode(["a cat"])
    assert torch.equal(torch.from_numpy(row["hidden"]), hidden[0])
    assert torch.equal(torch.from_numpy(row["pooled"]), pooled[0])
    assert {name: array.shape for name, array in row.items()} == FAMILY.text.shapes(Configs(model), options)
    assert not row["hidden"][77:].any() and row["hidden"][:77].any()


def test_the_width_of_the_zeros_is_in_the_keys_and_nothing_is_with_t5(model, tmp_path):
    assert _more_text(model, FAMILY, TextOptions(max_length=256)) == {"denoiser": {"joint_attention_dim": JOINT}}
    index = json.loads((model / "model_index.json").read_text())
    index["text_encoder_3"] = ["transformers", "T5EncoderModel"]
    (tmp_path / "model_index.json").write_text(json.dumps(index))
    assert _more_text(tmp_path, FAMILY, TextOptions(max_length=256)) == {}
