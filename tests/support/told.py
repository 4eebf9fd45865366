"""What a conversion tells."""

from __future__ import annotations


def said(converted) -> dict[str, str]:
    """The notes by key."""
    return {one.key: one.said for one in converted.notes}
