"""A denoiser as it is trained, made of its config: its tensors have shapes and dtypes, and no data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

from prep.models.checkpoints.bounds import build
from prep.models.checkpoints.streaming import kept_in_float32
from prep.models.components import class_of
from prep.models.device.hollow import CPU, META, Hollow
from prep.models.family import Family
from prep.models.pipeline import pipeline_index, weighted_files
from prep.training.schema import Config
from train.models import lora
from train.models.denoiser import Denoiser, load_scheduler, noise_schedule
from train.models.quantized import quantized
from train.models.targets import unfrozen


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
        _settle(denoiser.requires_grad_(False), config, dtype)
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


def _settle(denoiser: torch.nn.Module, config: Config, dtype: torch.dtype) -> None:
    """Gives frozen weights the dtypes and the bytes that they are kept in."""
    in_float32 = kept_in_float32(denoiser)
    for name, value in (*denoiser.named_parameters(), *denoiser.named_buffers()):
        if value.is_floating_point() and not in_float32(name):
            value.data = value.data.to(dtype)
    for name, layer in list(denoiser.named_modules()):
        if not in_float32(name) and (settled := quantized(config.quantization, name, layer)) is not layer:
            parent, _, last = name.rpartition(".")
            setattr(denoiser.get_submodule(parent), last, settled)


def _built(model: Path, family: Family) -> Any:
    kind = getattr(diffusers, class_of(pipeline_index(model), family.denoiser, model)[1])
    with META:
        return build(kind, weighted_files(model, family.denoiser).folder)
