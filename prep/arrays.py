"""The nouns of Latentry as frozen records. Sizes are always (width, height); arrays are always [H, W].

`None` in a field means "has none", never "not known yet".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["bfloat16", "float16", "float32", "uint8"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ArraySpec:
    """One named array of a field, as every row of a shard has it."""

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
