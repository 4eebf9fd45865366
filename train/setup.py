"""Records of a run before it starts: the request, the setup, and the report of the checks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prep.batching.plan import StepPlan
from prep.errors import Problem
from prep.fs.place import Local, Place
from prep.loader.draws import Dropout
from prep.loader.identity import DataIdentity, identify
from prep.loader.index import Index
from prep.loader.shards import Looks
from prep.manifest.document import Manifest
from prep.models.family import Family
from prep.models.files import Model
from prep.models.vision.model import VisionModel
from prep.training.interval import Interval, interval_of
from prep.training.schema import Config, Dtype
from train.models.adapters.frozen import FrozenAdapter
from train.models.naming import Naming


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRequest:
    """What the command line requests, besides the settings."""

    manifest: Place
    model: str | Path | None = None  # a Path is never a Hub id; None: the manifest's
    download: bool = False
    other_encoders: bool = False  # train a model whose VAE or text encoder did not make the cache
    init: Local | None = None  # weights to begin with; None: a fresh LoRA, or the model's
    cache: Place | None = None  # where the manifest's cache is now, if it has moved


@dataclass(frozen=True, kw_only=True, slots=True)
class Initial:
    """Weights that a new run begins with."""

    name: str  # of the file or directory that was named
    files: tuple[Path, ...]
    digests: tuple[str, ...]  # SHA-256 of each
    digest: str  # of all
    notes: tuple[str, ...]  # what is worth knowing about them
    metadata: Mapping[str, str]  # of the first file: whatever its program wrote there


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckedModel:
    """The model that is trained, before it is loaded: what its files say, and what the settings make of it."""

    path: Model
    base: Mapping[str, str]  # fingerprints of denoiser and scheduler, and of the training adapter
    others: Mapping[str, str]  # encoders that did not make the cache: name → fingerprint
    numbers: int  # how many numbers are trained
    saved: int  # how many numbers a file of weights has: frozen ones, too
    state_bytes: int  # what the optimizer keeps for the trained ones
    initial: Initial | None  # None: also for a resumed run
    adapter: FrozenAdapter | None  # a training adapter
    shifts: tuple[float, ...]  # of timesteps by bucket, besides timesteps.shift
    naming: Naming  # of the tensors in LoRA files
    ambiguous: bool  # whether the name of a layer that gets an adapter ends the name of one that gets none
    strengths: tuple[float, ...]  # alpha / rank of the adapters, each once, the smallest first
    fits_kohya: bool  # whether kohya's names can hold them
    large: bool  # this and the next two as in `train.config.unused.Facts`
    convolves: bool
    rescaled: bool
    dtype: Dtype  # of the base's files
    drawing: Model  # whose denoiser draws sample pictures: that of `path`, unless sample.model names another


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a run writes down once, at its beginning, so that a resumed run's result is the same."""

    started: str = ""  # UTC, like 2026-11-22T19:30:00Z; "": unknown, as in runs of earlier versions
    recipe: str = ""  # SHA-256 of the recipe's file; "": there is none


def dropout_of(config: Config) -> Dropout:
    """The probabilities with which a showing lacks some of its conditions, by the settings."""
    return Dropout(caption=config.caption_dropout, references=config.reference_dropout,
                   each_reference=config.each_reference_dropout)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """A run that passed all checks and may start."""

    request: RunRequest
    config: Config
    manifest: Manifest
    index: Index
    plan: StepPlan  # uses the micro-batch of the run's first start; config.micro_batch may split it further
    steps: int  # in total
    masked: bool  # whether the loss uses masks
    model: CheckedModel
    prediction: str
    family: Family  # of the manifest
    shards: Looks  # what their files looked like when they were checked
    init: Mapping[str, str] = field(default_factory=dict)  # {"name", "sha256"} of what step 0 began with, if anything
    origin: Origin = field(default_factory=Origin)
    adopted: tuple[Mapping[str, Any], ...] = ()  # changes accepted when it was resumed: {"step", "changes"}
    vision: VisionModel | None = None  # that evaluates checkpoints; None: none is evaluated

    @property
    def identity(self) -> DataIdentity:
        """The part of the data that decides the steps. Raises `CacheError`."""
        return identify(self.index, masked=self.masked, prediction=self.prediction)

    @property
    def reads_masks(self) -> bool:
        """Whether steps read masks: for the loss, or for a model that is told by them what to paint."""
        return self.masked or self.index.inpaints

    @property
    def dropout(self) -> Dropout:
        """The probabilities with which a showing lacks some of its conditions."""
        return dropout_of(self.config)

    def interval(self, every: int | str) -> Interval:
        """The interval that a setting like checkpoint.every means in this run."""
        return interval_of(every, self.plan.steps_per_epoch)

    def evaluates(self, step: int) -> bool:
        """Whether the checkpoint of step `step`, from 1, is evaluated: each `evaluate.every`-th, and the last."""
        every, interval = self.config.evaluate.every, self.interval(self.config.checkpoint.every)
        return bool(every) and (step == self.steps or (interval.is_due(step) and interval.count(step) % every == 0))


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckReport:
    """The result of all checks; has a setup if there are no faults."""

    faults: tuple[Problem, ...]
    setup: Setup | None
    plan: StepPlan | None
    left_out: tuple[str, ...]  # names of samples that the first epoch does not show
    repeated: tuple[str, ...]  # names of samples that it repeats to fill micro-batches
    notes: tuple[str, ...] = ()  # worth knowing, but no fault
