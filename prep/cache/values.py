"""The bytes of a row as numbers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from prep.arrays import ArraySpec, DType
from prep.cache.reader import Reader
from prep.errors import CacheError

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Values = np.ndarray[Any, np.dtype[Any]]


def values_of(spec: ArraySpec, data: Bytes) -> Values:
    """The array of a row, or of rows [B, row_bytes], in its shape: uint8 as it is, floats as float32, which holds each
    of them exactly."""
    shape = (*data.shape[:-1], *spec.shape)
    if spec.dtype == "uint8":
        return data.reshape(shape)
    if spec.dtype == "bfloat16":  # the upper half of a float32
        return (data.view("<u2").astype("<u4") << 16).view("<f4").reshape(shape)
    return data.view({"float16": "<f2", "float32": "<f4"}[spec.dtype]).astype(np.float32).reshape(shape)


def stored_values(values: Values, dtype: DType) -> Values | None:
    """Float32 numbers as rows store them, bfloat16 as uint16 of its bits, rounded to the nearest, ties to even; `None`
    unless all of them are finite so."""
    if not np.isfinite(values).all():
        return None
    if dtype != "bfloat16":
        with np.errstate(over="ignore"):
            halves = values.astype("<f2" if dtype == "float16" else "<f4")
        return halves if np.isfinite(halves).all() else None
    bits = values.astype("<f4").view("<u4")
    upper = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")
    return None if ((upper & 0x7F80) == 0x7F80).any() else upper


def read_values(reader: Reader, place: Mapping[str, Any] | None, array: str) -> Values | None:
    """The array of the row at `place`, a shard and a row as samples are described with; `None` if it has none, or if it
    cannot be read (`prep verify` says why). Of a shard in a store that has no copy here, just the row is read."""
    if place is None:
        return None
    try:
        if not reader.fetcher.touch(place["shard"]):
            spec, data = reader.fetcher.row(place["shard"], array, place["row"])
            return values_of(spec, np.frombuffer(data, np.uint8))
        spec, _ = reader.array_info(place["shard"], array)
        row = np.empty(spec.row_bytes, np.uint8)
        reader.read_into(row, place["shard"], array, place["row"])
    except CacheError:
        return None
    return values_of(spec, row)
