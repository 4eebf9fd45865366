"""The nouns of Latentry as frozen records. Sizes are always (width, height); arrays are always [H, W].

`None` in a field means "has none", never "not known yet".
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

Size = tuple[int, int]  # (width, height)
Focus = tuple[int, int]  # (x, y) of what matters in a picture: parts of its width and height in 1/65536
Severity = Literal["error", "warning", "info"]
Role = Literal["train", "validation", "prior"]
DType = Literal["bfloat16", "float16", "float32", "uint8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """What is to be said of one file."""

    path: str  # the item's name, with its source before it where a recipe has several; or a path as the user knows it
    code: str  # stable, kebab-case
    severity: Severity
    detail: str  # for people: what was seen, what was wanted

    def as_json(self) -> dict[str, Any]:
        """The finding in every document of `--json`."""
        return {"path": self.path, "code": self.code, "severity": self.severity, "detail": self.detail}


@dataclass(frozen=True, kw_only=True, slots=True)
class Blob:
    """Where some bytes lie: a whole file, or a range of one (a member of a tar)."""

    file: str  # the file's path; a `Path` of it takes longer to make than all that a run without news does with it
    offset: int = 0
    length: int | None = None  # None: up to the end of the file
    member: str = ""  # what the range is called in its tar; "": the blob is a whole file

    @property
    def path(self) -> Path:
        """The file."""
        return Path(self.file)

    @property
    def name(self) -> str:
        """The file's name, or the member's, without its directory."""
        return self.member.rpartition("/")[2] or self.file.rpartition(os.sep)[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One picture with its caption and mask, as a source yields it; nothing is decoded yet."""

    name: str  # POSIX path below the source's root; unique within its source
    source: int  # index into the recipe's sources
    picture: Blob
    caption: Blob | None
    mask: Blob | None
    caption_format: Literal["text", "json"] = "text"
    captions: tuple[str, ...] = ()  # from a table, where there is no caption file
    metadata: Blob | None = None  # a JSON file beside its caption: looked at by a scan, never used


@dataclass(frozen=True, kw_only=True, slots=True)
class Surveyed:
    """An item whose bytes were digested and whose header was read: all that keys and buckets need."""

    item: Item
    picture: str  # SHA-256 of the picture's bytes
    size: Size  # pixels, after EXIF orientation
    has_alpha: bool
    captions: tuple[tuple[str, float], ...]  # final strings and their weights, at least one
    mask: str | None  # SHA-256 of the mask file's bytes
    focus: Focus | None = None  # where its mask is, for `crop = "focus"`


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How a picture gets into its bucket: scale the whole, cut out the bucket at `crop`, perhaps mirror."""

    scaled: Size  # the whole picture after resizing
    crop: tuple[int, int]  # (left, top) of the bucket in scaled pixels
    bucket: Size
    flip: bool = False  # mirrored left to right, after cropping


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """One placement of a picture and the keys of its rows."""

    placement: Placement
    latent: str
    mask: str | None  # None: all ones


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One caption variant, its chance relative to the sample's others, and its row's key."""

    caption: str
    weight: float
    key: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One picture at one bucket: what an epoch shows once, times `repeats`."""

    id: str  # SHA-256; does not change with names or order
    name: str
    source: int
    role: Role
    picture: str
    size: Size
    bucket: Size
    views: tuple[View, ...]
    texts: tuple[Text, ...]
    repeats: int = 1
    weight: float = 1.0  # of its loss


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """One named array of a field, as every row of a shard has it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]  # of one row, without N

    @property
    def row_bytes(self) -> int:
        """Bytes of one row, without its checksum."""
        size = ITEM_BYTES[self.dtype]
        for side in self.shape:
            size *= side
        return size


ITEM_BYTES: dict[DType, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "uint8": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class RowRef:
    """Where a row is: its shard's digest and its place there."""

    shard: str
    row: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The unit of encoding work: the rows that will make one shard, sorted by key."""

    key: str
    field: str
    rows: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Reject:
    """A row that could not be made, and why; kept in its task's commit so that it is not tried for ever."""

    key: str
    code: str
    detail: str
