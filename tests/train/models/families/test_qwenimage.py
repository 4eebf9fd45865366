"""Qwen-Image's transformer and its LoRA files."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
pytest.importorskip("diffusers", minversion="0.42", reason="older releases lack some of the families")

import tiny_pipelines

from prep.models.families.qwenimage import FAMILY
from train.config.load import parse
from train.models import lora
from train.models.families import qwenimage
from train.models.families.registry import naming_of
from train.models.family import Conditions


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
