"""Pipelines of published sizes with random weights, written a tensor at a time: no more memory than the largest takes.

    build("sdxl", folder)    # a pipeline directory without text encoders and VAE, unless they are asked for

Configs are those of the published models, which diffusers has as defaults for FLUX.1 and Z-Image. Values are drawn from
a small pool: what is measured depends on bytes and shapes alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import diffusers
import torch
from torch import Tensor

from prep.models.checkpoints.stored import write

POOL = 1 << 22  # random numbers
STEP = 1 << 16  # by which the next tensor begins later in the pool
DEVIATION = 0.02
SHARD = 10_000_000_000  # bytes of a file of weights at most


@dataclass(frozen=True, kw_only=True)
class Size:
    """A published model."""

    pipeline: str
    part: str  # the denoiser's
    kind: str  # its class in diffusers
    config: Mapping[str, Any]
    scheduler: tuple[str, Mapping[str, Any]]
    dtype: torch.dtype = torch.bfloat16  # of the file, as it is published
    variant: str = ""
    others: Mapping[str, Any] = field(default_factory=dict)  # further parts in model_index.json


_BETAS = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
SIZES: Mapping[str, Size] = {
    "sd15": Size(pipeline="StableDiffusionPipeline", part="unet", kind="UNet2DConditionModel", variant="fp16",
                 dtype=torch.float16, scheduler=("PNDMScheduler", _BETAS | {"steps_offset": 1, "skip_prk_steps": True}),
                 config={"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}),
    "sdxl": Size(pipeline="StableDiffusionXLPipeline", part="unet", kind="UNet2DConditionModel", variant="fp16",
                 dtype=torch.float16, scheduler=("EulerDiscreteScheduler", _BETAS | {"steps_offset": 1}),
                 config={"sample_size": 128, "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
                         "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
                         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                         "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                         "transformer_layers_per_block": (1, 2, 10), "addition_embed_type": "text_time",
                         "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816}),
    "zimage": Size(pipeline="ZImagePipeline", part="transformer", kind="ZImageTransformer2DModel", config={},
                   scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0})),
    "flux": Size(pipeline="FluxPipeline", part="transformer", kind="FluxTransformer2DModel",
                 config={"guidance_embeds": True},
                 scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True})),
}


def build(name: str, folder: Path, **changes: Any) -> Path:
    """Writes the pipeline `name` of `SIZES` with its denoiser, and `changes` of that one's config; returns `folder`."""
    size = SIZES[name]
    (folder / "scheduler").mkdir(parents=True)
    kind, options = size.scheduler
    _write(folder / "scheduler" / "scheduler_config.json", {"_class_name": kind, **options})
    _write(folder / "model_index.json", {
        "_class_name": size.pipeline, size.part: ["diffusers", size.kind], "scheduler": ["diffusers", kind],
        **size.others})
    with torch.device("meta"):
        model = getattr(diffusers, size.kind)(**{**size.config, **changes})
    save(model, folder / size.part, size.dtype, size.variant)
    return folder


def save(model: Any, folder: Path, dtype: torch.dtype, variant: str = "") -> None:
    """Writes a model of diffusers that is on the meta device, with random weights, in files as diffusers splits them.
    """
    folder.mkdir(parents=True)
    model.save_config(folder)
    shapes = {name: tuple(value.shape) for name, value in sorted(model.state_dict().items())}
    files: list[dict[str, tuple[int, ...]]] = [{}]
    left = SHARD
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > left:
            files.append({})
            left = SHARD
        files[-1][name] = shape
        left -= size
    draw = _draws(dtype)
    stem, dot = "diffusion_pytorch_model", variant and f".{variant}"
    names = [f"{stem}{dot}.safetensors"] if len(files) == 1 else [
        f"{stem}{dot}-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        write(folder / name, {key: (dtype, shape) for key, shape in part.items()}, map(draw, part.values()))
    if len(files) > 1:
        placed = {key: name for name, part in zip(names, files, strict=True) for key in part}
        _write(folder / f"{stem}.safetensors.index{dot}.json", {"metadata": {}, "weight_map": placed})


def _draws(dtype: torch.dtype) -> Callable[[tuple[int, ...]], Tensor]:
    """What draws a tensor of a shape, each from another place of the pool."""
    pool = (torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * DEVIATION).to(dtype).repeat(2)
    starts = count(0, STEP)

    def draw(shape: tuple[int, ...]) -> Tensor:
        numbers, turned = torch.Size(shape).numel(), pool[next(starts) % POOL:][:POOL]
        return turned.repeat(-(-numbers // POOL))[:numbers].reshape(shape)

    return draw


def _write(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2))
