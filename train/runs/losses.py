"""Writes RUN/losses.bin: the loss of each sample that a run trained on, in 20 bytes for each showing.

A record has the step, the timestep, the loss before any weight of sample or noise level, and the first 8 bytes of the
sample's id. Records are in the order of steps, so a resumed run cuts the file after the step of its checkpoint.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import numpy as np

from prep.fs import atomic
from prep.fs.atomic import write_atomic
from prep.loader.index import Index
from prep.runs.losses import HEAD, RECORD, Records, read_losses, short_ids

_NUMBERS = struct.Struct("<IIf")  # of a `RECORD`, before the id: eight records take a fifth of the time of NumPy


class Growing:
    """Appends to an open file. What could not be written, as on a full disk, is written before anything else."""

    def __init__(self, path: Path) -> None:
        self._file: BinaryIO = path.open("ab", buffering=0)
        self._left = b""

    def add(self, data: bytes) -> None:
        """Raises `OSError`; the data then wait for the next call, or for `sync`."""
        self._left += data
        end = os.fstat(self._file.fileno()).st_size
        try:
            atomic.write(self._file, self._left)
        except OSError:
            with suppress(OSError):
                self._left = self._left[os.fstat(self._file.fileno()).st_size - end :]  # a part is there
            raise
        self._left = b""

    def sync(self) -> None:
        """Syncs the file to disk, with all that was added. Raises `OSError`."""
        if self._left:
            self.add(b"")
        atomic.sync(self._file)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class Losses:
    """Appends records to the file. `rewind` opens it."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: Growing | None = None

    def rewind(self, step: int) -> None:
        """Removes the records after step `step` (0: all). Raises `CacheError` if the file is not one of losses."""
        self.close()
        records = read_losses(self._path, last=step) if step else np.zeros(0, RECORD)
        write_atomic(self._path, HEAD + records.tobytes())
        self._file = Growing(self._path)

    def add(self, step: int, index: Index, showings: Sequence[tuple[int, int, float]]) -> None:
        """Appends the records of one step: sample, timestep and loss of each showing."""
        assert self._file is not None, "rewind comes first"
        ids = index.samples.ids
        self._file.add(b"".join(_NUMBERS.pack(step, timestep, loss) + ids[sample, :8].tobytes()
                                for sample, timestep, loss in showings))

    def sync(self) -> None:
        """Syncs the file to disk."""
        assert self._file is not None
        self._file.sync()

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


class NoLosses(Losses):
    """Keeps nothing."""

    def add(self, step: int, index: Index, showings: Sequence[tuple[int, int, float]]) -> None:
        """Does nothing."""


def ids_of(index: Index, samples: Sequence[int] | slice = slice(None)) -> Records:
    """The first 8 bytes of the id of each of `samples`, as the records have them."""
    return short_ids(index.samples.ids[samples])
