"""Ranks pictures that resemble one another: the first is the one to keep."""

from __future__ import annotations

from prep.geometry import Size


def rank(name: str, size: Size) -> tuple[int, int, str]:
    """A key to sort by: the largest first, then the one with the shortest name, as copies tend to have longer names."""
    return -size[0] * size[1], len(name.rpartition("/")[2]), name
