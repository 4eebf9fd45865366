"""Defers Ctrl-C during imports, because interrupting torch's import can kill the process; controls the collector;
says how much memory this process took.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """Defers Ctrl-C to the end of the context, where the previous handler is then called once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):  # ignored, or in C
        yield
        return
    asked: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda number, frame: asked.append((number, frame)))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if asked:
        handler(*asked[0])


@contextmanager
def gc_disabled() -> Iterator[None]:
    """Turns Python's cyclic garbage collector off, and restores its state at the end."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def gc_enabled() -> Iterator[None]:
    """Inside `gc_disabled`: turns the collector on for objects made from here on (encoders do make cycles)."""
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.unfreeze()


def peak_resident() -> int | None:
    """Bytes of memory that this process took at most; `None` on systems that do not say."""
    if sys.platform == "win32":
        return None
    with suppress(OSError, IndexError):  # Linux, where getrusage also counts what the parent had at the start
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) << 10
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used << 10
