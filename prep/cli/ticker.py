"""Shows progress on stderr: a bar on a terminal; elsewhere a line after ten seconds, and one per minute.

The file that LATENTRY_PROGRESS names gets a JSON line every two seconds, of the innermost stage: that is how jobs tell.
A bar appears after one second of work. A phase (a title without a unit) counts nothing: a terminal shows it with a
spinner, and a pipe gets one line if it lasts longer than a few seconds. Only the innermost of nested stages is shown.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from prep.cli.console import color_allowed, say
from prep.formatting import clock, counted, format_bytes, grouped
from prep.fs.untrusted import append_regular
from prep.progress import FILE, Progress, Total

SLOW = 1.0  # seconds of work after which a bar is shown
PHASE = 5.0  # seconds after which a phase is named without a terminal
FIRST = 10.0  # seconds after which a stage with a unit is named without a terminal
PACE = 60.0  # seconds between lines without a terminal
NOTED = 2.0  # seconds between lines of the file
_open: list[Ticker] = []  # the innermost last


class Ticker:
    """Progress of one stage: `tick(n)` per finished unit. With the unit "bytes", counts and rates are sizes."""

    def __init__(self, title: str, total: Total, *, unit: str = "", shown: bool = True) -> None:
        self.title, self.unit = title, unit
        self._total = total
        self._terminal = shown and sys.stderr.isatty()
        self._begun = self._marked = time.monotonic()
        self._done = self._done_then = 0  # now, and at the last line
        self._bar: Any = None
        self._task: Any = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        if shown:
            threading.Thread(target=self._watch, name="progress", daemon=True).start()
        if path := os.environ.get(FILE):
            threading.Thread(target=self._note, args=(path,), name="progress file", daemon=True).start()

    def __call__(self, count: int = 1) -> None:
        """Counts `count` more units as done."""
        self._done += count
        if self._terminal and (self._bar is not None or time.monotonic() - self._begun >= SLOW):
            self._draw()

    @property
    def total(self) -> int | None:
        """The total number of units, if it is known by now."""
        return self._total() if callable(self._total) else self._total

    def line(self) -> str:
        """Progress as a line: done, total, the rate since the last line, the time left at that rate."""
        if not self.unit:
            return self.title
        now, total, done = time.monotonic(), self.total, self._done
        rate = (done - self._done_then) / max(now - self._marked, 1e-9)
        self._marked, self._done_then = now, done
        if total is None:
            return f"{self.title}: {self._amount(done)}, {self._rate(rate)}"
        share = f" ({100 * done // total} %)" if total else ""
        remaining = f", {clock((total - done) / rate)} left" if rate > 0 and total >= done else ""
        first = format_bytes(done) if self.unit == "bytes" else grouped(done)
        return f"{self.title}: {first} of {self._amount(total)}{share}, {self._rate(rate)}{remaining}"

    def hide(self) -> None:
        """Removes the bar; the next tick shows it again."""
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def close(self) -> None:
        """Removes the bar for good."""
        self._closed.set()
        self.hide()

    def _watch(self) -> None:
        """Shows progress without waiting for a tick: a bar after a second, or lines."""
        if self._terminal:
            if not self._closed.wait(SLOW):
                self._draw()
            return
        wait = FIRST if self.unit else PHASE
        while not self._closed.wait(wait):
            say(self.line())
            if not self.unit:
                return
            wait = PACE

    def _note(self, path: str) -> None:
        """Adds lines to the file, as long as this stage is the innermost."""
        while not self._closed.wait(NOTED):
            if _open[-1:] == [self]:
                line = {"time": time.time(), "title": self.title, "unit": self.unit, "done": self._done,
                        "total": self.total}
                with suppress(OSError), append_regular(path) as handle:
                    handle.write(json.dumps(line).encode() + b"\n")

    def _amount(self, count: int) -> str:
        return format_bytes(count) if self.unit == "bytes" else counted(count, self.unit.removesuffix("s"), self.unit)

    def _rate(self, rate: float) -> str:
        return f"{format_bytes(int(rate))}/s" if self.unit == "bytes" else f"{rate:.1f} {self.unit}/s"

    def _draw(self) -> None:
        with self._lock:
            if self._closed.is_set() or (_open and _open[-1] is not self):
                return
            if self._bar is None:
                self._start()
            rate = self._rate(self._done / max(time.monotonic() - self._begun, 1e-9)) if self.unit else ""
            self._bar.update(self._task, completed=self._done, total=self.total, rate=rate)

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            MofNCompleteColumn,
            Progress,
            SpinnerColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        title, elapsed = TextColumn("{task.description}"), TimeElapsedColumn()
        of = DownloadColumn(binary_units=True) if self.unit == "bytes" else MofNCompleteColumn()
        columns = (title, BarColumn(), of, TextColumn("{task.fields[rate]}"), elapsed, TimeRemainingColumn())
        self._bar = Progress(*(columns if self.unit else (SpinnerColumn(), title, elapsed)), transient=True,
                             console=Console(stderr=True, no_color=not color_allowed()))
        self._task = self._bar.add_task(self.title, total=self.total, rate="")
        self._bar.start()


@contextmanager
def progress(title: str, total: Total, *, unit: str = "", shown: bool = True) -> Iterator[Ticker]:
    """A `Ticker` that is closed at the end, also after an exception."""
    ticker = Ticker(title, total, unit=unit, shown=shown)
    if _open:
        _open[-1].hide()
    _open.append(ticker)
    try:
        yield ticker
    finally:
        _open.remove(ticker)
        ticker.close()


def progress_unless(quiet: bool) -> Progress:
    """What commands hand to the work: `progress`, shown unless `quiet`."""
    return lambda title, total, unit: progress(title, total, unit=unit, shown=not quiet)
