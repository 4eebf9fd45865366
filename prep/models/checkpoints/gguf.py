"""Reads the headers of GGUF files, in which programs keep denoisers in 2 to 8 bits: names, types, shapes and places.

Format (ggml-org/ggml docs/gguf.md): magic, version, numbers of tensors and of key-value pairs, the pairs, an entry for
each tensor, then the data, each tensor aligned. Sizes are counted before anything is made of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import BinaryIO

from prep.errors import ModelError
from prep.models.files import FETCH_AGAIN, StoredTensor, open_regular, unreadable

SUFFIX = ".gguf"
MAGIC, VERSIONS = b"GGUF", (2, 3)
# By a type's number: its name, and how many numbers are in how many bytes (ggml/src/ggml.c, type_traits).
TYPES: Mapping[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4), 1: ("F16", 1, 2), 30: ("BF16", 1, 2), 2: ("Q4_0", 32, 18), 3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22), 7: ("Q5_1", 32, 24), 8: ("Q8_0", 32, 34), 10: ("Q2_K", 256, 84), 11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144), 13: ("Q5_K", 256, 176), 14: ("Q6_K", 256, 210), 20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136)}
QUANTIZED: Mapping[str, tuple[int, int]] = {name: (numbers, size) for name, numbers, size in TYPES.values()
                                            if numbers > 1}
_MOST_TENSORS, _MOST_PAIRS, _MOST_TEXT, _MOST_LIST = 1 << 16, 1 << 16, 1 << 24, 1 << 20
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
# ComfyUI-GGUF flattens tensors of other ranks than the format's, and writes down what they were.
_SHAPE = "comfy.gguf.orig_shape."


class _Damaged(Exception):
    """The header is none."""


def tensors_in(path: Path) -> dict[str, StoredTensor]:
    """Each tensor of the file, in the order of rows first as torch has them. Raises `ModelError`."""
    try:
        with open_regular(path) as file:
            size = file.seek(0, 2)
            file.seek(0)
            return dict(_tensors(path, _Reader(file), size))
    except OSError as error:
        raise unreadable(path, error) from None
    except (_Damaged, UnicodeDecodeError):
        raise ModelError(f"{path} has no GGUF header; it is damaged or has another format", hint=FETCH_AGAIN) from None


class _Reader:
    """Reads values of the format, little-endian."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    def bytes(self, count: int) -> bytes:
        """The next `count` bytes."""
        data = self._file.read(count)
        if len(data) != count:
            raise _Damaged
        return data

    def number(self, code: str) -> int:
        """The next number."""
        (found,) = struct.unpack(f"<{code}", self.bytes(struct.calcsize(f"<{code}")))
        return int(found) if code != "f" and code != "d" else 0

    def count(self, most: int) -> int:
        """The next length, which is at most `most`."""
        found = self.number("Q")
        if found > most:
            raise _Damaged
        return found

    def text(self) -> str:
        """The next string."""
        return self.bytes(self.count(_MOST_TEXT)).decode()

    def value(self, kind: int) -> int | str | tuple[int, ...]:
        """The next value; of lists, only those of numbers are kept."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self._numbers(kind, 1)[0]
        inner, count = self.number("I"), self.count(_MOST_LIST)
        if inner != _TEXT:
            return self._numbers(inner, count)
        for _ in range(count):
            self.text()
        return ()

    def _numbers(self, kind: int, count: int) -> tuple[int, ...]:
        code = _NUMBERS.get(kind)
        if code is None:
            raise _Damaged
        data = self.bytes(struct.calcsize(f"<{code}") * count)
        return tuple(int(one) if code not in "fd" else 0 for one in struct.unpack(f"<{count}{code}", data))

    def place(self) -> int:
        """How many bytes were read."""
        return self._file.tell()


def _tensors(path: Path, reader: _Reader, size: int) -> Iterator[tuple[str, StoredTensor]]:
    if reader.bytes(4) != MAGIC or reader.number("I") not in VERSIONS:
        raise _Damaged
    count, pairs, values = reader.count(_MOST_TENSORS), reader.count(_MOST_PAIRS), {}
    for _ in range(pairs):
        name = reader.text()
        values[name] = reader.value(reader.number("I"))
    entries = [_entry(reader) for _ in range(count)]
    if len({name for name, *_ in entries}) != count:
        raise _Damaged
    alignment = values.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 16:
        raise _Damaged
    start = -(-reader.place() // alignment) * alignment
    for name, sides, kind, offset in entries:
        if kind not in TYPES:
            raise ModelError(f"{path} has '{name[:80]}' of the type {kind}, expected one of: "
                             f"{', '.join(one for one, _, _ in TYPES.values())}", hint="name a file in Q8_0 or Q4_K")
        spelled, numbers, each = TYPES[kind]
        if sides and sides[-1] % numbers:
            raise _Damaged
        whole = prod(sides) // numbers * each
        shape = values.get(_SHAPE + name, sides)
        if not isinstance(shape, tuple) or any(side < 0 for side in shape) or prod(shape) != prod(sides):
            raise _Damaged
        if start + offset + whole > size:
            raise ModelError(f"{path} has {size} bytes, expected {start + offset + whole} as its header says",
                             hint=FETCH_AGAIN)
        yield name, StoredTensor(path=path, dtype=spelled, shape=shape, begin=start + offset,
                                 end=start + offset + whole)


def _entry(reader: _Reader) -> tuple[str, tuple[int, ...], int, int]:
    """A tensor's name, sides, type and place; sides are stored fastest first."""
    name, rank = reader.text(), reader.number("I")
    if rank > 4:
        raise _Damaged
    sides = tuple(reader.count(1 << 40) for _ in range(rank))
    return name, sides[::-1], reader.number("I"), reader.count(1 << 50)
