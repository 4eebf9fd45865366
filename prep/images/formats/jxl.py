"""Reads the header of a JPEG XL file (ISO/IEC 18181) before decoding: the decoder tells it only afterward.

`codestream` takes the picture out of its container and drops EXIF, previews and JPEG reconstruction data; the
orientation that counts is in the codestream. `read_basics` reads the first bits of that.
"""

from __future__ import annotations

from dataclasses import dataclass

from prep.geometry import Size
from prep.images.formats.isobmff import boxes
from prep.images.formats.parts import BadPicture

_ALPHA, _SPOT, _BLACK, _CFA = 0, 2, 4, 5  # types of extra channels
_GRAY = 1  # color spaces
_RATIOS = ((1, 1), (12, 10), (4, 3), (3, 2), (16, 9), (5, 4), (2, 1))
_SIDES = ((1, 9), (1, 13), (1, 18), (1, 30))
_MOST = 1 << 14  # bytes to read; a header with dozens of named channels has a few hundred


@dataclass(frozen=True, kw_only=True, slots=True)
class Basics:
    """The header of a codestream."""

    size: Size  # after its orientation, which the decoder applies
    orientation: int  # 1-8
    bits: int  # per channel
    floats: bool
    gray: bool
    alpha: bool
    premultiplied: bool
    black: bool  # a fourth ink: CMYK
    animated: bool

    @property
    def mode(self) -> str:
        """Pillow's 8-bit mode."""
        alpha = ("a" if self.premultiplied else "A") if self.alpha else ""
        return ("L" if self.gray else "RGB") + alpha


def codestream(data: bytes) -> bytes:
    """The codestream of a file, bare or in a container. Raises `BadPicture` if it is cut short or missing."""
    if data.startswith(b"\xff\x0a"):
        return data
    whole, parts = b"", list[bytes]()
    for kind, start, stop in boxes(data, 0, len(data), "JPEG XL"):
        if kind == b"jxlc":
            whole = whole or data[start:stop]
        elif kind == b"jxlp":
            parts.append(data[start + 4 : stop])  # four bytes count the parts
    stream = whole or b"".join(parts)
    if not stream.startswith(b"\xff\x0a"):
        raise BadPicture("unreadable", "the JPEG XL container has no codestream")
    return stream


def read_basics(stream: bytes) -> Basics:
    """The header at the start of a codestream. Raises `BadPicture` if it is cut short."""
    bits = _Bits(stream[2:_MOST])
    try:
        width, height = _size(bits)
        return _metadata(bits, (width, height))
    except IndexError:
        raise BadPicture("truncated", f"JPEG XL ends inside its header, after {len(stream)} bytes") from None


class _Bits:
    """Reads bits, lowest bit of each byte first. Raises `IndexError` at the end."""

    def __init__(self, data: bytes) -> None:
        self._value = int.from_bytes(data, "little")
        self._left = 8 * len(data)

    def take(self, count: int) -> int:
        """The next `count` bits as a number."""
        self._left -= count
        if self._left < 0:
            raise IndexError
        value = self._value & ((1 << count) - 1)
        self._value >>= count
        return value

    def flag(self) -> bool:
        """The next bit."""
        return bool(self.take(1))

    def one_of(self, *choices: tuple[int, int]) -> int:
        """Two bits choose one of four (offset, number of bits to add to it)."""
        offset, count = choices[self.take(2)]
        return offset + self.take(count)

    def enum(self) -> int:
        """A value of an enumeration."""
        return self.one_of((0, 0), (1, 0), (2, 4), (18, 6))


def _size(bits: _Bits) -> Size:
    small = bits.flag()

    def side() -> int:
        return 8 * (bits.take(5) + 1) if small else bits.one_of(*_SIDES)

    height = side()
    ratio = bits.take(3)
    if ratio == 0:
        return side(), height
    over, under = _RATIOS[ratio - 1]
    return height * over // under, height


def _metadata(bits: _Bits, size: Size) -> Basics:
    if bits.flag():  # all defaults
        return Basics(size=size, orientation=1, bits=8, floats=False, gray=False, alpha=False, premultiplied=False,
                      black=False, animated=False)
    orientation, animated = _extra_fields(bits) if bits.flag() else (1, False)
    depth, floats = _depth(bits)
    bits.flag()  # whether 16 bits suffice inside the decoder
    channels = [_extra_channel(bits) for _ in range(bits.one_of((0, 0), (1, 0), (2, 4), (1, 12)))]
    bits.flag()  # XYB
    gray = False
    if not bits.flag():  # sRGB
        bits.flag()  # an ICC profile
        gray = bits.enum() == _GRAY
    alphas = [premultiplied for kind, premultiplied in channels if kind == _ALPHA]
    return Basics(size=size if orientation < 5 else (size[1], size[0]), orientation=orientation, bits=depth,
                  floats=floats, gray=gray, alpha=bool(alphas), premultiplied=alphas[:1] == [True],
                  black=any(kind == _BLACK for kind, _ in channels), animated=animated)


def _extra_fields(bits: _Bits) -> tuple[int, bool]:
    """(orientation, whether it is an animation)."""
    orientation = bits.take(3) + 1
    if bits.flag():  # the intrinsic display size
        _size(bits)
    if bits.flag():
        _preview(bits)
    animated = bits.flag()
    if animated:
        bits.one_of((100, 0), (1000, 0), (1, 10), (1, 30))
        bits.one_of((1, 0), (1001, 0), (1, 8), (1, 10))
        bits.one_of((0, 0), (0, 3), (0, 16), (0, 32))
        bits.flag()
    return orientation, animated


def _preview(bits: _Bits) -> None:
    sides = ((16, 0), (32, 0), (1, 5), (33, 9)) if bits.flag() else ((1, 6), (65, 8), (321, 10), (1345, 12))
    bits.one_of(*sides)
    if bits.take(3) == 0:
        bits.one_of(*sides)


def _depth(bits: _Bits) -> tuple[int, bool]:
    """(bits of a sample, whether it is a float)."""
    if bits.flag():
        depth = bits.one_of((32, 0), (16, 0), (24, 0), (1, 6))
        bits.take(4)
        return depth, True
    return bits.one_of((8, 0), (10, 0), (12, 0), (1, 6)), False


def _extra_channel(bits: _Bits) -> tuple[int, bool]:
    """(its type, whether it is a premultiplied alpha channel)."""
    if bits.flag():
        return _ALPHA, False
    kind = bits.enum()
    _depth(bits)
    bits.one_of((0, 0), (3, 0), (4, 0), (1, 3))
    bits.take(8 * bits.one_of((0, 0), (0, 4), (16, 5), (48, 10)))  # its name
    if kind == _SPOT:
        bits.take(64)
    elif kind == _CFA:
        bits.one_of((1, 0), (0, 2), (3, 4), (19, 8))
    return kind, kind == _ALPHA and bits.flag()
