"""Qwen-Image's text rows: the caption and the end of the template, without padding.

Qwen-Image's transformer and its LoRA files.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from model_files import write_json

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.configs import Configs
from prep.models.families import qwenimage
from prep.models.families.qwenimage import DROPPED, FAMILY, TEMPLATE
from prep.models.family import Conditions, TextOptions
from train.config.load import parse
from train.models import lora
from train.models.naming import naming_of

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


@pytest.mark.parametrize("targets", ["attention", "all-linear"])
def test_diffusers_reads_kohya_s_names_of_every_layer(targets):
    """Its converter takes names apart at underscores, also those of `add_q_proj`."""
    settings = parse({"lora": {"rank": 2, "targets": targets}}, "").lora
    pipeline = tiny_pipelines.build("qwenimage")
    parameters = lora.attach(pipeline.transformer, settings, 0, qwenimage.PRESETS)
    tensors = lora.pack(parameters, settings, naming_of(FAMILY))
    assert all(name.startswith("lora_unet_transformer_blocks_") for name in tensors)
    fresh = tiny_pipelines.build("qwenimage")
    fresh.load_lora_weights(tensors)
    adapted = {name.replace(".default_0.", ".default.") for name, _ in fresh.transformer.named_parameters()
               if ".lora_" in name}
    assert adapted == set(parameters) and len(adapted) == 2 * 2 * len(qwenimage.PRESETS[targets])


def test_a_batch_with_padding_has_a_mask_and_one_picture_shape_each():
    transformer = tiny_pipelines.build("qwenimage").transformer
    seen = []
    transformer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    mask = torch.tensor([[1] * 7 + [0] * 9, [1] * 12 + [0] * 4], dtype=torch.uint8)
    text = {"hidden": torch.randn(2, 16, 32) * mask[..., None], "attention_mask": mask}
    with torch.no_grad():
        qwenimage.predict(transformer, torch.randn(2, 16, 8, 12), torch.tensor([0.5, 0.7]),
                          Conditions(text=text, sizes_B6=torch.zeros(2, 6)))
    assert seen[0]["encoder_hidden_states"].shape == (2, 12, 32)
    assert seen[0]["encoder_hidden_states_mask"].sum(1).tolist() == [7, 12]
    assert seen[0]["img_shapes"] == [[(1, 4, 6)], [(1, 4, 6)]]
