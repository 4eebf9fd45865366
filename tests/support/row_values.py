"""Rows of a cache as float32 or integers, by the project's own reader."""

from __future__ import annotations

import numpy as np
import torch

from prep.cache.reader import Reader


def read_row(reader: Reader, shard: str, array: str, row: int) -> np.ndarray:
    spec, _ = reader.array_info(shard, array)
    out = np.empty(spec.row_bytes, np.uint8)
    reader.read_into(out, shard, array, row)
    if spec.dtype == "bfloat16":
        return torch.from_numpy(out.view(np.int16).copy()).view(torch.bfloat16).float().numpy().reshape(spec.shape)
    return out.view(spec.dtype).reshape(spec.shape)
