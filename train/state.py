"""The training state: trained parameters, optimizer moments, moving average; and its files in checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from prep.errors import CacheError, ConfigError, ModelError, first_line
from prep.loader.device import module_to_device, to_host
from prep.loader.latents import Latents, latents_of
from prep.models.family import Family
from prep.training.schema import Config, Dtype
from train.config.load import as_table
from train.metadata import checkpoint_metadata, result_metadata
from train.models import lora
from train.models.base import base_fingerprints, describe_base, remembered_digests
from train.models.denoiser import Denoiser, load
from train.models.naming import Naming, naming_of
from train.optim import ema, kept, optimizers, schedule
from train.optim.ema import Average, Shadow
from train.optim.loss_scale import SHAPES, LossScale
from train.optim.optimizers import TABLE, Facts
from train.parallel.ranks import ALONE, Ranks
from train.parallel.shards import Fetch, Shards, shards_of
from train.runs.checkpoint import DataFacts, State, piece_name
from train.runs.checkpoint_files import Part, copy_into, has, read_tensors, tensor_names
from train.runs.resume import Start
from train.runs.safetensors.reader import STORED, read_joined
from train.runs.safetensors.writer import data_digest
from train.setup import Initial, Setup

T = TypeVar("T")
OPTIMIZER, AVERAGE, SCALE = "optimizer.safetensors", "ema.safetensors", "loss_scale.safetensors"
# Of a file that holds an average instead of the last weights: that of `ema.decay`, or the optimizer's own.
EMA_METADATA, OWN_METADATA = ({"latentry.weights": name} for name in ("moving average", "schedule-free average"))


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainState:
    """A denoiser in training. The record is frozen, its tensors are not."""

    denoiser: Denoiser
    optimizer: Any  # one of torch's, or used like one
    facts: Facts  # about the optimizer
    average: Average | None  # None: no moving average
    latents: Latents  # on the device
    scale: LossScale | None = None  # of the loss, with float16
    ranks: Ranks = ALONE  # the processes that train it together
    shards: Shards | None = None  # None: each rank has the whole model


def weights_name(setup_family: Family, method: str) -> str:
    """The file of the trained weights in a checkpoint."""
    return "lora.safetensors" if method == "lora" else f"{setup_family.denoiser}/diffusion_pytorch_model.safetensors"


def create_state(setup: Setup, device: torch.device, ranks: Ranks = ALONE) -> TrainState:
    """The state of a run at step 0. Raises `ModelError`, also if the model's files changed since they were checked."""
    config, chosen = setup.config, setup.config.optimizer
    denoiser = load(setup.model, config, setup.prediction, device, family=setup.family.name,
                    place=partial(_place, config, ranks))
    with remembered_digests() as digest:
        found = base_fingerprints(setup.model, setup.family, digest)
    if found != setup.base:
        raise ModelError(f"{setup.model} changed while it was loaded: it is {describe_base(found)}, and was "
                         f"{describe_base(setup.base)}", hint="try again when no other process writes to it")
    shards = shards_of(denoiser.weights, ranks) if ranks.sharded else None
    if shards is not None:
        denoiser = replace(denoiser, weights=shards.own,
                           parameters={name: shards.own[name] for name in denoiser.parameters})
    if setup.initial is not None:
        put_initial(denoiser.weights, setup.initial, config.method, setup.naming, shards)
    facts = TABLE[chosen.name]
    optimizer = facts.build(_groups(denoiser, config), chosen, device.type == "cuda")
    average = Average(denoiser.parameters, in_host=config.ema.device == "cpu") if config.ema.decay else None
    return TrainState(denoiser=denoiser, optimizer=optimizer, facts=facts, average=average, ranks=ranks,
                      shards=shards, latents=latents_of(setup.manifest).to(device),
                      scale=LossScale() if denoiser.dtype == torch.float16 else None)


def _place(config: Config, ranks: Ranks, model: Any, device: torch.device) -> None:
    """Brings a model from host memory to the device, whole or this rank's part of it."""
    if config.method == "lora" and config.lora.init == "pissa":  # decomposed by each rank: other processors may round
        ranks.require_equal({"first weights": data_digest({
            name: value for name, value in model.named_parameters() if lora.is_stored(name)})})
    (ranks.divide if ranks.sharded else module_to_device)(model, device)


