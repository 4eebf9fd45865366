"""`train worst`: the samples that a run learned least, by the losses that it kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prep.errors import CacheError
from prep.fs.place import Local, Place
from prep.loader.index import Index
from prep.runs.losses import NAME, Hardness, hardness, read_losses
from train.runs.directory import open_run, read_run
from train.runs.pictures import path_of


@dataclass(frozen=True, kw_only=True, slots=True)
class Hard:
    """A sample, and how hard it was."""

    sample: int  # number in the manifest's table
    name: str
    source: int  # number of its source in the manifest
    path: Path | None  # None: it is inside of a file, or no longer there
    ratio: float  # mean of its losses, each divided by the mean loss at about that timestep; 1: as most
    loss: float  # mean
    showings: int
    references: tuple[tuple[str, Path | None], ...] = ()  # their names, and files as in `path`


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The hardest samples first, and what they were chosen from."""

    showings: int
    known: int  # samples that were shown
    prefixes: tuple[str, ...]  # of the names of each source's pictures
    samples: tuple[Hard, ...]


def find_worst(local: Local, count: int, manifest: Place | None = None, cache: Place | None = None) -> Worst:
    """The `count` samples of a run with the highest losses, for their timesteps. Raises `Problem`."""
    run = read_run(local, manifest=manifest, cache=cache)
    index = open_run(run, manifest)
    records = read_losses(run.folder / NAME)
    hard = hardness(records, index.samples.ids)
    if not hard.showings:
        raise CacheError(f"{run.local} has no losses of samples in {index.manifest.path}",
                         hint="run train run to train it; earlier versions kept none")
    return Worst(showings=hard.showings, known=int((hard.shown > 0).sum()), prefixes=index.manifest.prefixes,
                 samples=tuple(_hard(index, hard, count)))


def _hard(index: Index, hard: Hardness, count: int) -> Iterator[Hard]:
    """The hardest `count`; in a tie, in the order of the manifest."""
    samples = index.samples
    order = np.argsort(-hard.ratio, kind="stable")  # NaN comes last
    for sample in order[: min(count, int((hard.shown > 0).sum()))].tolist():
        references = samples.references_of(sample, int(samples.view_offsets[sample]))
        yield Hard(sample=sample, name=samples.name(sample), source=int(samples.source[sample]),
                   path=path_of(index, sample), ratio=float(hard.ratio[sample]), loss=float(hard.loss[sample]),
                   showings=int(hard.shown[sample]), references=tuple(
                       (samples.reference_name(sample, each), path_of(index, sample, each)) for each in references))
