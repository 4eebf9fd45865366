"""Keeps idle worker processes for the next command of the same test process.

A worker takes a quarter of a second to start, longer than it decodes a test's pictures. Commands that end still take
back their workers as they do elsewhere; only the end of the idle ones is put off.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from prep.workers import pool

MOST = 2  # of one environment
_started = pool._start
_kept: dict[object, list[pool._Worker]] = defaultdict(list)


def kind_of(command: Sequence[str]) -> object:
    """What a worker inherits when it starts."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return tuple(command), Path.cwd(), os.getuid() if hasattr(os, "getuid") else 0, tuple(sorted(environment.items()))


def start(command: Sequence[str]) -> pool._Worker | None:
    """A kept worker, or a new one."""
    kept = _kept[kind_of(command)]
    while kept:
        worker = kept.pop()
        if worker._process.poll() is None:
            return worker
        worker.end()
    return _started(command)


def close(self: pool.WorkerPool) -> None:
    """Keeps idle workers; ends all others."""
    self._closed.set()
    kept = _kept[kind_of(self._command)]
    with self._lock:
        while self._idle and len(kept) < MOST:
            worker = self._idle.pop()
            self._all.discard(worker)
            if not worker.late and worker._process.poll() is None:
                worker.ready = lambda: True  # type: ignore[method-assign]
                kept.append(worker)
            else:
                worker.end()
    for worker in list(self._all):
        self._end(worker)


def end_all() -> None:
    """Ends the workers that are kept."""
    for kept in _kept.values():
        while kept:
            kept.pop().end()
