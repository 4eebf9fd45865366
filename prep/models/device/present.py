"""Says which devices torch can use, and what hides others from it."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device as `--device` names it."""

    name: str  # "cuda:0", "mps" or "cpu"
    model: str  # what the maker calls it; "" for the CPU
    memory: int | None = None  # bytes; None: the computer's
    bfloat16: bool = True  # computed by the device itself


def devices() -> list[Device]:
    """What torch can compute on, the CPU last."""
    found = [_gpu(number) for number in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if torch.backends.mps.is_available():
        found.append(Device(name="mps", model="Apple GPU"))
    return [*found, Device(name="cpu", model="")]


def _gpu(number: int) -> Device:
    facts = torch.cuda.get_device_properties(number)
    return Device(name=f"cuda:{number}", model=facts.name, memory=facts.total_memory,
                  bfloat16=facts.major >= 8 or torch.version.hip is not None)  # NVIDIA's since Ampere


def hidden_gpu() -> str:
    """Why torch sees no GPU although the computer has a driver for one; "" if there is no sign of one."""
    if torch.cuda.is_available() or shutil.which("nvidia-smi") is None:
        return ""
    if torch.version.cuda is None:
        return f"nvidia-smi is installed, but torch {torch.__version__} is built without CUDA"
    return f"nvidia-smi is installed, but torch {torch.__version__}, built for CUDA {torch.version.cuda}, finds no GPU"
