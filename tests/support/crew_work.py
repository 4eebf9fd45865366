"""What processes of a crew do in tests; they import it by name."""

from __future__ import annotations

import os


def square(unit, progress):
    with progress("squaring", unit, "rows") as tick:
        tick(unit)
    return unit * unit


def fail(unit, progress):
    raise ValueError(f"unit {unit}")


def leave(unit, progress):
    os._exit(3)
