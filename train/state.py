"""What a step changes: the trained parameters, the optimizer's moments, the moving average; and how they are kept."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prep.loader.device import to_device
from train.config.load import as_table
from train.models import lora
from train.models.denoiser import Denoiser, load
from train.optim import ema, schedule
from train.optim.ema import Shadow
from train.runs.checkpoint import Part, copy_into, read_tensors
from train.setup import Setup

WEIGHTS = {"lora": "lora.safetensors", "full": "unet/diffusion_pytorch_model.safetensors"}

EMA_METADATA = {"latentry.weights": "moving average"}  # of a file that has it instead of the last weights


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """A denoiser in training. The record is frozen, its tensors are not."""

    denoiser: Denoiser
    optimizer: torch.optim.AdamW
    shadow: Shadow | None  # None: no moving average


def create_state(setup: Setup, device: torch.device) -> TrainState:
    """A trainee at step 0."""
    config, chosen = setup.config, setup.config.optimizer
    denoiser = load(setup.model, config, setup.prediction, device)
    optimizer = torch.optim.AdamW(denoiser.parameters.values(), lr=chosen.lr, betas=chosen.betas, eps=chosen.eps,
                                  weight_decay=chosen.weight_decay)
    shadow = ema.start(denoiser.parameters) if config.ema.decay else None
    return TrainState(denoiser=denoiser, optimizer=optimizer, shadow=shadow)


def apply_gradients(trainee: TrainState, setup: Setup, step: int, weight: Tensor) -> tuple[float, float]:
    """Ends step `step` (from 0): the gradients, sums so far, are divided by `weight`, clipped and followed.

    Returns the gradient's norm before clipping, and the learning rate.
    """
    chosen = setup.config.optimizer
    held = [value for value in trainee.denoiser.parameters.values() if value.grad is not None]
    with torch.no_grad():
        for value in held:
            assert value.grad is not None
            value.grad.div_(weight.clamp(min=1e-12))  # all masks empty and no weight outside: the error is 0 too
    norm = torch.nn.utils.clip_grad_norm_(held, chosen.clip or float("inf"))
    rate = chosen.lr * schedule.factor(setup.config.schedule, step, setup.steps)
    for group in trainee.optimizer.param_groups:
        group["lr"] = rate
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    if trainee.shadow is not None:
        ema.update(trainee.shadow, trainee.denoiser.parameters, ema.decay_at(step, setup.config.ema.decay))
    return float(norm), rate


def checkpoint_files(trainee: TrainState, setup: Setup, step: int) -> Iterator[Part]:
    """The files of a checkpoint."""
    parameters = trainee.denoiser.parameters
    told = metadata(setup, step, parameters)
    yield from weight_parts(trainee.denoiser, parameters, setup, told, WEIGHTS[setup.config.method])
    moments = {f"{kind}/{name}": value for name, parameter in parameters.items()
               for kind, value in trainee.optimizer.state[parameter].items()}
    yield Part(name="optimizer.safetensors", tensors=moments)
    if trainee.shadow is not None:
        averaged = dict(trainee.shadow)
        if setup.config.method == "lora":
            averaged = lora.pack(trainee.shadow, setup.config.lora)
        yield Part(name="ema.safetensors", tensors=averaged, metadata={**told, **EMA_METADATA})


def weight_parts(denoiser: Denoiser, values: Mapping[str, Tensor], setup: Setup, told: Mapping[str, str],
                 name: str) -> Iterator[Part]:
    """What is trained, as others load it: a LoRA file, or a diffusers directory's weights and config."""
    if setup.config.method == "lora":
        yield Part(name=name, tensors=lora.pack(values, setup.config.lora), metadata=told)
        return
    yield Part(name=name, tensors=values, metadata=told)
    config = json.loads(denoiser.unet.to_json_string())
    config.pop("_name_or_path", None)  # a path of this machine
    yield Part(name=str(Path(name).with_name("config.json")), data=json.dumps(config, indent=2).encode() + b"\n")


def restore(trainee: TrainState, setup: Setup, folder: Path) -> None:
    """Puts a checkpoint's values back, bit by bit. Raises `CacheError`."""
    parameters = trainee.denoiser.parameters
    put_weights(parameters, setup, folder / WEIGHTS[setup.config.method])
    path = folder / "optimizer.safetensors"
    moments = read_tensors(path)
    for name, parameter in parameters.items():
        kept = {key.partition("/")[0]: value for key, value in moments.items() if key.partition("/")[2] == name}
        trainee.optimizer.state[parameter] = {
            kind: value if kind == "step" else to_device(value, parameter.device) for kind, value in kept.items()}
    if trainee.shadow is not None:
        put_weights(trainee.shadow, setup, folder / "ema.safetensors")


def put_weights(targets: Mapping[str, Tensor], setup: Setup, path: Path) -> None:
    """Copies a file's weights into `targets`. Raises `CacheError`."""
    values = read_tensors(path)
    if setup.config.method == "lora":
        values = lora.unpack(values, targets, setup.config.lora)
    copy_into(targets, values, path)


def metadata(setup: Setup, step: int, names: Mapping[str, Any]) -> dict[str, str]:
    """What a file of weights says of itself: where it comes from, and with which settings."""
    facts = {"latentry.manifest": setup.manifest.digest, "latentry.step": str(step),
             "latentry.config": json.dumps(as_table(setup.config), sort_keys=True),
             "latentry.models": json.dumps(setup.manifest.document["models"], sort_keys=True)}
    if setup.others:
        facts["latentry.other_encoders"] = json.dumps(dict(setup.others), sort_keys=True)
    if setup.config.method == "lora":
        facts.update(lora.describe(names, setup.config.lora))
    return facts


def result_files(trainee: TrainState, setup: Setup, step: int, name: str) -> Iterator[Part]:
    """What the run hands out: the moving average when there is one (its metadata say so), else the weights."""
    parameters = trainee.denoiser.parameters
    told = {**metadata(setup, step, parameters), **({} if trainee.shadow is None else EMA_METADATA)}
    source: Mapping[str, Tensor] = parameters if trainee.shadow is None else trainee.shadow
    yield from weight_parts(trainee.denoiser, source, setup, told, name)
