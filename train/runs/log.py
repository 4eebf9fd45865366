"""The events of a run: one JSON object per line in RUN/log.jsonl, and to a watcher that shows them.

Events: `start` (with the dtype of forward passes, and the number of blocks in host memory if any), `step` (loss, lr,
grad_norm, samples, samples_per_second, wait, seconds; on a GPU memory, the most bytes so far; with float16 loss_scale,
and skipped: whether the gradients overflowed), `validation` (loss, spread, samples, timesteps, losses, sources),
`sample` (picture; prompts, the first 500, and of each 200 characters; sizes of all), `evaluation` (held_out, training,
nearest, drift, copies, pictures), `checkpoint` (folder), `warning` (text), `stopped`, `end` (result; proposal if
checkpoints were evaluated). Each has the number of steps done before it. A checkpoint's line is where its saving
began, however long that takes: so a resumed run has the log of an undisturbed one. The watcher is shown it when it is
whole on disk.
The loss of each sample is beside them, in RUN/losses.bin.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from prep.fs.atomic import write_atomic
from prep.progress import Progress, phase, silent
from prep.runs.documents import refused
from prep.runs.events import Event, event_lines
from prep.runs.losses import NAME
from train.runs.losses import Growing, Losses, NoLosses

Watch = Callable[[Event], None]
TRAINING = "training"  # the phase between others


class Log:
    """Appends events to the file and passes them to `watch`. A context manager that closes the file.

    `rewind` opens the file; call it before the first event.
    """

    def __init__(self, path: Path, watch: Watch, progress: Progress = silent) -> None:
        self._path, self._watch, self.progress = path, watch, progress
        self._file: Growing | None = None
        self.losses = Losses(path.with_name(NAME))
        self.last: Event = {}
        self.begun: Event = {}  # the last start
        self.doing = TRAINING, time.time()  # the phase, and when it began
        self.stepped = 0, 0.0  # the last step, and when it was done
        self.curve: list[tuple[int, float]] = []  # step and loss, of steps and of validations
        self.held_out: list[tuple[int, float]] = []

    def __call__(self, event: str, step: int, **values: Any) -> None:
        """Writes one event and shows it; non-finite numbers become null."""
        self.show(self.record(event, step, **values))

    def record(self, event: str, step: int, **values: Any) -> Event:
        """Writes one event and returns it, for `show`."""
        assert self._file is not None, "rewind comes first"
        body = {"event": event, "step": step, **{name: _spellable(value) for name, value in values.items()}}
        self._file.add(json.dumps(body).encode() + b"\n")
        self._keep(body)
        self.last = body
        if event in ("start", "step"):
            self.stepped = step, time.time()
        return body

    def show(self, event: Event) -> None:
        """Passes a recorded event to the watcher."""
        self._watch(event)

    def _keep(self, body: Event) -> None:
        if body["event"] == "start":
            self.begun = body
        points = {"step": self.curve, "validation": self.held_out}.get(body["event"])
        if points is not None and isinstance(body.get("loss"), float):
            points.append((body["step"], body["loss"]))

    @contextmanager
    def phase(self, title: str) -> Iterator[None]:
        """Shows a long phase to the watcher and the heartbeat; writes nothing to the file."""
        before, self.doing = self.doing[0], (title, time.time())
        try:
            with phase(self.progress, title):
                yield
        finally:
            self.doing = before, time.time()

    def rewind(self, step: int) -> frozenset[str]:
        """Removes the events after step `step` (0: all events); returns the events of step `step` that remain.

        A run that resumes there writes the others again. Also removes lines that a crash cut off, `stopped` and `end`.
        Raises `CacheError` if the log is not a regular file.
        """
        self.close()
        try:
            events = [(event, line) for event, line in _read(self._path, step)] if step else []
        except FileNotFoundError:
            events = []
        except OSError as error:
            raise refused(self._path, error, "remove it; only the record of the steps so far is lost") from None
        write_atomic(self._path, b"".join(line + b"\n" for _, line in events))
        self._file = Growing(self._path)
        self.losses.rewind(step)
        self.begun, self.curve, self.held_out = {}, [], []
        for event, _ in events:
            self._keep(event)
        return frozenset(event["event"] for event, _ in events if event["step"] == step)

    def sync(self) -> None:
        """Syncs the files to disk. Call it before writing a checkpoint that resumes after these events."""
        assert self._file is not None
        self._file.sync()
        self.losses.sync()

    def close(self) -> None:
        """Closes the files."""
        self.losses.close()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


class NoLog(Log):
    """The log of a rank that is not the first, and of steps that are thrown away: it keeps and shows nothing."""

    def __init__(self) -> None:
        super().__init__(Path("log.jsonl"), lambda _event: None)  # a name that is never opened
        self.losses = NoLosses(Path(NAME))

    def __call__(self, event: str, step: int, **values: Any) -> None:
        """Does nothing."""

    def rewind(self, step: int) -> frozenset[str]:
        """Does nothing."""
        return frozenset()

    def sync(self) -> None:
        """Does nothing."""


def _read(path: Path, step: int) -> Iterator[tuple[Event, bytes]]:
    """The events up to step `step` that a resumed run keeps, each with its line."""
    for event, line in event_lines(path):
        if event["step"] <= step and event["event"] not in ("stopped", "end"):
            yield event, line


def _spellable(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _spellable(inner) for name, inner in value.items()}
    return [_spellable(inner) for inner in value] if isinstance(value, tuple) else value
