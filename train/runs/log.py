"""What happened, one JSON object a line, in RUN/log.jsonl; and on stderr for whoever watches.

Events: `start`, `step` (loss, lr, grad_norm, samples, samples_per_second, wait, seconds), `validation` (loss,
timesteps, losses), `sample` (picture), `checkpoint` (folder), `warning` (text), `stopped`, `end` (result). Each has
the step that it came after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

from prep.fs.atomic import write_atomic
from prep.progress import Progress, phase, silent

Event = Mapping[str, Any]
Watch = Callable[[Event], None]


class Log:
    """Appends events to the file and hands them to `watch`. A context manager: it closes the file."""

    def __init__(self, path: Path, watch: Watch, progress: Progress = silent) -> None:
        self._path, self._watch, self._progress = path, watch, progress
        self._file = path.open("a", encoding="utf-8")
        self.last: Event = {}

    def __call__(self, event: str, step: int, **values: Any) -> None:
        """Writes one event; numbers that JSON cannot spell become null."""
        body = {"event": event, "step": step, **{name: _spellable(value) for name, value in values.items()}}
        self._file.write(json.dumps(body) + "\n")
        self._file.flush()
        self._watch(body)
        self.last = body

    def phase(self, title: str) -> AbstractContextManager[object]:
        """Shows whoever watches what takes so long; leaves no trace in the file."""
        return phase(self._progress, title)

    def rewind(self, step: int) -> None:
        """Forgets what came after step `step`, and everything for 0: a run that goes on from there makes it again.

        A line that a crash tore goes too.
        """
        self._file.close()
        kept = [text for text in self._path.read_bytes().splitlines() if step and _step_of(text) <= step]
        write_atomic(self._path, b"".join(text + b"\n" for text in kept))
        self._file = self._path.open("a", encoding="utf-8")

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _step_of(line: bytes) -> float:
    """The step of a line; infinite for one that is none of ours."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def _spellable(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return [_spellable(inner) for inner in value] if isinstance(value, tuple) else value
