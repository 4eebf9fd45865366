"""Reports progress: a `Progress` opens a stage or a phase, and a `Tick` counts its finished units."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

Tick = Callable[[int], object]  # called with the number of newly finished units
Total = int | Callable[[], int | None] | None  # called again whenever a bar moves; None: not known (yet)
Progress = Callable[[str, Total, str], AbstractContextManager[Tick]]  # title, total, unit; unit "": a phase
FILE = "LATENTRY_PROGRESS"  # the variable that names the file which the commands of jobs tell their progress in


class DeferredTotal:
    """A total that is set once it is known."""

    def __init__(self) -> None:
        self.count: int | None = None

    def __call__(self) -> int | None:
        return self.count


class BackgroundTotal(DeferredTotal):
    """A total that a background thread counts; the thread starts only when a progress bar asks for the total.

    Errors in `count` are ignored: the work itself meets and reports them.
    """

    def __init__(self, count: Callable[[], int]) -> None:
        super().__init__()
        self._count = count
        self._thread: threading.Thread | None = None

    def __call__(self) -> int | None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._find_out, daemon=True)
            self._thread.start()
        return self.count

    def _find_out(self) -> None:
        try:
            self.count = self._count()
        except Exception:
            return


def uncounted(_count: int) -> None:
    """A `Tick` that counts nothing."""


def phase(progress: Progress, title: str) -> AbstractContextManager[Tick]:
    """A slow step without a count: `with phase(progress, "loading the VAE"): …`."""
    return progress(title, None, "")


def silent(_title: str, _total: Total, _unit: str) -> AbstractContextManager[Tick]:
    """A `Progress` that shows nothing."""
    return nullcontext(uncounted)
