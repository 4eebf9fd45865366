"""Values in safetensors files, from their bytes: single numbers of any dtype, and whether tensors are finite. No torch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import BinaryIO

import numpy as np

from prep.parse import Unparsed
from train.runs.safetensors.header import TensorInfo

_CODES = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i", "I16": "<h", "I8": "<b", "U8": "<B"}
# Dtypes of floats: as unsigned integers, and the bits that are all 1 in NaN and infinity (of E4M3, which has no
# infinity, in NaN).
_BITS = {"F64": ("<u8", 0x7FF0_0000_0000_0000), "F32": ("<u4", 0x7F80_0000), "F16": ("<u2", 0x7C00),
         "BF16": ("<u2", 0x7F80), "F8_E5M2": ("u1", 0x7C), "F8_E4M3": ("u1", 0x7F)}
FLOATS = tuple(_BITS)
NUMBERS = tuple({**_BITS, **_CODES})
_PIECE = 1 << 22  # bytes


def number(dtype: str, data: bytes) -> float:
    """The only value of a tensor of a dtype in `NUMBERS`, from its bytes."""
    if dtype == "BF16":
        dtype, data = "F32", b"\0\0" + data  # the upper half of a float32
    if dtype == "F8_E5M2":
        dtype, data = "F16", b"\0" + data
    if dtype == "F8_E4M3":
        return _e4m3(data[0])
    return float(struct.unpack(_CODES[dtype], data)[0])


def _e4m3(byte: int) -> float:
    """A float of 8 bits: sign, 4 of an exponent whose bias is 7, 3 of the fraction; all ones: NaN."""
    exponent, fraction = (byte >> 3) & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    size = fraction / 8 * 2.0**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7)
    return -size if byte >> 7 else size


def first_not_finite(handle: BinaryIO, start: int, tensors: Iterable[tuple[str, TensorInfo]]) -> str | None:
    """The name of the first tensor with NaN or infinity, if any: of a file whose tensors begin at byte `start`."""
    for name, info in tensors:
        if info.dtype not in _BITS:
            continue
        kind, ones = _BITS[info.dtype]
        handle.seek(start + info.start)
        rest = info.end - info.start
        while rest:
            data = handle.read(min(rest, _PIECE))
            if not data:
                raise Unparsed(f"it ends {rest} bytes early")
            rest -= len(data)
            bits = np.frombuffer(data, kind)
            if bool(((bits & bits.dtype.type(ones)) == ones).any()):
                return name
    return None
