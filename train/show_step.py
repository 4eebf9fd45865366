"""`train replay`: what a step of a run was trained on, drawn again from its keys."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from prep.errors import CacheError, PathError, UsageError
from prep.fs.place import Local, Place
from prep.geometry import Placement
from prep.loader import draws
from prep.loader.draws import NO_TEXT, BatchRequest, Draw
from prep.loader.index import Index
from prep.models.files import Model
from prep.models.pipeline import scheduler_config
from prep.runs.losses import NAME, Records, read_losses
from prep.training.table import SETTINGS
from train.check import check
from train.config.load import on_trained
from train.models.size_shift import chances_by_bucket
from train.runs.directory import Run, model_of, open_run, read_run
from train.runs.losses import ids_of
from train.runs.pictures import path_of
from train.runs.resume import find_start
from train.setup import Setup


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownReference:
    """A reference of a sample of a step."""

    name: str
    path: Path | None  # None: it is inside of a file, or no longer there
    shown: bool  # False: dropped
    placement: Placement


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownSample:
    """One sample of a step."""

    name: str
    source: int  # number of its source in the manifest
    path: Path | None  # None: it is inside of a file, or no longer there
    forward: int  # number of the forward pass, from 0
    placement: Placement
    caption: str | None  # None: dropped, for the unconditional row
    timestep: int
    weight: float
    loss: float | None  # None: the run kept none of this step
    references: tuple[ShownReference, ...] = ()  # all of the sample's, in order


@dataclass(frozen=True, kw_only=True, slots=True)
class Replayed:
    """A step."""

    epoch: int  # from 0
    prefixes: tuple[str, ...]  # of the names of each source's pictures
    samples: tuple[ShownSample, ...]
    paired: bool  # whether the reference of each is the other picture of its pair
    warnings: tuple[str, ...] = ()


def replay(local: Local, step: int, manifest: Place | None = None, model: str | None = None,
           cache: Place | None = None) -> Replayed:
    """The samples of step `step` of a run, counted from 1 as in its log, with the settings of its last
    start. Raises the first fault that `train check` would report, and `CacheError` if other samples were recorded, with
    what changed since.
    """
    run = read_run(local, manifest=manifest, cache=cache)
    setup = _setup(run, manifest, model)
    if not 1 <= step <= setup.steps:
        raise UsageError(f"--step is {step}, but {run.local} has steps 1 to {setup.steps}")
    config, chances = setup.config, chances_by_bucket(setup.config.timesteps, setup.model.shifts)
    requests = list(draws.training(setup.index, setup.plan, step - 1, step, dropout=setup.dropout,
                                   timesteps=_timesteps(setup.model.path), chances=chances, most=config.micro_batch))
    records = read_losses(run.folder / NAME, last=step)
    drawn = [draw for request in requests for draw in request.draws]
    losses = _losses(records[records["step"] == step], setup.index, drawn)
    if losses is None:
        raise _not_replayed(run, step, setup)
    return Replayed(epoch=(step - 1) // setup.plan.steps_per_epoch, prefixes=setup.manifest.prefixes,
                    samples=tuple(_shown(setup.index, requests, losses)), paired=setup.index.paired,
                    warnings=tuple(_warnings(run, step, setup)))


def _warnings(run: Run, step: int, setup: Setup) -> Iterator[str]:
    """What may differ from what was trained, where samples and timesteps do not: losses do not show other captions.

    With other data than those of the last start, which may be the ones of `step`, only accepted settings are told.
    """
    other = _other_data(run, setup)
    if other:
        yield f"{other}: captions and crops may be others than were trained"
    for after, changes in _accepted_since(run, step):
        visible = [each for each in changes if _is_setting(each) or not other]
        if visible:
            yield (f"step {step} was trained before --adopt accepted, after step {after}: {'; '.join(visible)}; what "
                   "is shown here has this change")


def _not_replayed(run: Run, step: int, setup: Setup) -> CacheError:
    """The error for a step of which other samples or timesteps were recorded: says what changed since, as far as the
    run knows."""
    since, other = list(_accepted_since(run, step)), _other_data(run, setup)
    reasons = [other] if other else []
    reasons += [f"after step {after}, --adopt accepted: {'; '.join(changes)}" for after, changes in since]
    last = max((after for after, changes in since if any(map(_is_setting, changes))), default=None)
    seen = (f"step {step} of {run.local} was trained on other samples or timesteps than its data and settings "
            "give now")
    return CacheError("; ".join([seen, *reasons]),
                      hint="name the manifest that it was trained with: --manifest" if last is None else
                      f"steps that were trained with other settings cannot be replayed; those after step {last} can")


def _accepted_since(run: Run, step: int) -> Iterator[tuple[int, Sequence[str]]]:
    """The resumes after `step` that accepted changes: after which step, and which."""
    return ((each["step"], each["changes"]) for each in run.adopted if each["step"] >= step)


def _is_setting(change: str) -> bool:
    """Whether an accepted change is that of a setting, as `train.runs.resume` tells it."""
    return change.partition(" is ")[0] in SETTINGS


def _other_data(run: Run, setup: Setup) -> str:
    """That the data are not those of the run's last start, or nothing."""
    if run.data in ("", setup.identity.digest):
        return ""
    return f"the data of {setup.request.manifest} are not those of the run's last start"


