"""Ctrl-C while a large library loads: torch, interrupted in the middle of that, may end the process by a signal."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def defer_interrupts() -> Iterator[None]:
    """A Ctrl-C in here has its effect at the end: what was the handler is called then, once."""
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):  # ignored, or not ours
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
    """The collector does nothing inside; after that it is as it was."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def gc_enabled() -> Iterator[None]:
    """Inside `at_rest`: the collector works, on what is made from here on (encoders do make cycles)."""
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.unfreeze()
