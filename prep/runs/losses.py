"""Reads RUN/losses.bin, the loss of each sample at each showing (train/runs/losses.py writes it), and compares samples.

A record has the step, the timestep, the loss before any weight of sample or noise level, and the first 8 bytes of the
sample's id.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from prep.parse import Unparsed
from prep.runs.documents import open_plain, refused

NAME = "losses.bin"
HEAD = b"latentry/losses 1\0\0\n"
RECORD = np.dtype([("step", "<u4"), ("timestep", "<u4"), ("loss", "<f4"), ("id", "<u8")])
PART = RECORD.itemsize << 15  # bytes that are read at a time
RELATIVE = "Loss relative to the average at similar timesteps; 1 is typical."  # of `adjusted`, for pages
BINS = 20  # of timesteps, with as many showings each
LEAST = 50  # showings in a bin
Records = np.ndarray[Any, Any]  # of RECORD


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardness:
    """How hard each of N samples was; NaN for those that were not shown."""

    ratio: np.ndarray[Any, Any]  # mean of a sample's losses, each divided by the mean loss at about that timestep
    loss: np.ndarray[Any, Any]  # mean
    shown: np.ndarray[Any, Any]  # showings

    @property
    def showings(self) -> int:
        """Of all samples."""
        return int(self.shown.sum())


def read_losses(path: Path, last: int | None = None) -> Records:
    """The whole records up to step `last`; none if there is no file. Raises `CacheError` for another kind of file.

    A crash may leave a part of a record, or anything else, after the records of the last checkpoint: that is left out.
    """
    try:
        with open_plain(path) as file:
            if file.read(len(HEAD)) != HEAD:
                raise Unparsed("it is not a file of losses")
            return np.frombuffer(_whole(file, last), RECORD)
    except FileNotFoundError:
        return np.zeros(0, RECORD)
    except (OSError, Unparsed) as error:
        raise refused(path, error, "remove it; only the losses of the samples so far are lost") from None


def _whole(file: BinaryIO, last: int | None) -> bytearray:
    """The bytes of the whole records up to step `last`. Reads no further than the first that is none: a file of no
    contents can be longer than memory."""
    records, before, most = bytearray(), 1, np.iinfo(np.int64).max if last is None else last
    while data := file.read(PART):
        part: Records = np.frombuffer(data, RECORD, count=len(data) // RECORD.itemsize)
        steps = part["step"].astype(np.int64)
        wrong = (np.diff(steps, prepend=before) < 0) | (steps > most)
        end = int(np.argmax(wrong)) if wrong.any() else len(part)
        records += data[: end * RECORD.itemsize]
        if end < PART // RECORD.itemsize:
            break
        before = int(steps[-1])
    return records


def short_ids(ids: np.ndarray[Any, Any]) -> Records:
    """The first 8 bytes of ids, uint8 [N, 32], as the records have them."""
    return np.ascontiguousarray(ids[:, :8]).view("<u8").reshape(-1)


def hardness(records: Records, ids: np.ndarray[Any, Any]) -> Hardness:
    """How hard the samples with these ids (uint8 [N, 32]) were, by the records of them."""
    short, count = short_ids(ids), len(ids)
    order = np.argsort(short, kind="stable")
    place = np.minimum(np.searchsorted(short[order], records["id"]), max(count - 1, 0))
    known = short[order][place] == records["id"] if count else np.zeros(len(records), bool)
    samples = order[place[known]] if count else np.zeros(0, np.int64)
    shown = np.bincount(samples, minlength=count)
    some = np.where(shown > 0, shown, np.nan)
    return Hardness(ratio=np.bincount(samples, adjusted(records)[known], count) / some,
                    loss=np.bincount(samples, records["loss"][known], count) / some, shown=shown)


def adjusted(records: Records) -> np.ndarray[Any, Any]:
    """Each loss divided by the mean of those at about the same timestep, since noise decides the most of it.

    Timesteps are in up to 20 bins with as many records each; a bin of losses that are all 0 gives 1.
    """
    bins = max(1, min(BINS, len(records) // LEAST))
    edges = np.quantile(records["timestep"], np.arange(1, bins) / bins)
    place = np.searchsorted(np.unique(edges), records["timestep"], side="right")
    losses = records["loss"].astype(np.float64)
    means = (np.bincount(place, losses) / np.maximum(np.bincount(place), 1))[place]
    return np.divide(losses, means, out=np.ones_like(losses), where=means > 0)
