"""How much memory a device has: the one that is there, or one that is only named."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from prep.loader.device import compute_dtype
from prep.models.device.host import available
from prep.models.device.offload import SHARED
from prep.models.tensors import checked_device
from prep.runtime import memory_limit, resident

CONTEXT = 512 << 20  # bytes that CUDA and its libraries take of a GPU: 0.3 to 0.6 GiB by GPU and version


@dataclass(frozen=True, kw_only=True, slots=True)
class Room:
    """The memory of a device."""

    device: torch.device | None  # None: a GPU that is only named, which has bfloat16
    name: str  # as people call the device
    total: int | None  # bytes; None: the system does not say
    free: int | None  # bytes that nothing but this process takes now
    libraries: int  # bytes that torch and its libraries take, beside tensors

    @property
    def kind(self) -> str:
        """cpu, cuda, mps or xpu."""
        return "cuda" if self.device is None else self.device.type

    @property
    def has_own_memory(self) -> bool:
        """Whether its memory is not the computer's."""
        return self.kind not in SHARED

    def dtype(self, precision: str) -> torch.dtype:
        """The dtype of forward passes there."""
        if self.device is None:
            return compute_dtype("bf16" if precision == "auto" else precision, torch.device("cuda"))
        return compute_dtype(precision, self.device)


def room_of(device: str, named: int | None = None) -> Room:
    """The memory of the device that `--device` names; with `named`, of one that has so many bytes: a GPU, unless the
    CPU is named. Raises `UsageError` for a device that is not there."""
    found = checked_device(device)
    if named is not None:
        there = device == "cpu" or found.type not in ("cpu", "cuda")
        return Room(device=found if there else None, name=f"a {'CPU' if device == 'cpu' else 'GPU'}", total=named,
                    free=named, libraries=_libraries(device))
    if found.type == "cuda":
        free, total = torch.cuda.mem_get_info(found)
        return Room(device=found, name=str(found), total=total, free=min(total, free + CONTEXT), libraries=CONTEXT)
    if found.type == "cpu":
        left, libraries = available(), _libraries("cpu")
        return Room(device=found, name="this computer", total=memory_limit(), libraries=libraries,
                    free=None if left is None else left + libraries)  # this process has them already
    return Room(device=found, name=str(found), total=None, free=None, libraries=CONTEXT)


def _libraries(kind: str) -> int:
    """Those of a run have what this process has: it imports the same, and has no weights."""
    return resident() or CONTEXT if kind == "cpu" else CONTEXT
