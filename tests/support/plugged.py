"""HEIC and JPEG XL files that tests make, with the plugins that read them."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
from pictures import decoded
from PIL import Image

from prep.images.decode import decode_picture
from prep.images.formats.parts import BadPicture


def heic(picture: Image.Image | np.ndarray, mode: str = "", **options) -> bytes:
    """An HEIC file of a picture, or of values of 16 bits as `mode` says, of which 10 are kept."""
    import pillow_heif

    stream = io.BytesIO()
    if isinstance(picture, np.ndarray):
        size = picture.shape[1], picture.shape[0]
        pillow_heif.encode(mode, size, picture.tobytes(), stream, **{"quality": -1, "chroma": 444, **options})
    else:
        pillow_heif.from_pillow(picture).save(stream, **{"quality": -1, "chroma": 444, **options})
    return stream.getvalue()


def jxl(picture: Image.Image, **options) -> bytes:
    """A JPEG XL file of a picture, lossless unless told otherwise."""
    import pillow_jxl  # registers how such files are saved

    assert pillow_jxl
    stream = io.BytesIO()
    picture.save(stream, "JXL", **{"lossless": True, "num_threads": 1, **options})
    return stream.getvalue()


def cut(data: bytes) -> None:
    """Decodes every 47th beginning of a file: the whole picture or a finding, and mostly the latter."""
    whole = decoded(data)
    refused = 0
    for length in range(0, len(data), 47):
        try:
            assert (decoded(data[:length]) == whole).all(), length
        except BadPicture as error:
            assert error.code in ("truncated", "unreadable", "corrupt-data", "empty-file", "not-an-image"), error.code
            refused += 1
    assert refused > len(data) // 47


def spoil(seeds: Sequence[bytes], within: int, rng: np.random.Generator) -> None:
    """Decodes each seed sixty times with three bytes of its beginning changed: a picture or a finding, nothing else."""
    for seed in seeds:
        for _ in range(60):
            broken = bytearray(seed)
            for place in rng.integers(0, min(len(seed), within), 3):
                broken[place] = rng.choice([0, 1, 255, rng.integers(256)])
            try:
                assert decode_picture(bytes(broken), alpha="white").mode == "RGB"
            except BadPicture as error:
                assert error.code


class Bits:
    """Bits put one after the other, the lowest of each byte first: how a codestream's header is written."""

    def __init__(self) -> None:
        self.value, self.count = 0, 0

    def put(self, value: int, width: int) -> Bits:
        """Appends `value` as so many bits."""
        self.value |= value << self.count
        self.count += width
        return self

    def stream(self, frames: bytes = b"") -> bytes:
        """A codestream: this header, and `frames` after it."""
        return b"\xff\x0a" + self.value.to_bytes((self.count + 7) // 8, "little") + frames


def sides(width: int, height: int) -> Bits:
    """The beginning of a header: a size."""
    return Bits().put(0, 1).put(3, 2).put(height - 1, 30).put(0, 3).put(3, 2).put(width - 1, 30)


def extra_fields(bits: Bits, *, orientation: int = 1, animated: bool = False) -> Bits:
    """What follows the size, where not all is as usual, up to the depth."""
    bits.put(0, 1).put(1, 1).put(orientation - 1, 3).put(0, 1).put(0, 1).put(animated, 1)
    return bits.put(0, 2).put(0, 2).put(0, 2).put(0, 1) if animated else bits  # 100 ticks a second, for ever


def usual_rest(bits: Bits) -> Bits:
    """The rest of a header of 8-bit sRGB: depth, no channels, XYB, colors, tone mapping, extensions, transform."""
    return bits.put(0, 1).put(0, 2).put(1, 1).put(0, 2).put(1, 1).put(1, 1).put(1, 1).put(0, 2).put(1, 1)


def turned(stream: bytes, size: tuple[int, int], orientation: int) -> bytes:
    """A lossy codestream of 8-bit RGB, whose header of four bytes says nothing but its size, with an orientation."""
    return usual_rest(extra_fields(sides(*size), orientation=orientation)).stream(stream[4:])


def boxed(*boxes: tuple[bytes, bytes]) -> bytes:
    """A container of these boxes, each (kind, contents)."""
    start = b"\0\0\0\x0cJXL \r\n\x87\n" + b"\0\0\0\x14ftypjxl \0\0\0\0jxl "
    return start + b"".join((len(body) + 8).to_bytes(4, "big") + kind + body for kind, body in boxes)
