"""A denoiser as it is trained, made of its config: its tensors have shapes and dtypes, and no data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import diffusers
import torch

from prep.models.checkpoints.bounds import build
from prep.models.components import class_of
from prep.models.device.hollow import CPU, META, Hollow
from prep.models.family import Family
from prep.models.pipeline import pipeline_index, weighted_files
from prep.training.schema import Config
from train.models import lora
from train.models.denoiser import Denoiser, load_scheduler, noise_schedule
from train.models.quantized import BLOCK, QuantizedLinear
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
    kept = set(getattr(denoiser, "_keep_in_fp32_modules", None) or ())
    for name, value in (*denoiser.named_parameters(), *denoiser.named_buffers()):
        if value.is_floating_point() and not kept & set(name.split(".")):
            value.data = value.data.to(dtype)
    for name, layer in list(denoiser.named_modules()):
        parts = name.split(".")
        if config.quantization != "none" and type(layer) is torch.nn.Linear and any(
                map(str.isdecimal, parts)) and not kept & set(parts):
            setattr(denoiser.get_submodule(".".join(parts[:-1])), parts[-1], _packed(layer, config))


def _packed(layer: torch.nn.Linear, config: Config) -> QuantizedLinear:
    """A quantized layer in the shapes of its bytes and scales, which are not computed."""
    made = QuantizedLinear.__new__(QuantizedLinear)
    torch.nn.Module.__init__(made)
    made.in_features, made.out_features = layer.in_features, layer.out_features
    made.bias, made.quantization = layer.bias, config.quantization
    numbers, whole = layer.weight.numel(), config.quantization == "fp8"
    shape = (*layer.weight.shape,) if whole else (-(-numbers // 2), 1)
    made.weight = torch.nn.Parameter(torch.empty(shape, dtype=torch.uint8, device=META), requires_grad=False)
    made.register_buffer("scale", torch.empty((layer.out_features, 1) if whole else (-(-numbers // BLOCK),),
                                              device=META))
    return made


def _built(model: Path, family: Family) -> Any:
    kind = getattr(diffusers, class_of(pipeline_index(model), family.denoiser, model)[1])
    with META:
        return build(kind, weighted_files(model, family.denoiser).folder)
