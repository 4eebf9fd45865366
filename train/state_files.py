"""The training state as files: checkpoints, the result of a run, and restoring from a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from prep.errors import CacheError, ConfigError
from prep.loader.device import to_host
from prep.models.family import Family
from prep.training.schema import Config, Dtype
from train.config.load import as_table
from train.metadata import checkpoint_metadata, result_metadata
from train.models import lora
from train.models.denoiser import Denoiser
from train.models.naming import Naming, naming_of
from train.optim import optimizer_state
from train.optim.loss_scale import SHAPES
from train.parallel.shards import Fetch, Sharded, Whole
from train.runs.checkpoint import POWERS, DataFacts, State, piece_name
from train.runs.checkpoint_files import CheckpointFile, copy_into, has, read_tensors, tensor_names
from train.runs.resume import Start
from train.setup import Setup
from train.state import TrainState, averages, put_whole

T = TypeVar("T")
OPTIMIZER, AVERAGE, SCALE = "optimizer.safetensors", "ema.safetensors", "loss_scale.safetensors"
# Of a file that holds an average instead of the last weights: that of `ema.decay`, or the optimizer's own.
EMA_METADATA, OWN_METADATA, POWER_METADATA = ({"latentry.weights": name} for name in (
    "moving average", "schedule-free average", "power-function average"))


def weights_name(setup_family: Family, method: str) -> str:
    """The file of the trained weights in a checkpoint."""
    return "lora.safetensors" if method == "lora" else f"{setup_family.denoiser}/diffusion_pytorch_model.safetensors"


# ---- keeping ---------------------------------------------------------------------------------------------------------


def state_of(setup: Setup, step: int) -> State:
    """The content of state.json, except for the list of files."""
    identity = setup.identity
    return State(step=step, manifest=setup.manifest.digest, config=as_table(setup.config), base=setup.model.base,
                 data=DataFacts(digest=identity.digest, facts=identity.facts), micro_batch=setup.plan.micro_batch,
                 init=setup.init, adopted=setup.adopted)


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """The tensors of a run as files have them; of a divided model on the meta device, until they are fetched."""

    weights: Mapping[str, Tensor]
    average: Mapping[str, Tensor] | None  # with the weights that it leaves as they are
    powers: Mapping[str, Mapping[str, Tensor]]  # likewise, of each power-function average by its file
    optimizer: Mapping[str, Tensor]
    fetch: Fetch  # the values, in host memory


@contextmanager
def snapshot(trainee: TrainState) -> Iterator[Snapshot | None]:
    """All tensors to write, for the first rank; `None` for the others. All ranks call this.

    Of a divided model the others wait inside until the first one has what it needs.
    """
    weights, average = trainee.denoiser.weights, averages(trainee)
    optimizer = optimizer_state.tensors_of(trainee.spec, trainee.optimizer, trainee.denoiser.parameters)
    like = trainee.model.shapes(weights)
    averaged = {} if average is None else {**weights, **average}
    powers = [({**weights, **power.values}, like) for power in trainee.powers.values()]
    with trainee.model.handing((weights, like), (optimizer, _rows_kept(trainee, like)), (averaged, like),
                               *powers) as handed:
        if handed is None:
            yield None
            return
        (all_weights, moments, all_averages, *all_powers), fetch = handed
        yield Snapshot(weights=all_weights, average=None if average is None else all_averages, optimizer=moments,
                       powers=dict(zip(trainee.powers, all_powers, strict=True)), fetch=fetch)


def _rows_kept(trainee: TrainState, like: Mapping[str, T]) -> dict[str, T]:
    """What the optimizer keeps for each row of a parameter, with the parameter's value in `like`: not its steps and
    other numbers."""
    shapes = {name: tuple(value.shape) for name, value in trainee.model.shapes(trainee.denoiser.parameters).items()}
    return {f"{kind}/{name}": like[name] for name, whole in shapes.items()
            for kind, (_, shape) in trainee.spec.state(whole).items() if shape == whole}


def in_pieces(trainee: TrainState, config: Config) -> bool:
    """Whether each rank writes its own part of a checkpoint."""
    return trainee.model.sharded and config.method == "full"


def own_files(trainee: TrainState, setup: Setup, step: int) -> Iterator[CheckpointFile]:
    """The files of a checkpoint in pieces that this rank writes, except state.json."""
    model, ranks = trainee.model, trainee.ranks
    assert isinstance(model, Sharded) and setup.config.method == "full"
    metadata = checkpoint_metadata(setup, step, trainee.denoiser.parameters)
    weights, average = trainee.denoiser.weights, averages(trainee)
    name = weights_name(setup.family, setup.config.method)
    like = {each: each for each in weights}
    yield _piece(model, name, weights, like, metadata)
    moments = optimizer_state.tensors_of(trainee.spec, trainee.optimizer, trainee.denoiser.parameters)
    of_rows = {each: parameter for each, parameter in _rows_kept(trainee, like).items() if each in moments}
    yield _piece(model, OPTIMIZER, {each: moments[each] for each in of_rows}, of_rows, {}, others=1)
    if average is not None:
        yield _piece(model, AVERAGE, {**weights, **average}, like, {**metadata, **_of_average(trainee)})
    for power_name, power in trainee.powers.items():
        yield _piece(model, power_name, {**weights, **power.values}, like, {**metadata, **POWER_METADATA})
    if not ranks.first:
        return
    yield CheckpointFile(name=piece_name(OPTIMIZER, ranks.world, ranks.world + 1),
                         tensors={each: value for each, value in moments.items() if each not in of_rows})
    yield _model_config(trainee.denoiser, name)
    if trainee.scale is not None:
        yield CheckpointFile(name=SCALE, tensors=trainee.scale.tensors())


def _piece(model: Sharded, name: str, rows: Mapping[str, Tensor], like: Mapping[str, str], metadata: Mapping[str, str],
           others: int = 0) -> CheckpointFile:
    """The rows that this rank has. `like`: the parameter with whose rows each goes; `others`: pieces without rows."""
    return CheckpointFile(name=piece_name(name, model.ranks.rank, model.ranks.world + others), tensors=rows,
                          metadata=metadata, write=partial(model.save, like))


def checkpoint_files(trainee: TrainState, setup: Setup, step: int, saved: Snapshot) -> Iterator[CheckpointFile]:
    """The files of a checkpoint, except state.json."""
    metadata = checkpoint_metadata(setup, step, {name: saved.weights[name] for name in trainee.denoiser.parameters})
    tensors = _packed(saved.weights, setup.config, setup.model.naming, saved.fetch)
    yield from weight_parts(trainee.denoiser, tensors, setup, metadata, weights_name(setup.family, setup.config.method),
                            saved.fetch)
    yield CheckpointFile(name=OPTIMIZER, tensors=saved.optimizer, fetch=saved.fetch)
    if trainee.scale is not None:
        yield CheckpointFile(name=SCALE, tensors=trainee.scale.tensors())
    if saved.average is not None:
        tensors = _packed(saved.average, setup.config, setup.model.naming, saved.fetch)
        yield CheckpointFile(name=AVERAGE, tensors=tensors, metadata={**metadata, **_of_average(trainee)},
                             fetch=saved.fetch)
    for name, power in saved.powers.items():
        yield CheckpointFile(name=name, tensors=_packed(power, setup.config, setup.model.naming, saved.fetch),
                             metadata={**metadata, **POWER_METADATA}, fetch=saved.fetch)


def _of_average(trainee: TrainState) -> dict[str, str]:
    return OWN_METADATA if trainee.spec.averages else EMA_METADATA


def weight_parts(denoiser: Denoiser, tensors: Mapping[str, Tensor], setup: Setup, metadata: Mapping[str, str],
                 name: str, fetch: Fetch = to_host) -> Iterator[CheckpointFile]:
    """The trained weights in a format that other programs load: a LoRA file, or diffusers' weights and config."""
    yield CheckpointFile(name=name, tensors=tensors, metadata=metadata, fetch=fetch)
    if setup.config.method == "full":
        yield _model_config(denoiser, name)


