"""Describes the arrays of a field: name, dtype and the shape of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["bfloat16", "float16", "float32", "uint8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """One named array of a field, the same in every row of a shard."""

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
