"""The memory of a training step, counted by part while a step runs whose tensors have shapes and no data.

Model, adapters, optimizer and average are those of `train.state`, made of the model's config; the batch has the shapes
of the one that a run tries first: the largest bucket of the plan with its longest texts. Weights are counted as they
are trained, without what loading them takes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from prep.loader import draws
from prep.loader.batches import SLOTS, Batch, Slot
from prep.loader.device import module_to_device
from prep.loader.draws import BatchRequest
from prep.loader.latents import latents_of
from prep.loader.rows import DTYPES
from prep.models.checkpoints.bounds import build
from prep.models.components import class_of
from prep.models.device.hollow import META, Hollow
from prep.models.family import ATTENTION_MASK, TOKEN
from prep.models.fields import STD
from prep.models.pipeline import pipeline_index, weighted_files
from train.models import lora
from train.models.denoiser import Denoiser, load_scheduler, noise_schedule, quiet
from train.models.quantized import quantize
from train.models.targets import unfrozen
from train.objectives.forward import forward, sample_losses
from train.optim.ema import Average
from train.optim.loss_scale import LossScale
from train.optim.optimizers import TABLE
from train.parallel.shards import Whole
from train.setup import Setup
from train.state import TrainState, apply_gradients, clip_gradients, groups, move_average

WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER, AVERAGE, INPUTS = (
    "weights", "adapters", "gradients", "optimizer", "average", "inputs")
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
_CPU = torch.device("cpu")


def count(setup: Setup, kind: str) -> Mapping[str, int]:
    """The bytes of a step at its peak by part, on a device of this kind: one pass over the largest batch, with the
    gradients of passes before it and with what the optimizer keeps, then the update."""
    quiet()
    with Hollow() as counted:
        trainee = _trainee(setup, kind, counted)
        trained = trainee.denoiser.parameters
        for value in trained.values():
            value.register_post_accumulate_grad_hook(lambda value: counted.add(GRADIENTS, [value.grad]))
        trainee.model.hold_gradients(trained)
        _update(trainee, setup, counted)  # after which the optimizer has what it keeps
        if draws.accumulates(setup.plan, setup.config.micro_batch):
            trainee.model.hold_gradients(trained)
            counted.add(GRADIENTS, [value.grad for value in trained.values()])
        counted.reset_peak()
        with counted.making(INPUTS):
            batch = batch_of(setup, counted)
        passed(trainee, setup, batch)
        _update(trainee, setup, counted)
        return dict(counted.peak)


def passed(trainee: TrainState, setup: Setup, batch: Batch) -> None:
    """One pass over a batch, forward and backward, as `train.loop` makes it."""
    settings = setup.config.loss
    given = forward(trainee.denoiser, batch, trainee.latents, settings)
    loss = (sample_losses(given, settings) * given.weight_B).sum()
    times = 1.0 if trainee.scale is None else trainee.scale.value
    (loss * times / setup.config.batch_size).backward()  # type: ignore[no-untyped-call]


def _update(trainee: TrainState, setup: Setup, counted: Hollow) -> None:
    with counted.making(OPTIMIZER):
        clip_gradients(trainee, setup)
        apply_gradients(trainee, setup, 0)
    with counted.making(AVERAGE):
        move_average(trainee, setup, 0)


def _trainee(setup: Setup, kind: str, counted: Hollow) -> TrainState:
    """What `train.state.create_state` makes, without data."""
    config, on_gpu = setup.config, kind != "cpu"
    denoiser = _denoiser(setup, kind, counted)
    trained = set(map(id, denoiser.parameters.values()))
    counted.add(WEIGHTS, (*denoiser.model.parameters(), *denoiser.model.buffers()))
    if config.method == "lora":
        counted.add(ADAPTERS, denoiser.parameters.values())
        counted.add(ADAPTERS, denoiser.weights.values())
    assert trained
    spec, averaged = TABLE[config.optimizer.name], config.ema.decay and (config.ema.device == "model" or not on_gpu)
    with counted.making(AVERAGE):
        average = Average(denoiser.parameters, in_host=False) if averaged else None
    return TrainState(denoiser=denoiser, model=Whole(denoiser.weights), spec=spec, average=average,
                      optimizer=spec.build(groups(denoiser, config), config.optimizer, on_gpu),
                      latents=latents_of(setup.manifest),
                      scale=LossScale() if denoiser.dtype == torch.float16 else None)


def _denoiser(setup: Setup, kind: str, counted: Hollow) -> Denoiser:
    config, family, dtype = setup.config, setup.family, dtype_of(setup.config.precision, kind)
    files = weighted_files(setup.model, family.denoiser)
    made = getattr(diffusers, class_of(pipeline_index(setup.model), family.denoiser, setup.model)[1])
    with META:
        model = build(made, files.folder)
    whole = config.method == "full"
    if whole:
        trained = set(unfrozen(dict(model.named_parameters()), config.full))
        for name, value in model.named_parameters():
            value.requires_grad_(name in trained)
        model.to(torch.float32)
    else:
        module_to_device(model, META, dtype).requires_grad_(False)
        quantize(model, config.quantization)
        with META:
            lora.inject(model, config.lora, family.lora.presets)
        for value in lora.stored(model).values():
            value.data = value.data.float()
    if config.gradient_checkpointing:
        model.enable_gradient_checkpointing()
    counted.enter(model)
    model.train()
    named = dict(model.named_parameters())
    flow = setup.prediction == "flow"
    return Denoiser(
        model=model, family=family, prediction=setup.prediction, device=_CPU, dtype=dtype,
        levels=noise_schedule(setup.model, setup.prediction, zero_terminal_snr=config.zero_terminal_snr),
        zero_terminal_snr=config.zero_terminal_snr, guidance_embedding=config.guidance_embedding,
        schedule=dict(load_scheduler(diffusers.FlowMatchEulerDiscreteScheduler, setup.model).config) if flow else {},
        parameters={name: value for name, value in named.items() if value.requires_grad},
        weights={name: value for name, value in named.items() if whole or lora.is_stored(name)})


def dtype_of(precision: str, kind: str) -> torch.dtype:
    """The dtype of forward passes on a device of this kind, which need not be here: a GPU has bfloat16."""
    return _DTYPES[precision] if precision != "auto" else torch.float32 if kind == "cpu" else torch.bfloat16


def batch_of(setup: Setup, counted: Hollow) -> Batch:
    """The largest batch of the run, without data but for what code asks for: timesteps and lengths of texts."""
    config, index = setup.config, setup.index
    request = draws.trial(index, setup.plan, config.micro_batch)
    count, fields, latents = len(request.shots), index.manifest.fields, index.shape("latent", request.bucket)
    latent = counted.empty((count, *latents["latent"]), _stored(fields["latent"].arrays["latent"]))
    noise = counted.empty(tuple(latent.shape), torch.float32)
    if STD in latents:  # drawn from their posterior
        latent = counted.empty(tuple(latent.shape), torch.float32)
    mask = (counted.empty((count, *index.shape("mask", request.bucket)["mask"]), torch.uint8)
            if setup.masked else None)
    return Batch(latent_BChw=latent, mask_B1hw=mask, text=_text(setup, request, counted), noise_BChw=noise,
                 input_noise_BChw=counted.empty(tuple(latent.shape), torch.float32)
                 if config.noise.perturbation else noise,
                 sizes_B6=torch.ones(count, 6), timestep_B=torch.zeros(count, dtype=torch.int64),
                 weight_B=torch.ones(count), shots=request.shots, slot=Slot(False), padding=False)


def _text(setup: Setup, request: BatchRequest, counted: Hollow) -> dict[str, Tensor]:
    """The arrays of the batch's texts. Of trimmed rows all but the first are at least a token shorter than the longest,
    as they usually are: attention then has a mask."""
    index, count = setup.index, len(request.shots)
    arrays = index.manifest.fields["text"].arrays
    shapes = dict(index.text_shapes)
    if ATTENTION_MASK not in arrays:
        return {name: counted.empty((count, *shape), _stored(arrays[name])) for name, shape in shapes.items()}
    tokens = [int(index.tokens[index.samples.texts["shard"][shot.text]]) for shot in request.shots]
    longest = max(tokens)
    found = {}
    for name, shape in shapes.items():
        sides = tuple(longest if dim == TOKEN else side for dim, side in zip(arrays[name]["dims"], shape, strict=True))
        found[name] = counted.empty((count, *sides), _stored(arrays[name]))
    lengths = torch.tensor([min(each, longest - (number > 0)) for number, each in enumerate(tokens)])
    found[ATTENTION_MASK] = (torch.arange(longest) < lengths[:, None]).to(_stored(arrays[ATTENTION_MASK]))
    return found


def _stored(array: Mapping[str, Any]) -> torch.dtype:
    return DTYPES[str(array["dtype"])]
