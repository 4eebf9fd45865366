"""Shows a run on stderr: a live table on a terminal, lines elsewhere, only warnings with --quiet."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from prep.cli.console import color_allowed, say
from prep.cli.ticker import progress
from prep.formatting import clock, format_bytes, printable
from prep.progress import Tick, Total, silent
from prep.runs.events import Event
from prep.runs.lines import line

PACE = 10.0  # seconds between lines without a terminal, in the first minute
LATER = 60.0  # and later
_SMOOTH = 0.9  # for the displayed loss: a moving average over about ten steps


class RunDisplay:
    """The displayed numbers, computed from the events so far."""

    def __init__(self) -> None:
        self.steps = self.step = self.begun = 0
        self.loss: float | None = None  # of the newest step
        self.smoothed: float | None = None
        self.validation: float | None = None
        self.lr: float | None = None
        self.norm: float | None = None  # of the gradients
        self.memory: int | None = None  # most bytes so far, on a GPU
        self.skipped: int | None = None  # steps whose gradients overflowed, with float16
        self.rate = self.wait = 0.0  # samples per second; share of the time spent waiting for data
        self._first: tuple[float, int] | None = None

    def take(self, event: Event) -> None:
        """Updates the numbers with an event."""
        if event["event"] == "start":
            self.steps, self.step = event["steps"], event["step"]
            self.begun = self.step
        elif event["event"] == "validation":
            self.validation = event["loss"]
        elif event["event"] == "step":
            self.step, self.rate = event["step"], event["samples_per_second"] or 0.0
            self._first = self._first or (time.monotonic(), self.step)
            self.wait = (event["wait"] or 0.0) / max(event["seconds"] or 0.0, 1e-9)
            self.lr, self.norm, self.memory = event.get("lr"), event.get("grad_norm"), event.get("memory")
            if "skipped" in event:
                self.skipped = (self.skipped or 0) + bool(event["skipped"])
            if (loss := event["loss"]) is not None:
                self.loss = loss
                self.smoothed = loss if self.smoothed is None else _SMOOTH * self.smoothed + (1 - _SMOOTH) * loss

    def _speed(self) -> dict[str, str]:
        """Samples per second; if that is below 1, seconds per sample."""
        return {"samples/s": f"{self.rate:.1f}"} if self.rate >= 1 else {
            "s per sample": f"{1 / self.rate:.3g}" if self.rate > 1e-9 else "-"}

    def line(self, event: Event) -> str | None:
        """As `line`; of a run that had no step left it says that it was finished before."""
        if event["event"] == "end" and 0 < self.steps <= self.begun:
            return printable(f"already finished: {self.step:,} of {self.steps:,} steps; {event['result']}")
        return line(event)

    def remaining(self) -> str:
        """Remaining time, as 1:02:03, at the pace after the first step, which is slower than the others."""
        if 0 < self.steps <= self.step:
            return clock(0)
        if self._first is None or self.step <= self._first[1]:
            return "?"
        pace = (time.monotonic() - self._first[0]) / (self.step - self._first[1])
        return clock(pace * (self.steps - self.step))

    def cells(self) -> dict[str, str]:
        """The displayed values by title."""
        memory = {} if self.memory is None else {"memory": format_bytes(self.memory)}
        skipped = {} if self.skipped is None else {"skipped": str(self.skipped)}
        return {"step": f"{self.step}/{self.steps}", "loss": _number(self.loss), "smoothed": _number(self.smoothed),
                "validation": _number(self.validation), "rate": _short(self.lr), "gradient": _short(self.norm),
                **self._speed(), "waiting for data": f"{self.wait:.0%}", **memory, **skipped,
                "left": self.remaining()}


class Watcher(Protocol):
    """Shows a run: call it with each event; `progress` shows phases."""

    def __call__(self, event: Event) -> None: ...

    def progress(self, title: str, total: Total, unit: str, /) -> AbstractContextManager[Tick]: ...


@contextmanager
def watching(quiet: bool) -> Iterator[Watcher]:
    """Yields the watcher for this stderr: warnings only if `quiet`, a live table on a terminal, lines elsewhere."""
    console = Console(stderr=True, highlight=False, no_color=not color_allowed())
    if quiet:
        yield _Warnings()
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield _Table(live)
    else:
        yield _Lines()


class _Warnings:
    """Prints warnings only."""

    def __call__(self, event: Event) -> None:
        if event["event"] == "warning":
            say(printable(f"warning: {event['text']}"))

    @staticmethod
    def progress(title: str, total: Total, unit: str) -> AbstractContextManager[Tick]:
        """Shows nothing."""
        return silent(title, total, unit)


class _Lines:
    """Lines for a file or a pipe: events at once, steps every ten seconds in the first minute, then every minute; also
    steps that take as long, and the last one."""

    def __init__(self) -> None:
        self._display, self._said, self._begun = RunDisplay(), 0.0, time.monotonic()

    def __call__(self, event: Event) -> None:
        self._display.take(event)
        if event["event"] == "stopped":  # the command says so at its end
            return
        text, now = self._display.line(event), time.monotonic()
        if text is None and (now - self._said >= (PACE if now - self._begun < LATER else LATER) or event["step"] ==
                             self._display.steps or (event.get("seconds") or 0.0) >= PACE):
            self._said = now
            text = "  ".join(f"{title} {value}" for title, value in self._display.cells().items())
        if text is not None:
            say(text)

    @staticmethod
    def progress(title: str, total: Total, unit: str) -> AbstractContextManager[Tick]:
        """Prints a line if the phase takes long."""
        return progress(title, total, unit=unit)


class _Table:
    """A live table on a terminal below the lines of events; the current phase is its caption."""

    def __init__(self, live: Live) -> None:
        self._live, self._display, self._phase = live, RunDisplay(), ""

    def __call__(self, event: Event) -> None:
        self._display.take(event)
        text = self._display.line(event)
        if text is not None and event["event"] != "stopped":  # the command says so at its end
            self._live.console.print(Text(text, style="yellow" if event["event"] == "warning" else ""), soft_wrap=True)
        self._show()

    @contextmanager
    def progress(self, title: str, total: Total, _unit: str) -> Iterator[Tick]:
        """Shows a phase below the table, and how much of it is done if there is a total."""
        before, self._phase = self._phase, title
        done, whole = 0, total() if callable(total) else total
        self._show()

        def tick(count: int) -> None:
            nonlocal done
            done += count
            if whole:
                self._phase = f"{title}: {100 * done // whole} %"
                self._show()

        try:
            yield tick
        finally:
            self._phase = before
            self._show()

    def _show(self) -> None:
        self._live.update(Cells(self._display.cells(), self._phase))


@dataclass(frozen=True, slots=True)
class Cells:
    """Values below their titles, in as many tables as the terminal's width takes: no number is ever cut."""

    cells: Mapping[str, str]
    caption: str

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        widths = {title: max(len(title), len(value)) for title, value in self.cells.items()}
        narrow = {title: max(map(len, (*title.split(), value))) for title, value in self.cells.items()}
        if _across(narrow.values()) <= options.max_width < _across(widths.values()):
            widths = narrow  # titles of several words take several lines
        tables = list(_parts(widths, options.max_width))
        for part in tables:
            table = Table(*(Column(title, width=widths[title], overflow="fold") for title in part),
                          caption=Text(self.caption) if part is tables[-1] else None, caption_justify="left")
            table.add_row(*(self.cells[title] for title in part))
            yield table


def _parts(widths: Mapping[str, int], most: int) -> Iterator[list[str]]:
    """The titles of each table, in their order: as many as fit beside each other, at least one."""
    part: list[str] = []
    for title in widths:
        if part and _across(widths[each] for each in (*part, title)) > most:
            yield part
            part = []
        part.append(title)
    yield part


def _across(widths: Iterable[int]) -> int:
    """The width of a table with columns of these: each has a space on both sides, and lines are between them."""
    return 1 + sum(width + 3 for width in widths)


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}"