def _setup(run: Run, manifest: Place | None, model: str | None) -> Setup:
    """The setup of the run's last start; its steps were planned with the micro-batch in its checkpoints."""
    planned: int | None = None
    with suppress(PathError):  # without a checkpoint, the micro-batch is that of the settings
        planned = find_start(run.local, complete=False).state.micro_batch
    own = open_run(run, manifest).manifest
    report = check(replace(run.request, model=model_of(run, model)), on_trained(run.config), planned=planned,
                   manifest=own)
    if report.setup is None:
        raise report.faults[0]
    return report.setup


def _timesteps(model: Model) -> int:
    """How many timesteps the model's noise schedule has."""
    config = scheduler_config(model)
    betas = config.get("trained_betas")
    return len(betas) if betas else int(config.get("num_train_timesteps", 1000))


def _losses(records: Records, index: Index, draws: Sequence[Draw]) -> list[float | None] | None:
    """The losses that were recorded for `draws`; `None` if they were recorded for others."""
    if not len(records):
        return [None] * len(draws)
    ids = ids_of(index)
    drawn = [(int(ids[draw.sample]), draw.timestep) for draw in draws]
    recorded: dict[tuple[int, int], list[float]] = {}  # in any order: several processes may have trained the step
    for sample, timestep, loss in zip(*(records[name].tolist() for name in ("id", "timestep", "loss")), strict=True):
        recorded.setdefault((sample, timestep), []).append(loss)
    if Counter(drawn) != {key: len(losses) for key, losses in recorded.items()}:
        return None
    return [recorded[key].pop(0) for key in drawn]


def _shown(index: Index, requests: Sequence[BatchRequest], losses: Sequence[float | None]) -> Iterator[ShownSample]:
    samples, remaining = index.samples, iter(losses)
    for number, request in enumerate(requests):
        for draw in request.draws:
            first = int(samples.text_offsets[draw.sample])
            yield ShownSample(
                name=samples.name(draw.sample), source=int(samples.source[draw.sample]),
                path=path_of(index, draw.sample), forward=number,
                placement=samples.placement(draw.view, index.manifest.buckets[request.bucket]),
                timestep=draw.timestep, weight=draw.weight, loss=next(remaining),
                references=tuple(_references(index, request.bucket, draw)),
                caption=None if draw.text == NO_TEXT else samples.captions(draw.sample)[draw.text - first])


def _references(index: Index, bucket: int, draw: Draw) -> Iterator[ShownReference]:
    samples, sizes = index.samples, index.manifest.shapes[bucket][1]
    for place, number in enumerate(samples.references_of(draw.sample, draw.view)):
        yield ShownReference(name=samples.reference_name(draw.sample, number),
                             path=path_of(index, draw.sample, number), shown=place in draw.kept,
                             placement=samples.reference_placement(number, sizes[place]))
