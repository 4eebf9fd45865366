"""Writes safetensors files: a length in 8 bytes, a JSON header, then the bytes of each tensor in turn.

The safetensors library's own writer is not used. It needs every tensor in host memory at once, orders metadata
differently from run to run, creates files that only their owner may read, and hides a full disk in its own error type.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from prep.arrays import safetensors_header
from prep.fs import atomic
from prep.loader.device import to_host

_NAMES: Mapping[torch.dtype, str] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16",
                                       torch.float64: "F64", torch.int64: "I64", torch.uint8: "U8"}


def write_safetensors(handle: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str],
                      fetch: Callable[[Tensor], Tensor] = to_host) -> str:
    """Writes the file and returns its SHA-256; the same values in the same order give the same bytes.

    Tensors on the meta device are fetched one after another, so that only one has to be in memory.
    """
    running = hashlib.sha256()

    def put(data: Any) -> None:
        running.update(data)
        atomic.write(handle, data)

    put(safetensors_header({name: (_NAMES[value.dtype], value.shape, value.numel() * value.element_size())
                            for name, value in tensors.items()}, metadata))
    for value in tensors.values():
        put(_bytes(fetch(value) if value.is_meta else value))
    return running.hexdigest()


def data_digest(tensors: Mapping[str, Tensor]) -> str:
    """The SHA-256 of the bytes that follow a file's header, which web UIs know a LoRA by."""
    running = hashlib.sha256()
    for value in tensors.values():
        running.update(_bytes(value))
    return running.hexdigest()


def _bytes(value: Tensor) -> Any:
    return to_host(value).contiguous().reshape(-1).view(torch.uint8).numpy()
