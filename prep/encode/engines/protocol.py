"""Messages between `prep encode` and the workers that decode for it, as msgpack types."""

from __future__ import annotations

import os
import threading
from typing import Literal

import msgspec
import numpy as np

from prep.fs.blob import Blob, fetched
from prep.fs.remote.retry import NEVER
from prep.geometry import Placement, Size
from prep.parse import KEPT, Unparsed

# What is made of a file: pixels; pixels as other programs see them; a mask of it, or of its transparency; or a mask is
# drawn for it, and it is not read.
Reading = Literal["picture", "stored", "mask", "alpha", "drawn"]
# What a mask has of a latent cell: its mean; of one that says what is to be painted its first pixel, or all of them;
# or it stays as large as the picture, to cut it out of that.
Cell = Literal["mean", "first", "all", "whole"]


class PictureMessage(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A file to decode and to fit into its bucket."""

    reading: Reading
    file: bytes  # a path; it may not be valid UTF-8
    offset: int
    length: int | None
    digest: str  # that the file must have
    scaled: Size
    crop: tuple[int, int]
    bucket: Size
    flip: bool
    color: str  # that transparency is flattened onto, or "keep"
    factor: int  # pixels per latent cell and side
    data: bytes | None = None  # of an object in a store
    cell: Cell = "mean"  # of a mask
    hole: PictureMessage | None = None  # the mask of what is cut out of the picture; None: nothing

    @classmethod
    def of(cls, reading: Reading, blob: Blob, digest: str, placement: Placement, *, color: str, factor: int,
           cell: Cell = "mean", hole: PictureMessage | None = None, stop: threading.Event = NEVER) -> PictureMessage:
        """The message of a file and its placement; an object is read. Raises `OSError`, `StoreError`, `Stopped`."""
        whole = blob if reading == "drawn" else fetched(blob, stop=stop)
        if whole.fault is not None:
            raise whole.fault
        return cls(reading=reading, file=os.fsencode(blob.file), offset=blob.offset, length=blob.length, digest=digest,
                   scaled=placement.scaled, crop=placement.crop, bucket=placement.bucket, flip=placement.flip,
                   color=color, factor=factor, data=whole.data, cell=cell, hole=hole)

    def blob(self) -> Blob:
        """The file, as a blob."""
        return Blob(file=os.fsdecode(self.file), offset=self.offset, length=self.length, data=self.data)

    def placement(self) -> Placement:
        """How the picture is fitted to its bucket."""
        return Placement(scaled=self.scaled, crop=self.crop, bucket=self.bucket, flip=self.flip)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the pixels: [H, W, 3] of a picture, with a fourth channel if it has a hole, 0 there and 255 elsewhere, or
        for opacity, if that is kept; [M, h, w] of a mask, [H, W] of a whole one."""
        wide, high = self.bucket
        if self.reading == "stored":
            return high, wide, 3
        if self.reading == "picture":
            return high, wide, 3 if self.hole is None and self.color != KEPT else 4
        if self.cell == "whole":
            return high, wide
        return self.factor**2 if self.cell == "all" else 1, high // self.factor, wide // self.factor


class PixelsMessage(msgspec.Struct, frozen=True, array_like=True):
    """The pixels of a file, or why there are none."""

    pixels: memoryview = memoryview(b"")
    code: str = ""  # of a finding; "": there are pixels
    detail: str = ""
    bad: bool = False  # the file's own fault, and not that of this run

    def array(self, shape: tuple[int, ...]) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """The pixels, uint8. Raises `Unparsed` for another number of them: a worker may be taken over by a picture."""
        if self.pixels.nbytes != np.prod(shape):
            raise Unparsed(f"{self.pixels.nbytes} bytes of pixels, expected {list(shape)}")
        return np.frombuffer(self.pixels, np.uint8).reshape(shape)
