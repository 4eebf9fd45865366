"""GGUF files, by the library that its authors write them with; and headers byte by byte, for those that are damaged."""

from __future__ import annotations

import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

Weights = dict[str, torch.Tensor]


def write(path: Path, weights: Weights, kind: str = "Q8_0") -> Weights:
    """Writes `weights`, matrices whose rows are whole blocks as `kind`; what the file means, in float32."""
    import gguf
    from gguf.quants import dequantize, quantize

    wanted = gguf.GGMLQuantizationType[kind]
    writer, meant = gguf.GGUFWriter(path, "test"), Weights()
    for name, value in weights.items():
        values = value.float().numpy()
        if value.ndim == 2 and value.shape[1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0:
            packed = quantize(values, wanted)
            writer.add_tensor(name, packed, raw_dtype=wanted)
            meant[name] = torch.from_numpy(dequantize(packed, wanted).copy())
        elif value.ndim > 4:
            writer.add_tensor(name, values.reshape(-1))
            writer.add_array(f"comfy.gguf.orig_shape.{name}", [int(side) for side in value.shape])
            meant[name] = value.float()
        else:
            writer.add_tensor(name, np.ascontiguousarray(values))
            meant[name] = value.float()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def header(entries: Iterable[tuple[str, tuple[int, ...], int, int]], pairs: bytes = b"", count: int = 0,
           version: int = 3, tensors: int | None = None) -> bytes:
    """A header of entries of a name, sides, a type and a place; `pairs` are `count` pairs."""
    found = list(entries)
    made = b"GGUF" + struct.pack("<IQQ", version, len(found) if tensors is None else tensors, count) + pairs
    for name, sides, kind, place in found:
        made += text(name) + struct.pack(f"<I{len(sides)}QIQ", len(sides), *sides, kind, place)
    return made + b"\0" * (-len(made) % 32)