def _model_config(denoiser: Denoiser, name: str) -> CheckpointFile:
    """The config.json beside the weights `name`."""
    config = json.loads(denoiser.model.to_json_string())
    config.pop("_name_or_path", None)  # a path of this machine
    return CheckpointFile(name=Path(name).with_name("config.json").as_posix(),
                          data=json.dumps(config, indent=2).encode() + b"\n")


def result_files(trainee: TrainState, setup: Setup, step: int, name: str, saved: Snapshot) -> Iterator[CheckpointFile]:
    """The result of the run: the average if there is one (the metadata say so), else the weights.

    Raises `ConfigError` if a weight is too large for `result.dtype`; with auto, bfloat16 takes the place of float16.
    """
    source = saved.weights if saved.average is None else saved.average
    packed = _packed(source, setup.config, setup.model.naming, saved.fetch)
    tensors = _as_asked(packed, setup, saved.fetch)
    trained = {each: saved.weights[each] for each in trainee.denoiser.parameters}
    metadata = result_metadata(setup, step, trained, tensors)
    if saved.average is not None:
        metadata |= _of_average(trainee)
    yield from weight_parts(trainee.denoiser, tensors, setup, metadata, name, saved.fetch)


def _as_asked(tensors: Mapping[str, Tensor], setup: Setup, fetch: Fetch) -> Mapping[str, Tensor]:
    """The tensors in the dtype that `result.dtype` means. Raises `ConfigError` as `_cast` does."""
    dtype = setup.config.result.dtype
    if dtype != "auto":
        return _cast(tensors, dtype, fetch)
    if setup.config.method == "lora":
        return tensors
    try:
        return _cast(tensors, setup.model.dtype, fetch)
    except ConfigError:  # the base's numbers are smaller than some of those that training made
        return _cast(tensors, "bfloat16", fetch)


