"""Vision models of random weights: DINOv2, SigLIP and CLIP with their preprocessors, as the Hub has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

KINDS = ("dinov2", "siglip", "clip")
_TOWER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32,
          "image_size": 32, "patch_size": 8}
_TEXT = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32,
         "vocab_size": 32, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}


def build(folder: Path, kind: str, *, seed: int = 0) -> Path:
    """A model in `folder`, which is made."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(seed)
    if kind == "dinov2":
        model: Any = transformers.Dinov2Model(transformers.Dinov2Config(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, mlp_ratio=2, image_size=32, patch_size=8))
        processor: Any = transformers.BitImageProcessorPil(size={"shortest_edge": 40}, crop_size=32)
    elif kind == "siglip":
        model = transformers.SiglipModel(transformers.SiglipConfig(text_config=_TEXT, vision_config=_TOWER))
        processor = transformers.SiglipImageProcessorPil(size={"height": 32, "width": 32}, resample=2)
    else:
        model = transformers.CLIPModel(transformers.CLIPConfig(text_config=_TEXT, vision_config=_TOWER,
                                                               projection_dim=24))
        processor = transformers.CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=32)
    for value in model.parameters():  # larger than untrained ones, for which all pictures look alike
        torch.nn.init.normal_(value, std=1.0 if value.ndim > 1 else 0.2)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder


def library_rows(folder: Path, pictures: list[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The embeddings of pictures, uint8 [H, W, 3], by the library alone: float32 [N, D], of length 1."""
    import torch
    import transformers

    kind = json.loads((folder / "config.json").read_text())["model_type"]
    model = transformers.AutoModel.from_pretrained(folder).eval()
    processor = {"dinov2": transformers.BitImageProcessorPil, "siglip": transformers.SiglipImageProcessorPil,
                 "clip": transformers.CLIPImageProcessorPil}[kind].from_pretrained(folder)
    rows = []
    with torch.inference_mode():
        for picture in pictures:
            inputs = processor(images=picture, input_data_format="channels_last", return_tensors="pt")
            made = (model(**inputs).last_hidden_state[:, 0] if kind == "dinov2" else
                    model.get_image_features(**inputs).pooler_output)
            rows.append(torch.nn.functional.normalize(made, dim=1)[0].numpy())
    return np.stack(rows)
