"""What happened, one JSON object a line, in RUN/log.jsonl; and on stderr for whoever watches.

Events: `start`, `step` (loss, lr, grad_norm, samples, samples_per_second, wait, seconds), `validation` (loss,
timesteps, losses), `sample` (picture), `checkpoint` (folder), `warning` (text), `stopped`, `end` (result). Each has
the step that it came after.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

Event = Mapping[str, Any]
Watch = Callable[[Event], None]


class Log:
    """Appends events to the file and hands them to `watch`. A context manager: it closes the file."""

    def __init__(self, path: Path, watch: Watch) -> None:
        self._file = path.open("a", encoding="utf-8")
        self._watch = watch
        self.last: Event = {}

    def __call__(self, event: str, step: int, **values: Any) -> None:
        """Writes one event; numbers that JSON cannot spell become null."""
        body = {"event": event, "step": step, **{name: _spellable(value) for name, value in values.items()}}
        self._file.write(json.dumps(body) + "\n")
        self._file.flush()
        self._watch(body)
        self.last = body

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def _spellable(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return [_spellable(inner) for inner in value] if isinstance(value, tuple) else value
