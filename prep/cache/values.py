"""The bytes of a row as numbers."""

from __future__ import annotations

from typing import Any

import numpy as np

from prep.arrays import ArraySpec

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
