"""One picture's mask: what is read and decoded for it, on a thread, and how it is written. `prep.masks.generate` does
many.
"""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from prep.errors import PathError
from prep.findings import Finding
from prep.formatting import printable, printable_name
from prep.fs.atomic import write_atomic
from prep.fs.blob import Blob, error_code, read_blob
from prep.geometry import Size
from prep.images.decode import Pixels, decode_picture, encode_png, read_header
from prep.images.formats.parts import BadPicture
from prep.masks.methods import METHODS, MaskOptions
from prep.masks.pixels import combined, finish_map, plain_map, read_mask, scaled
from prep.sources.item import Item

Outcome = Literal["written", "black", "kept", "skipped"] | Finding


class Model(Protocol):
    """What makes maps of pictures."""

    def prepare(self, picture: Pixels) -> Any:
        """What `maps` takes of a picture, uint8 [H, W, 3]; called by many threads at once."""

    def maps(self, inputs: Sequence[Any]) -> Sequence[Pixels]:
        """For each input, uint8 [h, w] over the whole picture, of any size; called by one thread."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A picture that waits for the model."""

    item: Item
    target: Path
    size: Size
    base: Pixels | None  # the mask to combine with, of the picture's size
    input: Any  # the model's


def start_picture(item: Item, target: Path, choice: MaskOptions, model: Model | None) -> Outcome | Ready:
    """The whole mask, or what the model needs for it."""
    try:
        if item.mask is not None and choice.combine is None:
            size = read_header(read_blob(item.picture)).size if choice.naming == "kohya" else None
            return _write(item, target, _own_mask(item.mask, size))  # kohya wants the picture's size
        data = read_blob(item.picture)
        if not METHODS[choice.method].model:
            made = plain_map(data, choice)
            return _finish(item, target, made, _base(item, target, (made.shape[1], made.shape[0]), choice), choice)
        picture = decode_picture(data, alpha="white")
        assert model is not None, f"{choice.method} needs a model"
        return Ready(item=item, target=target, size=picture.size, base=_base(item, target, picture.size, choice),
                     input=model.prepare(np.asarray(picture)))
    except OSError as error:
        return Finding(path=item.label, code=error_code(error), severity="error",
                       detail=f"cannot be read: {error.strerror or error}")
    except BadPicture as error:
        return Finding(path=item.label, code=error.code, severity="error", detail=error.detail)
    except MemoryError:
        return Finding(path=item.label, code="too-large", severity="error", detail="takes more memory than there is")


def _base(item: Item, target: Path, size: Size, choice: MaskOptions) -> Pixels | None:
    """The mask to combine with: the file that is there, else the item's own. Raises `OSError`, `BadPicture`."""
    if choice.combine in (None, "replace"):
        return None
    if target.exists():
        return read_mask(target.read_bytes(), size)
    return None if item.mask is None else _own_mask(item.mask, size)


def _own_mask(blob: Blob, size: Size | None) -> Pixels:
    """The mask file of a picture, named where it is at fault. Raises `OSError`, `BadPicture`."""
    try:
        return read_mask(read_blob(blob), size)
    except BadPicture as error:
        raise BadPicture(error.code, f"its mask {printable_name(blob.name)}: {error.detail}") from None


def finish_picture(ready: Ready, gray: Pixels, choice: MaskOptions) -> Outcome:
    """Writes the mask of the model's map."""
    return _finish(ready.item, ready.target, scaled(gray, ready.size), ready.base, choice)


def _finish(item: Item, target: Path, gray: Pixels, base: Pixels | None, choice: MaskOptions) -> Outcome:
    mask = finish_map(gray, choice)
    return _write(item, target, combined(mask, base, choice.combine) if choice.combine else mask)


def _write(item: Item, target: Path, mask: Pixels, *, white: bool = False) -> Outcome:
    """Writes a mask; one that is white everywhere only for `white`, or in place of another: it means having none."""
    try:
        if mask.min() == 255 and not white and not target.exists():
            return "skipped"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, encode_png(np.ascontiguousarray(mask)))
    except OSError as error:
        return no_room(item, target, error)
    return "written" if mask.max() else "black"


def write_white(item: Item, target: Path) -> Outcome:
    """Writes a mask that trains everywhere. Raises `PathError`."""
    try:
        width, height = read_header(read_blob(item.picture)).size
    except (OSError, BadPicture):  # changed since; the next run says so
        return "skipped"
    return _write(item, target, np.full((height, width), 255, np.uint8), white=True)


def no_room(item: Item, target: Path, error: OSError) -> Finding:
    """The finding for a name that the file system of `target` does not take. Raises `PathError` for another error."""
    if error.errno != errno.ENAMETOOLONG:
        raise PathError(f"cannot write mask {printable(str(target))}: {error.strerror or error}",
                        hint="choose another directory: -o DIR") from None
    return Finding(path=item.label, code="name-too-long", severity="error",
                   detail="the name or path of its mask would be longer than the file system allows")
