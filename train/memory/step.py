"""The memory of a training step, counted by part while a step runs whose tensors have shapes and no data.

Model, adapters, optimizer and average are those of `train.state`, made of the model's config; the batch has the shapes
of the one that a run tries first: the largest bucket of the plan with its longest texts. Weights are counted as they
are trained, without what loading them takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from prep.cache.records import RowRef
from prep.fs.place import is_here
from prep.loader import draws
from prep.loader.batches import SLOTS, Batch, Slot
from prep.loader.draws import BatchRequest
from prep.loader.latents import latents_of
from prep.loader.rows import DTYPES, Rows
from prep.models.device.counting import tensors_in
from prep.models.device.hollow import Hollow
from prep.models.family import ATTENTION_MASK, PICTURES
from prep.training.checks import IN_HOST
from prep.training.schema import Config
from train.memory.autocast import OfGpu, recomputed
from train.memory.room import Room
from train.models.denoiser import Denoiser, precision_of, quiet
from train.models.offload import block_bytes
from train.models.recomputed import LEAST
from train.models.recomputed import recomputed as recomputed_here
from train.models.unloaded import unloaded
from train.optim.loss_scale import LossScale
from train.optim.optimizers import TABLE
from train.optim.singly import at_gradients
from train.parallel.shards import Whole
from train.setup import Setup
from train.state import (
    TrainState,
    apply_gradient,
    apply_gradients,
    averages_of,
    clip_gradients,
    forward_backward,
    groups,
    in_backward,
    move_averages,
    singly_of,
)

WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER, AVERAGE, INPUTS = (
    "weights", "adapters", "gradients", "optimizer", "average", "inputs")
_DIVIDED = {WEIGHTS, ADAPTERS, GRADIENTS, OPTIMIZER, AVERAGE}  # among processes, by parallel.shard


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """The memory of a step."""

    parts: Mapping[str, int]  # bytes at its peak, with all weights on the device
    samples: int  # of the pass that was counted
    blocks: tuple[int, ...] = ()  # bytes of the frozen weights of each block that may be in host memory instead


def count(setup: Setup, room: Room, world: int = 1) -> Taken:
    """What a step takes on a device of this room, for each of `world` processes: one pass over the largest batch, with
    the gradients of passes before it and with what the optimizer keeps, then the update."""
    quiet()
    with Hollow() as counted, nullcontext() if room.kind == "cpu" else OfGpu():
        trainee = _trainee(setup, room, counted)
        trained = trainee.denoiser.parameters
        for each in trained.values():
            parameter: Any = each  # whose method torch does not type
            parameter.register_post_accumulate_grad_hook(lambda value: counted.add(GRADIENTS, [value.grad]))
        if draws.accumulates(setup.plan, setup.config.micro_batch, world):
            trainee.model.hold_gradients(trained)
            counted.add(GRADIENTS, [value.grad for value in trained.values()])
        counted.reset_peak()
        with counted.making(INPUTS):
            batch = batch_of(setup, counted, world)
        if in_backward(setup.config):
            found = _within(trainee, setup, counted, batch)
        else:
            forward_backward(trainee, setup.config, batch)
            found = _later(dict(counted.peak), trainee, setup, counted)
        blocks = _offloadable(trainee, setup.config, room)
    if room.kind == "cpu":  # where the loader's buffers lie in the same memory
        found[INPUTS] = SLOTS * found.get(INPUTS, 0)
    if setup.config.parallel.shard:
        found |= {name: found[name] // world for name in _DIVIDED & found.keys()}
    return Taken(parts=found, samples=len(batch.latent_BChw), blocks=blocks)


def _offloadable(trainee: TrainState, config: Config, room: Room) -> tuple[int, ...]:
    """The bytes of each block that `offload` may keep in host memory."""
    possible = config.method == "lora" and room.has_own_memory and not config.compile and not config.parallel.shard
    return block_bytes(trainee.denoiser.model) if possible else ()


def _later(passing: dict[str, int], trainee: TrainState, setup: Setup, counted: Hollow) -> dict[str, int]:
    """The peak of a later step by part, if the first one had `passing` in its pass: with what the optimizer keeps, or
    in the update, which this makes twice."""
    gradients = {name: value.grad for name, value in trainee.denoiser.parameters.items()}
    _update(trainee, setup, counted)
    paged = _paged(trainee, counted)
    found = passing | {OPTIMIZER: passing.get(OPTIMIZER, 0) + counted.live[OPTIMIZER] - paged}
    for name, value in trainee.denoiser.parameters.items():
        value.grad = gradients[name]
    del gradients
    counted.reset_peak()
    _update(trainee, setup, counted)
    updating = dict(counted.peak)
    updating[OPTIMIZER] = updating.get(OPTIMIZER, 0) - paged
    return max(found, updating, key=lambda parts: sum(parts.values()))


def _within(trainee: TrainState, setup: Setup, counted: Hollow, batch: Batch) -> dict[str, int]:
    """The peak of a later step by part, if weights are updated in the backward pass: with what the optimizer keeps,
    which is made first."""
    trained = trainee.denoiser.parameters
    assert trainee.singly is not None

    def update(name: str, value: nn.Parameter) -> None:
        with counted.making(OPTIMIZER):
            apply_gradient(trainee, setup.config, 0, name, value)

    with trainee.singly.apart():
        for name, value in trained.items():
            value.grad = torch.zeros_like(value)
            update(name, value)
        counted.reset_peak()
        with at_gradients(trained, update):
            forward_backward(trainee, setup.config, batch)
    with counted.making(AVERAGE):
        move_averages(trainee, setup.config, 0)
    found = dict(counted.peak)
    return found | {OPTIMIZER: found.get(OPTIMIZER, 0) - _paged(trainee, counted)}


def _paged(trainee: TrainState, counted: Hollow) -> int:
    """Bytes of what the optimizer keeps that move to host memory."""
    return counted.live[OPTIMIZER] if trainee.spec.paged else 0


def _update(trainee: TrainState, setup: Setup, counted: Hollow) -> None:
    with counted.making(OPTIMIZER):
        clip_gradients(trainee, setup.config)
        apply_gradients(trainee, setup, 0)
    with counted.making(AVERAGE):
        move_averages(trainee, setup.config, 0)


def _trainee(setup: Setup, room: Room, counted: Hollow) -> TrainState:
    """What `train.state.create_state` makes, without data."""
    config, on_gpu = setup.config, room.kind != "cpu"
    way = recomputed if on_gpu else recomputed_here
    if config.gradient_checkpointing == IN_HOST and room.has_own_memory:
        way = partial(_recomputed_from_host, counted)
    denoiser = unloaded(setup.model.path, config, setup.prediction, room.dtype(precision_of(config)), setup.family,
                        counted, way, setup.model.adapter)
    counted.add(WEIGHTS, weights_of(denoiser))
    if config.method == "lora":
        counted.add(ADAPTERS, denoiser.parameters.values())
        counted.add(ADAPTERS, denoiser.weights.values())
    spec, beside = TABLE[config.optimizer.name], config.ema.device == "model" or not on_gpu
    chosen = replace(config.optimizer, name="adamw-8bit") if spec.paged else config.optimizer  # pages need a GPU
    with counted.making(AVERAGE):
        average, powers = averages_of(denoiser.parameters, config, in_host=False) if beside else (None, {})
    optimizer = spec.build(groups(denoiser, config), chosen, room.kind == "cuda")
    return TrainState(denoiser=denoiser, model=Whole(denoiser.weights), spec=spec, average=average, powers=powers,
                      optimizer=optimizer, latents=latents_of(setup.manifest),
                      singly=singly_of(denoiser, optimizer, config),
                      scale=LossScale() if denoiser.dtype == torch.float16 else None)


def _recomputed_from_host(counted: Hollow, block: Any, *args: Any) -> Any:
    """What `train.models.recomputed` does, where tensors in host memory are not counted."""
    with saved_tensors_hooks(lambda value: value if value.nbytes < LEAST else (tuple(value.shape), value.dtype),
                             lambda kept: kept if isinstance(kept, Tensor) else counted.empty(*kept)):
        return recomputed(block, *args)


def weights_of(denoiser: Denoiser) -> Iterator[Tensor]:
    """What a denoiser has on its device, with its conditioner: parameters, buffers, levels of noise, and tables that
    modules keep in plain attributes."""
    yield denoiser.levels
    for model in (denoiser.model, *(() if denoiser.conditioner is None else (denoiser.conditioner,))):
        yield from model.parameters()
        yield from model.buffers()
        for module in model.modules():
            yield from tensors_in([value for value in vars(module).values() if isinstance(value, Tensor | list)])


def batch_of(setup: Setup, counted: Hollow, world: int = 1) -> Batch:
    """The largest batch of the run, without data but for what code asks for: timesteps and lengths of texts."""
    config, index = setup.config, setup.index
    request = draws.trial(index, setup.plan, config.micro_batch, world)
    count, fields, latents = len(request.draws), index.manifest.fields, index.shape("latent", request.bucket)
    latent = counted.empty((count, *latents["latent"]), _stored(fields["latent"].arrays["latent"]))
    noise = counted.empty(tuple(latent.shape), torch.float32)
    if index.with_std:  # drawn from their posterior
        latent = counted.empty(tuple(latent.shape), torch.float32)
    mask = (counted.empty((count, *index.shape("mask", request.bucket)["mask"]), torch.uint8)
            if setup.reads_masks else None)
    others = _references(setup, request, counted)
    return Batch(latent_BChw=latent, text=_text(setup, request, counted), noise_BChw=noise,
                 mask_B1hw=mask[:, :1] if setup.masked and mask is not None else None,
                 inpaint_mask_BMhw=mask if index.inpaints else None,
                 input_noise_BChw=counted.empty(tuple(latent.shape), torch.float32)
                 if config.noise.perturbation else noise,
                 sizes_B6=torch.ones(count, 6), timestep_B=torch.zeros(count, dtype=torch.int64),
                 weight_B=torch.ones(count), references=() if index.paired else others,
                 opposite_BChw=others[0] if index.paired else None,
                 draws=request.draws, slot=Slot(False), padding=False)


def _references(setup: Setup, request: BatchRequest, counted: Hollow) -> tuple[Tensor, ...]:
    dtype = _stored(setup.index.manifest.fields["latent"].arrays["latent"])
    return tuple(counted.empty((len(request.draws), *shape), dtype)
                 for shape in Rows(setup.index).reference_shapes(request.draws[0]))


def _text(setup: Setup, request: BatchRequest, counted: Hollow) -> dict[str, Tensor]:
    """The arrays of the batch's texts; of trimmed rows those that mask padding have their values."""
    rows, count = Rows(setup.index), len(request.draws)
    arrays = setup.index.manifest.fields["text"].arrays
    refs = rows.places(request.draws, masked=False).texts
    tokens = rows.tokens(refs)
    found = {name: counted.empty((count, *shape), _stored(arrays[name]))
             for name, shape in rows.text_shapes(tokens).items()}
    if tokens is not None:
        found[ATTENTION_MASK] = _mask(rows, refs, tokens).to(_stored(arrays[ATTENTION_MASK]))
    if PICTURES in found:  # anywhere: only how many there are takes memory
        shown = 0 if setup.index.paired else len(request.draws[0].references)
        pictures = torch.arange(found[PICTURES].shape[1]) < shown
        found[PICTURES] = pictures.expand(count, -1).to(found[PICTURES].dtype)
    return found


def _mask(rows: Rows, refs: Sequence[RowRef], tokens: Sequence[int]) -> Tensor:
    """Which tokens are text. If the rows are elsewhere, all but the first text are at least a token shorter than the
    longest, as they usually are: attention then has a mask."""
    if is_here(rows.index.manifest.cache):
        dtype = rows.text_dtype(ATTENTION_MASK)
        data = np.empty((len(refs), max(tokens) * dtype.itemsize), np.uint8)
        mask = torch.from_numpy(data).view(dtype)  # a large one of torch's own would be hollow
        rows.fill_text({ATTENTION_MASK: mask}, refs, tokens)
        return mask
    lengths = torch.tensor([min(each, max(tokens) - (number > 0)) for number, each in enumerate(tokens)])
    return torch.arange(max(tokens)) < lengths[:, None]


def _stored(array: Mapping[str, Any]) -> torch.dtype:
    return DTYPES[str(array["dtype"])]
