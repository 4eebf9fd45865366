"""Reads what a run's pages show from its files: its history, its sampled pictures, and how hard each sample was.

Files are read again once they have changed, so that the pages of a run that is trained are as it is now.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from threading import Lock
from typing import Generic, TypeVar

import numpy as np

from prep.images.thumbnail import small_jpeg
from prep.manifest.samples import SampleColumns
from prep.runs import events, losses
from prep.runs.grids import cut_grid
from prep.runs.history import Grid, History, read_history
from prep.runs.losses import Hardness, Records, hardness, read_losses, short_ids
from prep.runs.sheets import read_sheet
from prep.runs.state import RunState, state_of
from prep.view.memory import Memory

SIDE = 640  # pixels of the longer side of a sampled picture
REST = 20.0  # times as long as reading a file took, until it is read again
T = TypeVar("T")


class RunFiles:
    """The files of the run in `folder`. Threads may share it."""

    def __init__(self, folder: Path, samples: SampleColumns, memory: Memory) -> None:
        self.folder = folder
        self._memory, self._ids = memory, samples.ids
        log, losses_file = folder / events.NAME, folder / losses.NAME
        self._history = Fresh(log, lambda: read_history(events.read_events(log)))
        self._losses = Fresh(losses_file, lambda: self._compared(read_losses(losses_file)))

    @property
    def history(self) -> History:
        """The history that the log has now. Raises `CacheError`."""
        return self._history.value()

    @property
    def state(self) -> RunState:
        """The state of the run now. Raises `CacheError`."""
        return state_of(self.folder, self.history)

    @property
    def stamps(self) -> list[str]:
        """Names of the files as they are read now. Raises `CacheError`."""
        _ = self.history, self.hardness
        return [self._history.stamp, self._losses.stamp]

    @property
    def hardness(self) -> Hardness:
        """The hardness of each sample until now; the same object until the file has changed. Raises `CacheError`."""
        return self._losses.value()[0]

    def losses_of(self, sample: int) -> list[tuple[int, float]]:
        """Step and loss of each showing of a sample, up to the same time as `hardness`. Raises `CacheError`."""
        records = self._losses.value()[1]
        own = records[records["id"] == short_ids(self._ids[sample:sample + 1])[0]]
        return list(zip(own["step"].tolist(), own["loss"].astype(float).tolist(), strict=True))

    def _compared(self, records: Records) -> tuple[Hardness, Records]:
        return hardness(records, self._ids), records

    def cell(self, grid: Grid, cell: int) -> bytes | None:
        """A picture of a grid as a JPEG, -1 for the whole; `None` if it cannot be read or is not what the log says."""
        return self._memory.get(("cell", grid, cell), lambda: self._cut(grid, cell))

    def _cut(self, grid: Grid, cell: int) -> bytes | None:
        sheet = read_sheet(self.folder, grid)
        if sheet is None:
            return None
        if cell < 0:
            return small_jpeg(sheet, 2 * SIDE)
        cut = [small_jpeg(np.ascontiguousarray(pixels), SIDE) for pixels in cut_grid(sheet, grid.sizes)]
        for number, data in enumerate(cut):
            self._memory.put(("cell", grid, number), data)
        return cut[cell] if cell < len(cut) else None


class Fresh(Generic[T]):
    """A value read from a file, and read again when the file has changed, but at most about a twentieth of the time."""

    def __init__(self, path: Path, read: Callable[[], T]) -> None:
        self._path, self._read = path, read
        self._lock = Lock()
        self._known: tuple[T, object, float] | None = None  # value, stamp, when it may be read again

    def value(self) -> T:
        """The newest value. What `read` raises is raised."""
        with self._lock:
            stamp, now = self._stamp(), time.monotonic()
            if self._known is None or (stamp != self._known[1] and now >= self._known[2]):
                value = self._read()
                after = time.monotonic()
                self._known = value, stamp, after + REST * (after - now)
            return self._known[0]

    @property
    def stamp(self) -> str:
        """A name of the file as it was read last."""
        return "" if self._known is None else repr(self._known[1])

    def _stamp(self) -> object:
        try:
            stat = self._path.stat()
        except OSError:
            return None
        return stat.st_size, stat.st_mtime_ns, stat.st_ino
