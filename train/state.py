"""The training state: trained parameters, optimizer moments, moving average, and the parts of a step that change it.

`state_files` has its files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from prep.errors import ModelError, first_line
from prep.loader.batches import Batch
from prep.loader.device import module_to_device, to_device
from prep.loader.latents import Latents, latents_of
from prep.loader.rows import Rows
from prep.models.family import TextArrays
from prep.progress import Progress, silent
from prep.training.schema import Config
from train.models import lora
from train.models.adapters.beside import attach_beside
from train.models.adapters.frozen import FrozenAdapter
from train.models.base import base_fingerprints, describe_base, remembered_digests
from train.models.denoiser import Denoiser, load
from train.models.naming import Naming
from train.objectives.forward import (
    Prediction,
    forward,
    has_opposite,
    opposite,
    prompted_losses,
    sample_losses,
)
from train.objectives.slider import Slide
from train.optim import ema, optimizers, schedule
from train.optim.ema import Shadow, WeightAverage
from train.optim.loss_scale import LossScale
from train.optim.optimizers import TABLE, OptimizerSpec
from train.optim.singly import Singly
from train.parallel.ranks import ALONE, Ranks
from train.parallel.shards import OwnRows, Sharded, Whole, norm_of
from train.runs.checkpoint import POWERS
from train.runs.checkpoint_files import copy_into
from train.runs.safetensors.reader import STORED, read_joined
from train.runs.safetensors.writer import data_digest
from train.sampling.prompts import places_of
from train.setup import Initial, Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """A denoiser in training. The record is frozen, its tensors are not."""

    denoiser: Denoiser
    model: Whole  # its weights, or what this rank has of them
    optimizer: Any  # one of torch's, or used like one
    spec: OptimizerSpec  # of the optimizer
    average: WeightAverage | None  # None: no moving average
    powers: Mapping[str, WeightAverage] = field(default_factory=dict)  # power-function averages, by their files
    latents: Latents  # on the device
    scale: LossScale | None = None  # of the loss, with float16
    singly: Singly | None = None  # updates one parameter at a time; None: all together
    prompts: TextArrays | None = None  # the rows of preserve.prompts, on the device; None: they are not preserved
    slide: Slide | None = None  # what a slider is trained by, on the device; None: by pairs of pictures, or none is
    offload: int = 0  # blocks in host memory

    @property
    def ranks(self) -> Ranks:
        """The processes that train it together."""
        return self.model.ranks


def create_state(setup: Setup, device: torch.device, ranks: Ranks = ALONE, *, offload: int = 0,
                 progress: Progress = silent) -> TrainState:
    """The state of a run at step 0, with so many blocks in host memory as `offload` says. Raises `ModelError`, also if
    the model's files changed since they were checked."""
    config, chosen = setup.config, setup.config.optimizer
    kind = Sharded if config.parallel.shard and ranks.world > 1 else Whole
    own = OwnRows(ranks) if kind.sharded and not (config.method == "lora" and lora.reads_base(config.lora)) else None
    denoiser = load(setup.model.path, config, setup.prediction, device, family=setup.family.name,
                    weights_on=torch.device("cpu") if kind.sharded else None, keep=own, parts=ranks.world,
                    offload=offload, beside=_beside(setup.model.adapter, own),
                    place=partial(_place, config, kind, ranks, own), progress=progress)
    with remembered_digests() as digest:
        found = base_fingerprints(setup.model.path, setup.family, digest)
    if found.items() - setup.model.base.items():
        raise ModelError(f"{setup.model.path} changed while it was loaded: it is {describe_base(found)}, and was "
                         f"{describe_base(setup.model.base)}", hint="try again when no other process writes to it")
    model = kind(denoiser.weights, ranks)
    if model.sharded:
        denoiser = replace(denoiser, weights=model.own,
                           parameters={name: model.own[name] for name in denoiser.parameters})
    if setup.model.initial is not None:
        put_initial(model, setup.model.initial, config.method, setup.model.naming)
    spec = TABLE[chosen.name]
    optimizer = spec.build(groups(denoiser, config), chosen, device.type == "cuda")
    average, powers = averages_of(denoiser.parameters, config, in_host=config.ema.device == "cpu")
    return TrainState(denoiser=denoiser, model=model, optimizer=optimizer, spec=spec, average=average, powers=powers,
                      latents=latents_of(setup.manifest).to(device), singly=singly_of(denoiser, optimizer, config),
                      scale=LossScale() if denoiser.dtype == torch.float16 else None, offload=offload,
                      prompts=_prompts(setup, device), slide=_slide(setup, device))


def averages_of(parameters: Mapping[str, Tensor], config: Config, *, in_host: bool
                ) -> tuple[WeightAverage | None, dict[str, WeightAverage]]:
    """The moving average, if there is one, and the power-function averages by their files."""
    average = WeightAverage(parameters, in_host=in_host) if config.ema.decay else None
    names = POWERS if config.ema.snapshots else ()
    return average, {name: WeightAverage(parameters, in_host=in_host) for name in names}


