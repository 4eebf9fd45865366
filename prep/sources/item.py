"""The record that every source yields: a picture with its caption and mask."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prep.fs.blob import Blob

MaskFrom = Literal["auto", "none", "sidecar", "alpha"] | Path  # auto: sidecars, if there are any


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One picture with its caption and mask, as a source yields it; nothing is decoded yet."""

    name: str  # POSIX path below the source's root; unique within its source
    label: str  # its name in findings, unique in its recipe: begins with `source[1]/` if that has several sources
    source: int  # index into the recipe's sources
    picture: Blob
    caption: Blob | None
    mask: Blob | None
    caption_format: Literal["text", "json"] = "text"
    captions: tuple[str, ...] = ()  # from a table, if there is no caption file
    metadata: Blob | None = None  # a JSON file beside its caption: a scan checks it, nothing uses it
