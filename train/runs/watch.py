"""What one sees of a run on stderr: a live table in a terminal, lines elsewhere, warnings alone with --quiet."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from prep.formatting import printable
from train.runs.log import Event, Watch

PACE = 10.0  # seconds between lines where there is no terminal
_SMOOTH = 0.9  # of the loss that is shown: a moving average over about ten steps


class RunDisplay:
    """The numbers that are shown, from the events so far."""

    def __init__(self) -> None:
        self.steps = self.step = 0
        self.loss: float | None = None
        self.validation: float | None = None
        self.rate = self.wait = 0.0  # samples per second; share of the time spent waiting for data
        self._first: tuple[float, int] | None = None

    def take(self, event: Event) -> None:
        """Notes what an event says."""
        if event["event"] == "start":
            self.steps, self.step = event["steps"], event["step"]
        elif event["event"] == "validation":
            self.validation = event["loss"]
        elif event["event"] == "step":
            self.step, self.rate = event["step"], event["samples_per_second"] or 0.0
            self._first = self._first or (time.monotonic(), self.step)
            self.wait = (event["wait"] or 0.0) / max(event["seconds"] or 0.0, 1e-9)
            if event["loss"] is not None:
                self.loss = event["loss"] if self.loss is None else _SMOOTH * self.loss + (1 - _SMOOTH) * event["loss"]

    def left(self) -> str:
        """Time to the end at the pace since the first step, which is slower than others, as 1:02:03."""
        if self._first is None or self.step <= self._first[1]:
            return "?"
        pace = (time.monotonic() - self._first[0]) / (self.step - self._first[1])
        seconds = int(pace * (self.steps - self.step))
        return f"{seconds // 3600}:{seconds // 60 % 60:02d}:{seconds % 60:02d}"

    def cells(self) -> dict[str, str]:
        """What is shown, by title."""
        return {"step": f"{self.step}/{self.steps}", "loss": _number(self.loss), "validation": _number(self.validation),
                "samples/s": f"{self.rate:.1f}", "waiting": f"{self.wait:.0%}", "left": self.left()}


def line(progress: RunDisplay, event: Event) -> str | None:
    """What is said of an event in one line, safe for a terminal; `None` for a step."""
    texts = {"start": "{steps} steps, {steps_per_epoch} an epoch, {parameters} trained parameters on {device}",
             "validation": "step {step}: validation loss {loss}", "sample": "step {step}: {picture}",
             "checkpoint": "step {step}: {folder}", "warning": "warning: {text}", "end": "done: {result}",
             "stopped": "stopped after step {step}; the same command with --resume goes on from there"}
    text = texts.get(event["event"])
    return None if text is None else printable(text.format(**event))


@contextmanager
def watching(quiet: bool) -> Iterator[Watch]:
    """A function to hand events to, which shows them."""
    console = Console(stderr=True, highlight=False)
    progress = RunDisplay()
    if quiet:
        yield lambda event: _show_warning(console, event)
    elif console.is_terminal:
        with Live(console=console, refresh_per_second=4, transient=True) as live:
            yield lambda event: _show_live(live, progress, event)
    else:
        yield _Lines(console, progress)


class _Lines:
    """Lines for a file or a pipe: events at once, steps every ten seconds."""

    def __init__(self, console: Console, progress: RunDisplay) -> None:
        self._console, self._progress, self._said = console, progress, 0.0

    def __call__(self, event: Event) -> None:
        self._progress.take(event)
        text = line(self._progress, event)
        if text is None and time.monotonic() - self._said >= PACE:
            self._said = time.monotonic()
            text = "  ".join(f"{title} {value}" for title, value in self._progress.cells().items())
        if text is not None:
            self._console.print(Text(text), soft_wrap=True)


def _show_warning(console: Console, event: Event) -> None:
    if event["event"] == "warning":
        console.print(Text(printable(f"warning: {event['text']}")), soft_wrap=True)


def _show_live(live: Live, progress: RunDisplay, event: Event) -> None:
    progress.take(event)
    text = line(progress, event)
    if text is not None:
        live.console.print(Text(text), soft_wrap=True)
    table = Table(*progress.cells())
    table.add_row(*progress.cells().values())
    live.update(table)


def _number(value: Any) -> str:
    return "-" if value is None else f"{value:.4f}"
