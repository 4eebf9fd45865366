"""Keeps idle worker processes for the next command of the same test process.

A worker takes a quarter of a second to start, longer than it decodes a test's pictures. Commands that end still take
back their workers as they do elsewhere; only the end of the idle ones is put off.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from prep.workers import pool

MOST = 6  # workers, of all environments: tests limit how many files are open
_started = pool._start
_kept: list[tuple[object, pool._Worker]] = []  # the oldest first


def kind_of(command: Sequence[str]) -> object:
    """What a worker inherits when it starts."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return tuple(command), Path.cwd(), os.getuid() if hasattr(os, "getuid") else 0, tuple(sorted(environment.items()))


def start(command: Sequence[str]) -> pool._Worker | None:
    """A kept worker, or a new one."""
    kind = kind_of(command)
    for number in reversed(range(len(_kept))):
        if _kept[number][0] == kind:
            worker = _kept.pop(number)[1]
            if worker._process.poll() is None:
                return worker
            worker.end()
    return _started(command)


def close(self: pool.WorkerPool) -> None:
    """Keeps idle workers, and ends the oldest ones for them; ends all others."""
    self.closed.set()
    with self._lock:
        idle, self._idle = self._idle, []
        self._all.difference_update(idle)
    for worker in idle:
        if worker.late or worker._process.poll() is not None:
            worker.end()
        else:
            worker.ready = lambda: True  # type: ignore[method-assign]
            _kept.append((kind_of(self._command), worker))
    for worker in list(self._all):
        self._end(worker)
    while len(_kept) > MOST:
        _kept.pop(0)[1].end()


def end_all() -> None:
    """Ends the workers that are kept."""
    while _kept:
        _kept.pop()[1].end()
