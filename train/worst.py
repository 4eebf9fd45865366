"""`train worst`: the samples that a run learned least, by the losses that it kept."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prep.errors import CacheError
from prep.loader.index import Index, open_index
from prep.manifest.document import read_manifest
from train.runs.directory import read_run, require_manifest
from train.runs.losses import NAME, Records, ids_of, read_losses
from train.runs.pictures import path_of

BINS = 20  # of timesteps, with as many showings each
LEAST = 50  # showings in a bin


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Worst:
    """The hardest samples first, and what they were chosen from."""

    showings: int
    known: int  # samples that were shown
    sources: int  # of the manifest
    samples: tuple[Hard, ...]


def find_worst(folder: Path, count: int, manifest: Path | None = None) -> Worst:
    """The `count` samples of the run in `folder` with the highest losses, for their timesteps. Raises `Problem`."""
    run = read_run(folder)
    if manifest is None:
        require_manifest(run)
    index = open_index(read_manifest(manifest or run.asked.manifest))
    records = read_losses(folder / NAME)
    ids = ids_of(index)
    order = np.argsort(ids, kind="stable")
    place = np.minimum(np.searchsorted(ids[order], records["id"]), len(ids) - 1)
    known = ids[order][place] == records["id"]
    if not known.any():
        raise CacheError(f"{folder} has no losses of samples in {index.manifest.path}",
                         hint="run train run to train it; earlier versions kept none")
    samples, ratios = order[place[known]], adjusted(records)[known]
    hard = tuple(_hard(index, samples, ratios, records["loss"][known], count))
    return Worst(showings=len(samples), known=len(np.unique(samples)),
                 sources=len(index.manifest.sources), samples=hard)


def adjusted(records: Records) -> np.ndarray:
    """Each loss divided by the mean of those at about the same timestep, since noise decides the most of it.

    Timesteps are in up to 20 bins with as many records each; a bin of losses that are all 0 gives 1.
    """
    bins = max(1, min(BINS, len(records) // LEAST))
    edges = np.quantile(records["timestep"], np.arange(1, bins) / bins)
    place = np.searchsorted(np.unique(edges), records["timestep"], side="right")
    losses = records["loss"].astype(np.float64)
    means = (np.bincount(place, losses) / np.maximum(np.bincount(place), 1))[place]
    return np.divide(losses, means, out=np.ones_like(losses), where=means > 0)


def _hard(index: Index, samples: np.ndarray, ratios: np.ndarray, losses: np.ndarray, count: int) -> Iterator[Hard]:
    """The hardest `count`; in a tie, in the order of the manifest."""
    shown = np.bincount(samples, minlength=len(index.samples))
    some = np.maximum(shown, 1)
    ratio = np.bincount(samples, ratios, len(shown)) / some
    loss = np.bincount(samples, losses, len(shown)) / some
    for sample in np.argsort(np.where(shown > 0, -ratio, np.inf), kind="stable")[: min(count, int((shown > 0).sum()))]:
        yield Hard(sample=int(sample), name=index.samples.name(int(sample)), source=int(index.samples.source[sample]),
                   path=path_of(index, int(sample)), ratio=float(ratio[sample]), loss=float(loss[sample]),
                   showings=int(shown[sample]))
