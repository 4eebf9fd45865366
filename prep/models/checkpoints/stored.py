"""Reads tensors of safetensors files, weights of 8 bits times their scales, and writes such files one tensor at a time.

ComfyUI and others keep fp8 weights divided by a scale, so that the largest number of a layer (or of a row, or of 128
rows and columns) fits; the scale is a tensor beside the weight (`weights.scales_in`). Libraries that do not know of it
take the weight for one that is a thousand times too large. The product is computed in float32 and rounded once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from torch import Tensor

from prep.errors import ModelError
from prep.models.checkpoints.gguf import QUANTIZED
from prep.models.files import FETCH_AGAIN, WAIT, StoredTensor, open_regular, unreadable
from prep.models.weights import Scales, scales_in

DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool}
SPELLED = {dtype: name for name, dtype in DTYPES.items()}
PIECE = 1 << 15  # numbers that are cast at a time: a core's cache holds them, and torch divides only more among threads
UNPACKED = 1 << 22  # numbers of few bits that are unpacked at a time
BLOCK = 128  # rows and columns that share a scale, of scales with two dimensions


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The tensors of a component's files, or of a single file."""

    tensors: Mapping[str, StoredTensor]
    scales: Scales

    @classmethod
    def of(cls, tensors: Mapping[str, StoredTensor]) -> Stored:
        """These tensors, with the scales among them."""
        return cls(tensors=tensors, scales=scales_in(tensors))

    def size(self, name: str) -> int:
        """The bytes of the tensor `name`; of one whose dtype torch has not, the number of its numbers."""
        kind = DTYPES.get(self.tensors[name].dtype)
        return prod(self.tensors[name].shape) * (1 if kind is None else kind.itemsize)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name`; one with a scale, times that, and one of fewer bits as `dtype`. Raises `ModelError`."""
        if self.tensors[name].dtype in QUANTIZED:
            return _unpacked(self.tensors[name], dtype or torch.float32)
        found = _read(self.tensors[name])
        if name not in self.scales.of:
            return found
        beside = self.scales.of[name]
        for one in (name, beside):
            if not DTYPES[self.tensors[one].dtype].is_floating_point:
                raise ModelError(f"{self.tensors[one].path} has {one} as {self.tensors[one].dtype}, expected floats: "
                                 "weights with scales are read as fp8 only", hint=_OTHER)
        scale = _spread(_read(self.tensors[beside]).float(), found.shape)
        if scale is None:
            raise ModelError(f"{self.tensors[beside].path} has {beside} of shape {list(self.tensors[beside].shape)}, "
                             f"expected one for {list(found.shape)}: a number, one for each row, or one for each "
                             f"{BLOCK} rows and columns", hint=_OTHER)
        return (found.float() * scale).to(dtype or torch.float32)

    def cast(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor `name` as `dtype`, in memory of its own, times its scale if it has one. Raises `ModelError`.

        It is read into that memory, or cast in small pieces, so that there is no second one beside it.
        """
        if name in self.scales.of or self.tensors[name].dtype in QUANTIZED:
            return self.read(name, dtype)
        return _read(self.tensors[name], dtype)


_OTHER = "name weights in bfloat16, float16 or float32, or download the model again"


def _read(tensor: StoredTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The tensor as it is stored, or as `dtype`. Raises `ModelError`."""
    kind = DTYPES.get(tensor.dtype)
    if kind is None or tensor.end - tensor.begin != prod(tensor.shape) * kind.itemsize:
        raise ModelError(f"{tensor.path} has a tensor of {tensor.end - tensor.begin} bytes for {list(tensor.shape)} "
                         f"{tensor.dtype}, expected one of: {', '.join(DTYPES)}", hint=FETCH_AGAIN)
    made = torch.empty(tensor.shape, dtype=dtype or kind)
    try:
        with open_regular(tensor.path) as file:
            file.seek(tensor.begin)
            flat = made.view(-1)
            whole = _filled(file, _bytes(flat)) if made.dtype == kind else _cast(file, kind, flat)
    except OSError as error:
        raise unreadable(tensor.path, error) from None
    if not whole:
        raise ModelError(f"{tensor.path} changed while it was read", hint=WAIT)
    return made


def _bytes(numbers: Tensor) -> memoryview:
    """The bytes of flat numbers in memory, to be written to."""
    return numbers.view(torch.uint8).numpy().data


def _filled(file: BinaryIO, data: memoryview) -> bool:
    """Reads the next bytes of the file into `data`; whether there are as many."""
    return bool(file.readinto(data) == len(data))  # type: ignore[attr-defined]


def _cast(file: BinaryIO, kind: torch.dtype, made: Tensor) -> bool:
    """Reads the next numbers of the file, of this kind, into `made`, flat; whether there are as many.

    Floats of 16 bits become others by way of float32, which changes no value: for torch 2.13 on a CPU, these are two
    vector instructions, and take a third of the time.
    """
    given = torch.empty(min(PIECE, made.numel()), dtype=kind)
    data = _bytes(given)
    halves = {kind, made.dtype} <= {torch.float16, torch.bfloat16}
    floats = torch.empty(given.numel() if halves else 0)
    for part in made.split(PIECE):  # type: ignore[no-untyped-call]
        count = part.numel()
        if not _filled(file, data[: count * kind.itemsize]):
            return False
        part.copy_(floats[:count].copy_(given[:count]) if halves else given[:count])
    return True


def _unpacked(tensor: StoredTensor, dtype: torch.dtype) -> Tensor:
    """A tensor of a GGUF file as `dtype`: blocks of numbers of few bits with their scales, unpacked some at a time."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    numbers, size = QUANTIZED[tensor.dtype]
    made = torch.empty(tensor.shape, dtype=dtype)
    parts = made.view(-1).split(numbers * (UNPACKED // numbers))  # type: ignore[no-untyped-call]
    try:
        with open_regular(tensor.path) as file:
            file.seek(tensor.begin)
            for part in parts:
                wanted = len(part) // numbers * size
                data = file.read(wanted)
                if len(data) != wanted:
                    raise ModelError(f"{tensor.path} changed while it was read", hint=WAIT)
                blocks = np.frombuffer(data, np.uint8).reshape(-1, size)
                values = dequantize(blocks, GGMLQuantizationType[tensor.dtype])
                part.copy_(torch.from_numpy(values.reshape(-1)))
    except OSError as error:
        raise unreadable(tensor.path, error) from None
    return made


def _spread(scale: Tensor, shape: torch.Size) -> Tensor | None:
    """A scale as what a weight of `shape` can be multiplied by; `None` if it is none for it."""
    if scale.numel() == 1:
        return scale.reshape(())
    rows = shape[0] if shape else 0
    if scale.numel() == rows and scale.shape[0] == rows:
        return scale.reshape(rows, *[1] * (len(shape) - 1))
    if len(shape) == 2 and tuple(scale.shape) == tuple(-(-side // BLOCK) for side in shape):
        return scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[:shape[0], :shape[1]]
    return None


def write(path: Path, layout: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], tensors: Iterable[Tensor]) -> None:
    """Writes `tensors`, in the order of `layout`, which has the dtype and shape of each. Raises `OSError`."""
    at = 0
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    for name, (dtype, shape) in layout.items():
        end = at + prod(shape) * dtype.itemsize
        header[name] = {"dtype": SPELLED[dtype], "shape": list(shape), "data_offsets": [at, end]}
        at = end
    spelled = json.dumps(header).encode()
    spelled += b" " * (-len(spelled) % 8)
    with path.open("wb") as file:
        file.write(len(spelled).to_bytes(8, "little") + spelled)
        for (dtype, shape), tensor in zip(layout.values(), tensors, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (dtype, shape), path
            file.write(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
        assert file.tell() == 8 + len(spelled) + at, path
        file.flush()
        os.fsync(file.fileno())