def _prompts(setup: Setup, device: torch.device) -> TextArrays | None:
    """The text rows of the prompts that are preserved, if any are. Raises `CacheError`."""
    preserve = setup.config.preserve
    return _rows(setup, "preserve.prompts", preserve.prompts, device) if preserve.prompted else None


def _slide(setup: Setup, device: torch.device) -> Slide | None:
    """What a slider is trained by, if one is. Raises `CacheError`."""
    slider = setup.config.slider
    return Slide(text=_rows(setup, "slider", slider.prompts, device), strength=slider.strength) if slider.on else None


def _rows(setup: Setup, setting: str, prompts: Sequence[str], device: torch.device) -> TextArrays:
    rows = Rows(setup.index).text(places_of(setup.index, prompts, setting))
    return {name: to_device(value, device) for name, value in rows.items()}


def _place(config: Config, kind: type[Whole], ranks: Ranks, own: OwnRows | None, model: Any, device: torch.device
           ) -> None:
    """Brings a model to the device, whole or this rank's part of it, which was kept of it where it was read."""
    if config.method == "lora" and config.lora.init == "pissa":  # decomposed by each rank: other processors may round
        ranks.require_equal({"first weights": data_digest({
            name: value for name, value in model.named_parameters() if lora.is_stored(name)})})
    if kind.sharded:
        ranks.divide(model, device, None if own is None else own.rows)
    else:
        module_to_device(model, device)


def _beside(adapter: FrozenAdapter | None, own: OwnRows | None) -> Callable[[Any, torch.dtype], object]:
    """What adds the training adapter, if there is one, to a denoiser; its file is read now. Raises `ModelError` if that
    has changed since it was checked."""
    if adapter is None:
        return lambda *_: None
    tensors = read_joined({adapter.path: adapter.digest}, None, _changed, known=STORED)
    return partial(attach_beside, adapter=adapter, tensors=tensors, keep=own)


def singly_of(denoiser: Denoiser, optimizer: Any, config: Config) -> Singly | None:
    """What updates the parameters one at a time, if some are not float32, or are updated in the backward pass."""
    rounded = any(value.dtype != torch.float32 for value in denoiser.parameters.values())
    return Singly(optimizer, denoiser.parameters, config.seed) if rounded or in_backward(config) else None


def in_backward(config: Config) -> bool:
    """Whether weights are updated within the backward pass."""
    return config.method == "full" and config.full.fused_backward


def groups(denoiser: Denoiser, config: Config) -> list[dict[str, Any]]:
    """The parameters by their learning rate (`None`: optimizer.lr), and those without weight decay apart."""
    found: dict[tuple[float | None, bool], list[Tensor]] = {}
    for name, value in denoiser.parameters.items():
        rate = lora.rate_of(name, value, config.lora) if config.method == "lora" else None
        found.setdefault((rate, config.method == "full" or lora.decays(name)), []).append(value)
    return [{"params": values, "rate": rate, **({} if decays else {"weight_decay": 0.0})}
            for (rate, decays), values in found.items()]


def averages(trainee: TrainState) -> Shadow | None:
    """The weights to evaluate and to give away, if they are not those that are trained: their average."""
    if trainee.spec.averages:
        return optimizers.average(trainee.optimizer, trainee.denoiser.parameters)
    return None if trainee.average is None else trainee.average.values


def put_initial(model: Whole, initial: Initial, method: str, naming: Naming) -> None:
    """Copies the weights that a new run begins with. Raises `ModelError` if they changed since they were checked."""
    files, whole = dict(zip(initial.files, initial.digests, strict=True)), model.shapes(model.own)
    if method == "lora":
        put_whole(model.own, lora.unpack(read_joined(files, None, _changed, known=STORED), whole, naming), model)
    else:
        copy_into(model.own, read_joined(files, None, _changed, model.spans(whole)))


def _changed(path: Path, error: Exception) -> ModelError:
    return ModelError(f"{path} cannot be used: {first_line(error)}",
                      hint="try again when no other process writes to it")


def put_whole(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], model: Whole) -> None:
    """Copies whole values into `targets`, or this rank's rows of them."""
    copy_into(targets, {name: model.rows(values[name]) for name in targets})


