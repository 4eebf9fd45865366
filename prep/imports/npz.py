"""Reads `.npz` files of strangers: zips of arrays of numbers, each bounded by its header before it is read.

No pickle, no `eval` and no array of NumPy's own reader: a header has the one spelling that NumPy writes, or is refused.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

import numpy as np

from prep.formatting import printable

MOST_BYTES = 1 << 28  # of a file: sd-scripts writes 19 MB for 1024x1024 with a mask and its mirrored latent, at 4 sizes
MOST_ARRAYS = 256
MOST_ARRAY_BYTES = 1 << 27
MOST_DIRECTORY = 1 << 16  # bytes of the zip's list of members
_END, _END_BYTES, _FURTHER_END = b"PK\5\6", 22, b"PK\6\7"  # records at the end of a zip
_MAGIC = b"\x93NUMPY"
_HEADER = re.compile(r"\{'descr': '([<>|=]?[iuf][1248])', 'fortran_order': (True|False), "
                     r"'shape': \(([0-9, ]{0,80})\), ?\} *\n")
_MOST_HEADER = 4096
# What zipfile and zlib raise for files that they cannot read.
_FAULTS = (zipfile.BadZipFile, zlib.error, struct.error, ValueError, KeyError, EOFError, OSError, RuntimeError,
           TypeError, OverflowError)

Array = np.ndarray[Any, np.dtype[Any]]


class BadNpz(Exception):
    """A file is not an `.npz` as sd-scripts writes them; the text says why, for people."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ArrayHeader:
    """The facts in an array's header."""

    dtype: np.dtype[Any]
    fortran: bool
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its numbers."""
        return math.prod(self.shape) * self.dtype.itemsize


class Npz:
    """The arrays in the bytes of a file, by name."""

    def __init__(self, data: bytes) -> None:
        """Raises `BadNpz`."""
        if len(data) > MOST_BYTES:
            raise BadNpz(f"has {len(data)} bytes, expected at most {MOST_BYTES}")
        _check_end(data)
        with _as_bad("is not a zip of arrays"):
            self._zip = zipfile.ZipFile(io.BytesIO(data))
        names = [info.filename for info in self._zip.infolist()]
        if len(names) > MOST_ARRAYS or len(set(names)) != len(names):
            raise BadNpz(f"has {len(names)} members, expected at most {MOST_ARRAYS}, each name once")
        if {info.compress_type for info in self._zip.infolist()} - {zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED}:
            raise BadNpz("is compressed in a way that NumPy does not write")
        self.names = tuple(name.removesuffix(".npy") for name in names if name.endswith(".npy"))

    def header(self, name: str) -> ArrayHeader:
        """The header of an array. Raises `BadNpz`."""
        with self._opened(name) as stream:
            return _header(stream, name)

    def read(self, name: str) -> Array:
        """The array. Raises `BadNpz` unless it is there, whole, and as its checksum says."""
        with self._opened(name) as stream:
            header = _header(stream, name)
            data = stream.read(header.nbytes)
            if len(data) != header.nbytes or stream.read(1):  # at the end, zipfile compares the checksum
                raise BadNpz(f"has other bytes in '{printable(name)}' than its header says")
        return np.frombuffer(data, header.dtype).reshape(header.shape, order="F" if header.fortran else "C")

    @contextmanager
    def _opened(self, name: str) -> Iterator[IO[bytes]]:
        if name not in self.names:
            raise BadNpz(f"has no array '{name}'")
        with _as_bad(f"has '{printable(name)}' damaged"), self._zip.open(f"{name}.npy") as stream:
            yield stream


def _check_end(data: bytes) -> None:
    """Bounds the list of members before zipfile makes an object of each: it reads the list that this record states.

    NumPy writes no comment after the record, and no second record for lists above 4 GB.
    """
    end = data[-_END_BYTES:]
    if len(end) < _END_BYTES or end[:4] != _END or end[-2:] != b"\0\0":
        raise BadNpz("is not a zip of arrays, or is cut off")
    size = int.from_bytes(end[12:16], "little")
    if size > MOST_DIRECTORY or data[-_END_BYTES - 20:-_END_BYTES - 16] == _FURTHER_END:
        raise BadNpz(f"has a list of members of {size} bytes, expected at most {MOST_DIRECTORY}")


@contextmanager
def _as_bad(what: str) -> Iterator[None]:
    try:
        yield
    except _FAULTS as error:
        raise BadNpz(f"{what}: {printable(str(error))[:200] or type(error).__name__}") from None


def _header(stream: IO[bytes], name: str) -> ArrayHeader:
    start = stream.read(8)
    if start[:6] != _MAGIC or len(start) != 8 or start[6] not in (1, 2, 3):
        raise BadNpz(f"has '{printable(name)}', which is not an array")
    width = 2 if start[6] == 1 else 4
    length = int.from_bytes(stream.read(width), "little")
    match = _HEADER.fullmatch(stream.read(min(length, _MOST_HEADER)).decode("latin-1"))
    if match is None:
        raise BadNpz(f"has '{printable(name)}', which is not an array of numbers")
    shape = tuple(int(side) for side in match[3].split(",") if side.strip())
    header = ArrayHeader(dtype=np.dtype(match[1]), fortran=match[2] == "True", shape=shape)
    if header.nbytes > MOST_ARRAY_BYTES:
        raise BadNpz(f"has '{printable(name)}' of {header.nbytes} bytes, expected at most {MOST_ARRAY_BYTES}")
    return header