def _cast(tensors: Mapping[str, Tensor], dtype: Dtype, fetch: Fetch) -> Mapping[str, Tensor]:
    """The tensors in the dtype of the result, in host memory if it is another one."""
    wanted: torch.dtype = getattr(torch, dtype)
    cast = {name: value if value.dtype == wanted else in_memory(value, fetch).to(wanted)
            for name, value in tensors.items()}
    if dtype == "float32":
        return cast
    for name, value in cast.items():
        if not bool(value.isfinite().all()):
            wider = "bfloat16" if dtype == "float16" else "float32"
            raise ConfigError(f"'{name}' has values that {dtype} cannot hold, so the result is not written",
                              hint=f"continue with the same command, --resume and --set result.dtype={wider}")
    return cast


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
    model = trainee.model
    whole = model.shapes(parameters)
    put_weights(trainee.denoiser.weights, start, weights_name(family, start.config.method), family, model,
                naming=naming)
    wanted = optimizer_state.expected(trainee.spec, trainee.optimizer, whole,
                           tensor_names(start.folder, start.state, OPTIMIZER))
    scaled = has(start.folder, start.state, SCALE)
    moments = [name for name in wanted if "/group-" not in name]
    if not moments and not scaled:  # with a scale of the loss, every step so far may have been skipped
        raise CacheError(f"{start.folder / OPTIMIZER} has no moments for any trained parameter",
                         hint="the checkpoint is from another run; train again into another RUN with -o")
    only = model.spans({name: like for name, like in _rows_kept(trainee, whole).items() if name in wanted})
    values = read_tensors(start.folder, start.state, OPTIMIZER, wanted, only)
    optimizer_state.put(trainee.spec, trainee.optimizer, parameters, values)
    if trainee.scale is not None and scaled:  # else an adopted change of precision begins with a fresh one
        trainee.scale.put(read_tensors(start.folder, start.state, SCALE, SHAPES))
    if trainee.average is not None:
        put_weights(trainee.average.values, start, AVERAGE, family, model, trainee.denoiser.weights, naming)
    for name, power in trainee.powers.items():
        put_weights(power.values, start, name, family, model, trainee.denoiser.weights, naming)


def put_weights(targets: Mapping[str, Tensor], start: Start, name: str, family: Family, model: Whole,
                existing: Mapping[str, Tensor] | None = None, naming: Naming | None = None) -> None:
    """Copies a checkpoint's weights, or its moving average, into `targets`. Raises `CacheError`.

    `existing`: all weights that the file should have, if they are more than `targets`: an average has no frozen ones.
    """
    of_file = model.shapes(targets if existing is None else existing)
    naming = kept_naming(start, name, naming or naming_of(family))
    like = _packed(of_file, start.config, naming)
    average = name in (AVERAGE, *POWERS)  # which is float32, whatever the trained weights are
    wanted = {each: (torch.float32 if average and value.requires_grad else value.dtype, tuple(value.shape))
              for each, value in like.items()}
    if start.config.method == "lora":
        values = read_tensors(start.folder, start.state, name, wanted)
        put_whole(targets, lora.unpack(values, of_file, naming), model)
        return
    copy_into(targets, read_tensors(start.folder, start.state, name, wanted, model.spans(of_file)))


def kept_naming(start: Start, name: str, naming: Naming) -> Naming:
    """`naming`, or that of an earlier version, which wrote the checkpoint's file `name`. Raises `CacheError`."""
    if start.config.method != "lora":
        return naming
    return naming.as_written(tensor_names(start.folder, start.state, name), start.config.lora)


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
        values = {name: to_host(in_memory(value, fetch)) for name, value in values.items()}
    return lora.pack(values, config.lora, naming)


def in_memory(value: Tensor, fetch: Fetch) -> Tensor:
    """A tensor in memory: fetched, if it is on the meta device."""
    return fetch(value) if value.is_meta else value
