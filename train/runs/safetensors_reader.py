"""Reads safetensors files of a checkpoint: checks the header before allocating, computes the digest while reading.

The safetensors library's own reader is not used. It maps the file, so a file that is truncated meanwhile would kill the
process with a signal; and it would read the file a second time after its digest was computed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from prep.parse import Unparsed
from train.runs.documents import open_plain
from train.runs.safetensors_header import TensorInfo, read_header

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_KEPT = {**DTYPES, "F64": torch.float64, "I64": torch.int64, "U8": torch.uint8}  # also by optimizers
Wanted = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


def read_safetensors(path: Path, wanted: Wanted | None, digest: str | None) -> dict[str, Tensor]:
    """The tensors of the file at `path`, on the CPU; they must be exactly those in `wanted` (None: any).

    `digest`: the expected SHA-256 of the file, if any. Raises `Unparsed`, `OSError`.
    """
    with open_plain(path) as handle:
        hashed = _Hashed(handle)
        header = read_header(hashed, os.fstat(handle.fileno()).st_size)  # type: ignore[arg-type]  # only `read` is used
        if wanted is not None:
            _compare(header, wanted)
        known = DTYPES if wanted is None else _KEPT
        found = {name: _read(hashed, info, known) for name, info in header.items()}
    if digest is not None and hashed.hexdigest() != digest:
        raise Unparsed("its bytes do not match their digest")
    return {name: found[name] for name in wanted or found}


def names_of(path: Path) -> set[str]:
    """The names of the tensors in the file at `path`. Raises `Unparsed`, `OSError`."""
    with open_plain(path) as handle:
        return set(read_header(handle, os.fstat(handle.fileno()).st_size))


class _Hashed:
    """A file that hashes the bytes read from it."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle, self._running = handle, hashlib.sha256()
        self.hexdigest = self._running.hexdigest

    def read(self, size: int) -> bytes:
        data = self._handle.read(size) or b""
        self._running.update(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        count = self._handle.readinto(buffer) or 0  # type: ignore[attr-defined]
        self._running.update(buffer[:count])
        return int(count)


def _compare(header: Mapping[str, TensorInfo], wanted: Wanted) -> None:
    """Raises `Unparsed` unless names, dtypes and shapes are as in `wanted`."""
    for name, (dtype, shape) in wanted.items():
        if name not in header:
            raise Unparsed(f"'{name}' is missing, expected shape {list(shape)}")
        info = header[name]
        if info.shape != shape or _KEPT.get(info.dtype) != dtype:
            spelled = str(dtype).removeprefix("torch.")
            raise Unparsed(f"'{name}' has shape {list(info.shape)} {info.dtype}, expected {list(shape)} {spelled}")
    for name in header:
        if name not in wanted:
            raise Unparsed(f"'{name[:80]}' is not a tensor of this run")


def _read(hashed: _Hashed, info: TensorInfo, known: Mapping[str, torch.dtype] = DTYPES) -> Tensor:
    value = torch.empty(info.shape, dtype=known[info.dtype])
    bytes_: Any = value.reshape(-1).view(torch.uint8).numpy()
    left = memoryview(bytes_)
    while left:
        count = hashed.readinto(left)
        if not count:
            raise Unparsed(f"it ends {len(left)} bytes early")
        left = left[count:]
    return value
