"""Describes the arrays of a field: name, dtype and the shape of a row; and spells the headers of safetensors files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
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
_ALIGNED = 8  # the header is padded with spaces to a multiple of this, which aligns the tensors


def safetensors_header(tensors: Mapping[str, tuple[str, Sequence[int], int]], metadata: Mapping[str, str]) -> bytes:
    """What a safetensors file begins with: the header's length, and the header with tensors in this order.

    A tensor is (dtype as safetensors names it, shape, bytes). The same values give the same bytes.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, (dtype, shape, size) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    spelled = json.dumps(header, separators=(",", ":")).encode()
    spelled = spelled.ljust(-(-len(spelled) // _ALIGNED) * _ALIGNED)
    return len(spelled).to_bytes(8, "little") + spelled
