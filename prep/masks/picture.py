"""Makes the mask of one picture: reads, decodes and writes it on a thread. `prep.masks.generate` makes many."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Any, Literal, Protocol

import numpy as np

from prep.errors import PathError
from prep.findings import Finding
from prep.formatting import printable, printable_name
from prep.fs.atomic import write_atomic
from prep.fs.blob import Blob, blob_at, error_code, read_blob
from prep.fs.remote.retry import NEVER
from prep.geometry import Size
from prep.images.decode import Pixels, decode_picture, encode_png, read_header
from prep.images.formats.parts import BadPicture
from prep.masks.methods import METHODS, MaskOptions
from prep.masks.pixels import combined, finish_map, plain_map, read_mask, scaled
from prep.sources.item import Item

Outcome = Literal["written", "black", "kept", "skipped"] | Finding


class Model(Protocol):
    """Makes maps of pictures."""

    def prepare(self, picture: Pixels) -> Any:
        """The input of `maps` for a picture, uint8 [H, W, 3]; many threads call this at once."""

    def maps(self, inputs: Sequence[Any]) -> Sequence[Pixels]:
        """A map for each input: uint8 [h, w] of any size, over the whole picture; one thread calls this."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ready:
    """A picture that waits for the model."""

    item: Item
    target: Path
    size: Size
    base: Pixels | None  # the mask to combine with, of the picture's size
    input: Any  # what `Model.prepare` returned


def start_picture(item: Item, target: Path, choice: MaskOptions, model: Model | None,
                  stop: Event = NEVER) -> Outcome | Ready:
    """Makes the mask, or only prepares the picture if the method needs the model. Raises `StoreError`, `Stopped`."""
    try:
        if item.mask is not None and choice.combine is None:
            size = read_header(read_blob(item.picture, stop=stop)).size if choice.naming == "kohya" else None
            return _write(item, target, _own_mask(item.mask, size, stop))  # kohya requires the picture's size
        data = read_blob(item.picture, stop=stop)
        if not METHODS[choice.method].model:
            made = plain_map(data, choice)
            base = _base(item, target, (made.shape[1], made.shape[0]), choice, stop)
            return _finish(item, target, made, base, choice)
        picture = decode_picture(data, alpha="white")
        assert model is not None, f"{choice.method} needs a model"
        return Ready(item=item, target=target, size=picture.size, base=_base(item, target, picture.size, choice, stop),
                     input=model.prepare(np.asarray(picture)))
    except OSError as error:
        return Finding(path=item.label, code=error_code(error), severity="error",
                       detail=f"cannot be read: {error.strerror or error}")
    except BadPicture as error:
        return Finding(path=item.label, code=error.code, severity="error", detail=error.detail)
    except MemoryError:
        return Finding(path=item.label, code="too-large", severity="error", detail="takes more memory than there is")


def _base(item: Item, target: Path, size: Size, choice: MaskOptions, stop: Event) -> Pixels | None:
    """The mask to combine with: the existing file, else the item's own. Raises `OSError`, `BadPicture`."""
    if choice.combine in (None, "replace"):
        return None
    if target.exists():
        return read_mask(read_blob(blob_at(target)), size)
    return None if item.mask is None else _own_mask(item.mask, size, stop)


def _own_mask(blob: Blob, size: Size | None, stop: Event) -> Pixels:
    """Reads the mask file of a picture; `BadPicture` names the file. Raises `OSError`, `BadPicture`."""
    try:
        return read_mask(read_blob(blob, stop=stop), size)
    except BadPicture as error:
        raise BadPicture(error.code, f"its mask {printable_name(blob.name)}: {error.detail}") from None


def finish_picture(ready: Ready, gray: Pixels, choice: MaskOptions) -> Outcome:
    """Writes the mask made from the model's map."""
    return _finish(ready.item, ready.target, scaled(gray, ready.size), ready.base, choice)


def _finish(item: Item, target: Path, gray: Pixels, base: Pixels | None, choice: MaskOptions) -> Outcome:
    mask = finish_map(gray, choice)
    return _write(item, target, combined(mask, base, choice.combine) if choice.combine else mask)


def _write(item: Item, target: Path, mask: Pixels, *, white: bool = False) -> Outcome:
    """Writes a mask. An entirely white mask, which equals none, is written only with `white` or over another file."""
    try:
        if mask.min() == 255 and not white and not target.exists():
            return "skipped"
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(target, encode_png(np.ascontiguousarray(mask)))
    except OSError as error:
        return no_room(item, target, error)
    return "written" if mask.max() else "black"


def write_white(item: Item, target: Path) -> Outcome:
    """Writes an entirely white mask. Raises `PathError`."""
    try:
        width, height = read_header(read_blob(item.picture)).size
    except (OSError, BadPicture):  # changed since; the next run reports it
        return "skipped"
    return _write(item, target, np.full((height, width), 255, np.uint8), white=True)


def no_room(item: Item, target: Path, error: OSError) -> Finding:
    """The finding for a name too long for the file system of `target`. Raises `PathError` for another error."""
    if error.errno != errno.ENAMETOOLONG:
        raise PathError(f"cannot write mask {printable(str(target))}: {error.strerror or error}",
                        hint="choose another directory: -o DIR") from None
    return Finding(path=item.label, code="name-too-long", severity="error",
                   detail="the name or path of its mask would be longer than the file system allows")
