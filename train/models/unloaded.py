"""A denoiser as it is trained, made of its config: its tensors have shapes and dtypes, and no data."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from prep.models.checkpoints.bounds import build
from prep.models.checkpoints.streaming import kept_in_float32
from prep.models.device.hollow import CPU, META, Hollow
from prep.models.family import Family
from prep.models.files import Model
from prep.training.schema import Config
from train.models import lora
from train.models.adapters.beside import attach_beside
from train.models.adapters.frozen import FrozenAdapter
from train.models.denoiser import DTYPES, Denoiser, files_of, frozen, source_of, unfreeze, with_noise
from train.models.quantized import quantized


def unloaded(model: Model, config: Config, prediction: str, dtype: torch.dtype, family: Family, mode: Hollow,
             way: Callable[..., Any], adapter: FrozenAdapter | None = None) -> Denoiser:
    """The denoiser that `train.models.denoiser.load` makes of the weights below `model`, within `mode` and without
    them.

    `dtype` is that of the forward pass; `way` calls a block with gradient checkpointing; `adapter`: a training adapter.
    Values of adapters are not drawn. Raises `ModelError`.
    """
    kind, files = source_of(model, family)
    with META:
        denoiser = build(kind, files.folder)
    if config.method == "full":
        _settle(denoiser, config, DTYPES[config.full.dtype])
        unfreeze(denoiser, config)
    else:
        _settle(denoiser.requires_grad_(False), config, dtype)
        with META:
            lora.inject(denoiser, config.lora, family.lora.presets)
            if adapter is not None:
                attach_beside(denoiser, dtype, adapter,
                              {name: torch.empty(shape) for name, shape in adapter.shapes.items()})
        for value in lora.stored(denoiser).values():
            value.data = value.data.float()
    if config.recomputes:
        denoiser.enable_gradient_checkpointing(way)
    mode.enter(denoiser)
    denoiser.train()
    conditioner = None if family.conditioner is None else _conditioner(model, family.conditioner.component, dtype)
    if conditioner is not None:
        mode.enter(conditioner)
    return with_noise(denoiser, model, family, config, prediction, CPU, dtype, conditioner)


def _conditioner(model: Model, name: str, dtype: torch.dtype) -> Any:
    """The conditioner `name` as `train.models.denoiser.load` makes it, on the meta device."""
    kind, files = files_of(model, name)
    with META:
        conditioner = build(kind, files.folder)
    for value in conditioner.parameters():
        value.data = value.data.to(dtype)
    return frozen(conditioner, CPU)


def _settle(denoiser: torch.nn.Module, config: Config, dtype: torch.dtype) -> None:
    """Gives weights the dtypes, and frozen ones the bytes, that they are kept in."""
    in_float32 = kept_in_float32(denoiser)
    for name, value in (*denoiser.named_parameters(), *denoiser.named_buffers()):
        if value.is_floating_point() and not in_float32(name):
            value.data = value.data.to(dtype)
    for name, layer in list(denoiser.named_modules()):
        if not in_float32(name) and (settled := quantized(config.quantization, name, layer)) is not layer:
            parent, _, last = name.rpartition(".")
            setattr(denoiser.get_submodule(parent), last, settled)
