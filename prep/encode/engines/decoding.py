"""The task of the workers that decode for `prep encode`: files to the pixels and mask cells of their buckets.

All formats are decoded in processes, not only those whose decoders are likely to crash: messages and start-up add 2 to
4 ms to the 30 ms that a photo of 1 to 2 megapixels takes (measured with two workers, 512 and 1024 pixels a side), where
SD 1.5's VAE takes seconds on a CPU; the time by the clock is the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from prep.digest import digest_bytes
from prep.encode.engines.protocol import PictureMessage, PixelsMessage
from prep.fs.blob import error_code, read_blob
from prep.geometry import fits_scaled
from prep.images.decode import Pixels, decode_as_stored, decode_picture, quiet_pillow, scale_and_crop
from prep.images.drawn_mask import drawn_hole
from prep.images.formats.parts import BadPicture, NoDecoder
from prep.images.mask import alpha_of, decode_mask, hole_cells, place_hole, place_mask
from prep.workers.service import DECODING, Service, Task

LIMITS = DECODING


def pixels_of(message: PictureMessage) -> PixelsMessage:
    """The pixels of a file, if it still has the digest in the row's key; else the reason. Raises `MemoryError`."""
    try:
        return PixelsMessage(pixels=np.ascontiguousarray(_made(message)).data.cast("B"))
    except _Changed:
        return PixelsMessage(code="changed-meanwhile",
                             detail="changed while it was being encoded; run the command again")
    except OSError as error:
        return PixelsMessage(code=error_code(error), detail=f"cannot be read: {error.strerror or error}")
    except NoDecoder as error:  # not the picture's fault
        return PixelsMessage(code=error.code, detail=error.detail)
    except BadPicture as error:
        return PixelsMessage(code=error.code, detail=error.detail, bad=True)


class _Changed(Exception):
    """A file has another digest than the row's key says."""


def _made(message: PictureMessage) -> Pixels:
    placement = message.placement()
    if message.reading == "drawn":
        return _of_cell(drawn_hole(message.digest, placement), message)
    data = read_blob(message.blob())
    if digest_bytes(data) != message.digest:
        raise _Changed
    if message.reading == "picture":
        pixels = scale_and_crop(decode_picture(data, alpha=message.color), placement)
        return pixels if message.hole is None else np.dstack([pixels, 255 - _made(message.hole)])
    if message.reading == "stored":
        return scale_and_crop(decode_as_stored(data), placement)
    mask = alpha_of(data) if message.reading == "alpha" else decode_mask(data)
    if not fits_scaled(mask.size, placement.scaled):
        width, height = mask.size
        raise BadPicture("mask-size-mismatch", f"mask has {width}x{height} pixels, not its picture's shape")
    if message.cell == "mean":
        return place_mask(mask, placement, message.factor)[None]
    return _of_cell(place_hole(mask, placement), message)


def _of_cell(hole_HW: Pixels, message: PictureMessage) -> Pixels:
    assert message.cell != "mean", "a hole has no mean"
    return hole_HW if message.cell == "whole" else hole_cells(hole_HW, message.factor, message.cell)


def _decode(message: PictureMessage) -> Iterator[PixelsMessage]:
    yield pixels_of(message)


DECODE = Task(name="decode", question=PictureMessage, part=PixelsMessage, work=_decode)
SERVICE = Service(module=__name__, tasks=(DECODE,), prepare=quiet_pillow)
