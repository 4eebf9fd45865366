"""A denoiser as it is trained, made of its config: its tensors have shapes and dtypes, and no data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

from prep.loader.device import module_to_device
from prep.models.checkpoints.bounds import build
from prep.models.components import class_of
from prep.models.device.hollow import CPU, META, Hollow
from prep.models.family import Family
from prep.models.pipeline import pipeline_index, weighted_files
from prep.training.schema import Config
from train.models import lora
from train.models.denoiser import Denoiser, load_scheduler, noise_schedule
from train.models.quantized import quantize
from train.models.targets import unfrozen

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def unloaded(model: Path, config: Config, prediction: str, dtype: torch.dtype, family: Family, mode: Hollow,
             recompute: Callable[..., Any] | None = None) -> Denoiser:
    """What `train.models.denoiser.load` makes of the weights below `model`, within `mode` and without them.

    `dtype` is that of the forward pass; `recompute` calls a block with gradient checkpointing, `None`: as diffusers
    does. Values of adapters are not drawn. Raises `ModelError`.
    """
    denoiser = _built(model, family)
    if config.method == "full":
        trained = set(unfrozen(dict(denoiser.named_parameters()), config.full))
        for name, value in denoiser.float().named_parameters():
            value.requires_grad_(name in trained)
    else:
        module_to_device(denoiser, META, dtype).requires_grad_(False)
        quantize(denoiser, config.quantization)
        with META:
            lora.inject(denoiser, config.lora, family.lora.presets)
        for value in lora.stored(denoiser).values():
            value.data = value.data.float()
    if config.gradient_checkpointing:
        denoiser.enable_gradient_checkpointing(recompute)
    mode.enter(denoiser)
    denoiser.train()
    named, flow = dict(denoiser.named_parameters()), prediction == "flow"
    return Denoiser(
        model=denoiser, family=family, prediction=prediction, device=CPU, dtype=dtype,
        levels=noise_schedule(model, prediction, zero_terminal_snr=config.zero_terminal_snr),
        zero_terminal_snr=config.zero_terminal_snr, guidance_embedding=config.guidance_embedding,
        schedule=dict(load_scheduler(diffusers.FlowMatchEulerDiscreteScheduler, model).config) if flow else {},
        parameters={name: value for name, value in named.items() if value.requires_grad},
        weights={name: value for name, value in named.items() if config.method == "full" or lora.is_stored(name)})


def _built(model: Path, family: Family) -> Any:
    kind = getattr(diffusers, class_of(pipeline_index(model), family.denoiser, model)[1])
    with META:
        return build(kind, weighted_files(model, family.denoiser).folder)


def dtype_of(precision: str, kind: str) -> torch.dtype:
    """The dtype of forward passes on a kind of device that need not be here; `auto`: a GPU has bfloat16."""
    return _DTYPES[precision] if precision != "auto" else torch.float32 if kind == "cpu" else torch.bfloat16