def _groups(denoiser: Denoiser, config: Config) -> list[dict[str, Any]]:
    """The parameters by their learning rate (`None`: optimizer.lr), and those without weight decay apart."""
    found: dict[tuple[float | None, bool], list[Tensor]] = {}
    for name, value in denoiser.parameters.items():
        rate = lora.rate_of(name, value, config.lora) if config.method == "lora" else None
        found.setdefault((rate, config.method == "full" or lora.decays(name)), []).append(value)
    return [{"params": values, "rate": rate, **({} if decays else {"weight_decay": 0.0})}
            for (rate, decays), values in found.items()]


def averages(trainee: TrainState) -> Shadow | None:
    """The weights to evaluate and to give away, if they are not those that are trained: their average."""
    if trainee.facts.averages:
        return optimizers.average(trainee.optimizer, trainee.denoiser.parameters)
    return None if trainee.average is None else trainee.average.values


def put_initial(parameters: Mapping[str, Tensor], initial: Initial, method: str, naming: Naming,
                shards: Shards | None = None) -> None:
    """Copies the weights that a new run begins with. Raises `ModelError` if they changed since they were checked."""
    def changed(path: Path, error: Exception) -> ModelError:
        return ModelError(f"{path} cannot be used: {first_line(error)}",
                          hint="try again when no other process writes to it")

    files = dict(zip(initial.files, initial.digests, strict=True))
    whole = parameters if shards is None else shards.whole
    if method == "lora":
        _put(parameters, lora.unpack(read_joined(files, None, changed, known=STORED), whole, naming), shards)
    else:
        copy_into(parameters, read_joined(files, None, changed, _spans(whole, shards)))


def _put(targets: Mapping[str, Tensor], values: Mapping[str, Tensor], shards: Shards | None) -> None:
    """Copies whole values into `targets`, or this rank's rows of them."""
    copy_into(targets, values if shards is None else {name: shards.rows(values[name]) for name in targets})


def _spans(whole: Mapping[str, Tensor], shards: Shards | None) -> dict[str, range]:
    """Which rows of these tensors this rank has, if not all."""
    return {} if shards is None else {name: shards.span(len(value)) for name, value in whole.items()}


def add_gradients(trainee: TrainState) -> None:
    """Leaves the sums of the gradients over the ranks in the parameters."""
    if trainee.shards is None:
        trainee.ranks.add_gradients(trainee.denoiser.parameters.values())
    else:
        trainee.shards.take_gradients()  # FSDP has added them


def hold_gradients(trainee: TrainState) -> None:
    """Gives each trained parameter a gradient of zeros, to which a pass adds, as it does to that of a pass before."""
    trained = trainee.denoiser.parameters
    for value in trained.values() if trainee.shards is None else [trainee.shards.divided[name] for name in trained]:
        value.grad = torch.zeros_like(value)


def drop_gradients(trainee: TrainState) -> None:
    """Frees all gradients."""
    trainee.optimizer.zero_grad(set_to_none=True)
    if trainee.shards is not None:
        trainee.shards.drop_gradients()


def clip_gradients(trainee: TrainState, setup: Setup) -> Tensor:
    """Clips the gradients, after undoing the scale of the loss; returns their norm before, [], without waiting for it
    where the gradients are whole."""
    held = [value for value in trainee.denoiser.parameters.values() if value.grad is not None]
    if trainee.scale is not None:
        trainee.scale.undo([value.grad for value in held if value.grad is not None])
    most = setup.config.optimizer.clip or float("inf")
    if trainee.shards is None:
        return torch.nn.utils.clip_grad_norm_(held, most)
    own = torch.nn.utils.get_total_norm([value.grad for value in held if value.grad is not None])
    norm = torch.tensor(math.sqrt(trainee.ranks.total([float(own) ** 2])[0]))
    torch.nn.utils.clip_grads_with_norm_(held, most, norm)
    return norm