def forward_backward(trainee: TrainState, config: Config, batch: Batch,
                     between: Callable[[Tensor], None] | None = None) -> tuple[Tensor, Tensor]:
    """The weighted losses of a micro-batch, summed, and each sample's, after adding its share to the step's gradients.

    `between` is called with the sum before the backward pass.
    """
    here = batch.to(trainee.denoiser.device)
    predicted = forward(trainee.denoiser, here, trainee.latents, config.loss, config.preserve, trainee.slide,
                        together=trainee.model.sharded)
    each_B = sample_losses(predicted, config.loss) * (0.5 if has_opposite(here, trainee.slide) else 1)
    loss = (each_B * predicted.weight_B).sum()
    if between is not None:
        between(loss.detach())
    times = 0.0 if batch.padding else 1.0 if trainee.scale is None else trainee.scale.value
    batch.spare_gil()
    (loss * times / config.batch_size).backward()  # type: ignore[no-untyped-call]
    loss, each_B = loss.detach(), each_B.detach()
    for more_B in _more(trainee, config, here, predicted):  # each by itself: activations of earlier passes are gone
        more = (more_B * predicted.weight_B).sum()
        (more * times / config.batch_size).backward()  # type: ignore[no-untyped-call]
        loss, each_B = loss + more.detach(), each_B + more_B.detach()
    return loss, each_B


def _more(trainee: TrainState, config: Config, batch: Batch, given: Prediction) -> Iterator[Tensor]:
    """The losses, `[B]`, of passes beside the first of a batch; the backward pass of each is made before the next."""
    if has_opposite(batch, trainee.slide):
        with lora.at_weight(trainee.denoiser.model, -1):
            yield 0.5 * sample_losses(opposite(trainee.denoiser, batch, trainee.latents, config.loss, given,
                                               config.preserve, together=trainee.model.sharded), config.loss)
    if trainee.prompts is not None:
        yield config.preserve.prompted * prompted_losses(trainee.denoiser, batch, given, config.loss, trainee.prompts)


def clip_gradients(trainee: TrainState, config: Config) -> Tensor:
    """Clips the gradients, after undoing the scale of the loss; returns their norm before, [], without waiting for it
    where the gradients are whole."""
    trained = [value for value in trainee.denoiser.parameters.values() if value.grad is not None]
    gradients = [value.grad for value in trained if value.grad is not None]
    if trainee.scale is not None:
        trainee.scale.undo(gradients)
    norm = trainee.model.norm(gradients)
    torch.nn.utils.clip_grads_with_norm_(trained, config.optimizer.clip or float("inf"), norm)
    return norm


def apply_gradients(trainee: TrainState, setup: Setup, step: int, *, skipped: bool = False,
                    only_if: Tensor | None = None) -> float:
    """Updates the parameters in step `step` (from 0). Returns the rate that `optimizer.lr` gives.

    `skipped`: float16's gradients overflowed, so nothing changes but the scale of the loss. `only_if`, [] on the
    device, of an optimizer that spares updates: if it is false, nothing changes.
    """
    rate = set_rates(trainee, setup, step)
    if trainee.scale is not None:
        (trainee.scale.halve if skipped else trainee.scale.grow)()
    if only_if is not None:
        trainee.optimizer.found_inf = (~only_if).float()  # as torch.amp.GradScaler hands it over
    if not skipped and trainee.singly is None:
        trainee.optimizer.step()
    elif not skipped and trainee.singly is not None:
        with trainee.singly.apart():
            for name, value in trainee.denoiser.parameters.items():
                if value.grad is not None:
                    trainee.singly.update(name, value, step)
    trainee.optimizer.zero_grad(set_to_none=True)
    return rate


def set_rates(trainee: TrainState, setup: Setup, step: int) -> float:
    """Gives each group of parameters its learning rate in step `step` (from 0). Returns that of `optimizer.lr`."""
    factor = schedule.factor(setup.config.schedule, step, setup.steps)
    rate = setup.config.optimizer.lr * factor
    for group in trainee.optimizer.param_groups:
        group["lr"] = rate if group["rate"] is None else group["rate"] * factor
    return rate


def apply_gradient(trainee: TrainState, config: Config, step: int, name: str, value: nn.Parameter) -> Tensor:
    """Clips the gradient of one parameter by itself, updates it in step `step` (from 0) and frees the gradient. Returns
    the norm before, [], without waiting for it. Within `Singly.apart`."""
    assert trainee.singly is not None and value.grad is not None
    norm = norm_of(value.grad)
    if config.optimizer.clip:
        torch.nn.utils.clip_grads_with_norm_([value], config.optimizer.clip, norm)
    trainee.singly.update(name, value, step)
    return norm


def move_averages(trainee: TrainState, config: Config, step: int, *, skipped: bool = False) -> None:
    """Moves the averages that there are toward the parameters after step `step` (from 0). If that was `skipped`, the
    moving average stays; power-function averages are over all steps."""
    for name, power in trainee.powers.items():
        power.update(trainee.denoiser.parameters, ema.power_decay_at(step, POWERS[name]))
    if trainee.average is not None and not skipped:
        trainee.average.update(trainee.denoiser.parameters, ema.decay_at(step, config.ema.decay))
