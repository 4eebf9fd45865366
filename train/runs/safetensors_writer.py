"""Writing safetensors files: a length in 8 bytes, a header of JSON, then the tensors' bytes one after another.

Not by the library's own writer, which wants every tensor in host memory at once, keeps metadata in an order that
changes from run to run, makes files that only their owner may read, and hides a full disk in an error of its own.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, BinaryIO

import torch
from torch import Tensor

from prep.fs import atomic
from prep.loader.device import to_host

_NAMES: Mapping[torch.dtype, str] = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
_ALIGNED = 8  # the header is filled up with spaces to a multiple of this, so that tensors begin on one


def write_safetensors(handle: BinaryIO, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> str:
    """Writes the file and returns its SHA-256; the same values in the same order give the same bytes."""
    running = hashlib.sha256()

    def put(data: Any) -> None:
        running.update(data)
        atomic.write(handle, data)

    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name, value in tensors.items():
        end = at + value.numel() * value.element_size()
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [at, end]}
        at = end
    spelled = json.dumps(header, separators=(",", ":")).encode()
    spelled = spelled.ljust(-(-len(spelled) // _ALIGNED) * _ALIGNED)
    put(len(spelled).to_bytes(8, "little"))
    put(spelled)
    for value in tensors.values():
        put(to_host(value).contiguous().reshape(-1).view(torch.uint8).numpy())
    return running.hexdigest()