def apply_gradients(trainee: TrainState, setup: Setup, step: int, *, skipped: bool = False,
                    only_if: Tensor | None = None) -> float:
    """Updates the parameters in step `step` (from 0). Returns the rate that `optimizer.lr` gives.

    `skipped`: float16's gradients overflowed, so nothing changes but the scale of the loss. `only_if`, [] on the
    device, of an optimizer that spares updates: if it is false, nothing changes.
    """
    factor = schedule.factor(setup.config.schedule, step, setup.steps)
    rate = setup.config.optimizer.lr * factor
    for group in trainee.optimizer.param_groups:
        group["lr"] = rate if group["rate"] is None else group["rate"] * factor
    if trainee.scale is not None:
        (trainee.scale.halve if skipped else trainee.scale.grow)()
    if only_if is not None:
        trainee.optimizer.found_inf = (~only_if).float()  # as torch.amp.GradScaler hands it over
    if not skipped:
        trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    return rate


def move_average(trainee: TrainState, setup: Setup, step: int) -> None:
    """Moves the average, if there is one, toward the parameters that step `step` (from 0) has updated."""
    if trainee.average is not None:
        trainee.average.update(trainee.denoiser.parameters, ema.decay_at(step, setup.config.ema.decay))


# ---- keeping ---------------------------------------------------------------------------------------------------------


def state_of(setup: Setup, step: int) -> State:
    """The content of state.json, except for the list of files."""
    identity = setup.identity
    return State(step=step, manifest=setup.manifest.digest, config=as_table(setup.config), base=setup.base,
                 data=DataFacts(digest=identity.digest, facts=identity.facts), micro_batch=setup.plan.micro_batch,
                 init=setup.init, adopted=setup.adopted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Held:
    """The tensors of a run as files have them; of a divided model on the meta device, until they are fetched."""

    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor] | None  # with the weights that it leaves as they are
    optimizer: Mapping[str, Tensor]
    fetch: Fetch  # the values, in host memory


