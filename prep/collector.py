"""Python's collector of cyclic garbage, kept from what is none.

A run makes some ten records a picture, none of them in a cycle, and all of them stay: 100,000 pictures make the
collector walk over millions of objects again and again, a third of the time of a run that has nothing to encode.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def at_rest() -> Iterator[None]:
    """The collector does nothing inside; after that it is as it was."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def at_work() -> Iterator[None]:
    """Inside `at_rest`: the collector works, on what is made from here on (encoders do make cycles)."""
    gc.freeze()
    gc.enable()
    try:
        yield
    finally:
        gc.disable()
        gc.unfreeze()