@contextmanager
def held(trainee: TrainState) -> Iterator[Held | None]:
    """All tensors to write, for the first rank; `None` for the others. All ranks call this.

    Of a divided model the others wait inside until the first one has what it needs.
    """
    if trainee.shards is None and not trainee.ranks.first:
        yield None
        return
    weights, average = trainee.denoiser.weights, averages(trainee)
    optimizer = kept.tensors_of(trainee.facts, trainee.optimizer, trainee.denoiser.parameters)
    averaged = None if average is None else {**weights, **average}
    if trainee.shards is None:
        yield Held(weights=weights, average=averaged, optimizer=optimizer, fetch=to_host)
        return
    parts: list[tuple[Tensor, Tensor]] = []

    def whole(values: Mapping[str, Tensor], shapes: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, value in values.items():
            found[name] = torch.empty_like(shapes[name], dtype=value.dtype) if name in shapes else value
            parts.append((value, found[name]))
        return found

    like = trainee.shards.whole
    all_weights, all_kept = whole(weights, like), whole(optimizer, _rows_kept(trainee, like))
    all_averages = None if averaged is None else whole(averaged, like)
    with trainee.shards.handing(parts) as fetch:
        yield None if fetch is None else Held(weights=all_weights, average=all_averages, optimizer=all_kept,
                                              fetch=fetch)


def _rows_kept(trainee: TrainState, like: Mapping[str, T]) -> dict[str, T]:
    """What the optimizer keeps for each row of a parameter, with the parameter's value in `like`: not its steps and
    other numbers."""
    assert trainee.shards is not None
    shapes = {name: tuple(trainee.shards.whole[name].shape) for name in trainee.denoiser.parameters}
    return {f"{kind}/{name}": like[name] for name, whole in shapes.items()
            for kind, (_, shape) in trainee.facts.kept(whole).items() if shape == whole}


def in_pieces(trainee: TrainState, setup: Setup) -> bool:
    """Whether each rank writes its own part of a checkpoint."""
    return trainee.shards is not None and setup.config.method == "full"


def own_files(trainee: TrainState, setup: Setup, step: int) -> Iterator[Part]:
    """The files of a checkpoint in pieces that this rank writes, except state.json."""
    shards, ranks = trainee.shards, trainee.ranks
    assert shards is not None and setup.config.method == "full"
    facts = checkpoint_metadata(setup, step, trainee.denoiser.parameters)
    weights, average = trainee.denoiser.weights, averages(trainee)
    name = weights_name(setup.family, setup.config.method)
    like = {each: each for each in weights}
    yield _piece(shards, name, weights, like, facts)
    moments = kept.tensors_of(trainee.facts, trainee.optimizer, trainee.denoiser.parameters)
    of_rows = {each: parameter for each, parameter in _rows_kept(trainee, like).items() if each in moments}
    yield _piece(shards, OPTIMIZER, {each: moments[each] for each in of_rows}, of_rows, {}, others=1)
    if average is not None:
        yield _piece(shards, AVERAGE, {**weights, **average}, like, {**facts, **_of_average(trainee)})
    if not ranks.first:
        return
    yield Part(name=piece_name(OPTIMIZER, ranks.world, ranks.world + 1),
               tensors={each: value for each, value in moments.items() if each not in of_rows})
    yield _model_config(trainee.denoiser, name)
    if trainee.scale is not None:
        yield Part(name=SCALE, tensors=trainee.scale.tensors())


def _piece(shards: Shards, name: str, rows: Mapping[str, Tensor], like: Mapping[str, str], facts: Mapping[str, str],
           others: int = 0) -> Part:
    """The rows that this rank has. `like`: the parameter with whose rows each goes; `others`: pieces without rows."""
    return Part(name=piece_name(name, shards.ranks.rank, shards.ranks.world + others), tensors=rows, metadata=facts,
                write=partial(shards.save, like))


def checkpoint_files(trainee: TrainState, setup: Setup, step: int, found: Held) -> Iterator[Part]:
    """The files of a checkpoint, except state.json."""
    facts = checkpoint_metadata(setup, step, {name: found.weights[name] for name in trainee.denoiser.parameters})
    tensors = _packed(found.weights, setup.config, setup.naming, found.fetch)
    yield from weight_parts(trainee.denoiser, tensors, setup, facts, weights_name(setup.family, setup.config.method),
                            found.fetch)
    yield Part(name=OPTIMIZER, tensors=found.optimizer, fetch=found.fetch)
    if trainee.scale is not None:
        yield Part(name=SCALE, tensors=trainee.scale.tensors())
    if found.average is not None:
        yield Part(name=AVERAGE, tensors=_packed(found.average, setup.config, setup.naming, found.fetch),
                   metadata={**facts, **_of_average(trainee)}, fetch=found.fetch)


def _of_average(trainee: TrainState) -> dict[str, str]:
    return OWN_METADATA if trainee.facts.averages else EMA_METADATA


def weight_parts(denoiser: Denoiser, tensors: Mapping[str, Tensor], setup: Setup, facts: Mapping[str, str],
                 name: str, fetch: Fetch = to_host) -> Iterator[Part]:
    """The trained weights in a format that other programs load: a LoRA file, or diffusers' weights and config."""
    yield Part(name=name, tensors=tensors, metadata=facts, fetch=fetch)
    if setup.config.method == "full":
        yield _model_config(denoiser, name)


def _model_config(denoiser: Denoiser, name: str) -> Part:
    """The config.json beside the weights `name`."""
    config = json.loads(denoiser.model.to_json_string())
    config.pop("_name_or_path", None)  # a path of this machine
    return Part(name=Path(name).with_name("config.json").as_posix(),
                data=json.dumps(config, indent=2).encode() + b"\n")


def result_files(trainee: TrainState, setup: Setup, step: int, name: str, found: Held) -> Iterator[Part]:
    """The result of the run: the average if there is one (the metadata say so), else the weights.

    Raises `ConfigError` if a weight is too large for `result.dtype`.
    """
    source = found.weights if found.average is None else found.average
    tensors = _cast(_packed(source, setup.config, setup.naming, found.fetch), setup.config.result.dtype, found.fetch)
    facts = result_metadata(setup, step, {each: found.weights[each] for each in trainee.denoiser.parameters}, tensors)
    if found.average is not None:
        facts |= _of_average(trainee)
    yield from weight_parts(trainee.denoiser, tensors, setup, facts, name, found.fetch)


def _cast(tensors: Mapping[str, Tensor], dtype: Dtype, fetch: Fetch) -> Mapping[str, Tensor]:
    """The tensors in the dtype of the result, in host memory if it is another one."""
    if dtype == "float32":
        return tensors
    wanted = torch.float16 if dtype == "float16" else torch.bfloat16
    found = {name: _value(value, fetch).to(wanted) for name, value in tensors.items()}
    for name, value in found.items():
        if not bool(value.isfinite().all()):
            raise ConfigError(f"'{name}' has values that {dtype} cannot hold, so the result is not written",
                              hint="continue with the same command, --resume and --set result.dtype=bfloat16")
    return found


def result_name(setup: Setup) -> str:
    """The name of the run's result: a LoRA file, or the directory of the denoiser."""
    return "lora.safetensors" if setup.config.method == "lora" else setup.family.denoiser


# ---- restoring -------------------------------------------------------------------------------------------------------


def restore(trainee: TrainState, start: Start, naming: Naming) -> None:
    """Restores a checkpoint's values bit by bit, after comparing names, dtypes, shapes and digests.

    Raises `CacheError`.
    """
    parameters = trainee.denoiser.parameters
    family = trainee.denoiser.family
    shards = trainee.shards
    whole: Mapping[str, Tensor] = parameters if shards is None else {name: shards.whole[name] for name in parameters}
    put_weights(trainee.denoiser.weights, start, weights_name(family, start.config.method), family, shards=shards,
                naming=naming)
    wanted = kept.expected(trainee.facts, trainee.optimizer, whole,
                           tensor_names(start.folder, start.state, OPTIMIZER))
    scaled = has(start.folder, start.state, SCALE)
    moments = [name for name in wanted if "/group-" not in name]
    if not moments and not scaled:  # with a scale of the loss, every step so far may have been skipped
        raise CacheError(f"{start.folder / OPTIMIZER} has no moments for any trained parameter",
                         hint="the checkpoint is from another run; train again into another RUN with -o")
    divided = {} if shards is None else _rows_kept(trainee, shards.whole)
    only = _spans({name: like for name, like in divided.items() if name in wanted}, shards)
    values = read_tensors(start.folder, start.state, OPTIMIZER, wanted, only)
    kept.put(trainee.facts, trainee.optimizer, parameters, values)
    if trainee.scale is not None and scaled:  # else an adopted change of precision begins with a fresh one
        trainee.scale.put(read_tensors(start.folder, start.state, SCALE, SHAPES))
    if trainee.average is not None:
        put_weights(trainee.average.values, start, AVERAGE, family, trainee.denoiser.weights, shards, naming)


def put_weights(targets: Mapping[str, Tensor], start: Start, name: str, family: Family,
                there: Mapping[str, Tensor] | None = None, shards: Shards | None = None,
                naming: Naming | None = None) -> None:
    """Copies a checkpoint's weights, or its moving average, into `targets`. Raises `CacheError`.

    `there`: all weights that the file should have, if they are more than `targets`: an average has no frozen ones.
    """
    of_file = targets if there is None else there
    if shards is not None:
        of_file = {name: shards.whole[name] for name in of_file}
    naming = kept_naming(start, name, naming or naming_of(family))
    like = _packed(of_file, start.config, naming)
    wanted = {each: (value.dtype, tuple(value.shape)) for each, value in like.items()}
    if start.config.method == "lora":
        values = read_tensors(start.folder, start.state, name, wanted)
        _put(targets, lora.unpack(values, of_file, naming), shards)
        return
    copy_into(targets, read_tensors(start.folder, start.state, name, wanted, _spans(of_file, shards)))


def kept_naming(start: Start, name: str, naming: Naming) -> Naming:
    """`naming`, or that of an earlier version, which wrote the checkpoint's file `name`. Raises `CacheError`."""
    if start.config.method != "lora":
        return naming
    return naming.kept(tensor_names(start.folder, start.state, name), start.config.lora)


def averaged(start: Start, family: Family) -> str:
    """The checkpoint's file to sample with: the moving average if there is one, else the weights."""
    return AVERAGE if has(start.folder, start.state, AVERAGE) else weights_name(family, start.config.method)


def _packed(values: Mapping[str, Tensor], config: Config, naming: Naming, fetch: Fetch | None = None
            ) -> Mapping[str, Tensor]:
    """Parameters under the names that they have in a file; adapters are fetched for that, which may be on several
    devices."""
    if config.method == "full":
        return values
    if fetch is not None:
        values = {name: to_host(_value(value, fetch)) for name, value in values.items()}
    return lora.pack(values, config.lora, naming)


def _value(value: Tensor, fetch: Fetch) -> Tensor:
    """A tensor in memory: fetched, if it is on the meta device."""
    return fetch(value) if value.is_meta else value
