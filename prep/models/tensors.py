"""Converts tensors to stored rows, checks that they stay finite, and picks the device."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prep.errors import UsageError
from prep.parse import brief

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def finite_rows(rows: torch.Tensor, dtype: str) -> list[bool]:
    """For each row of a float32 [B, ...] tensor: whether all of it is finite when stored as `dtype`."""
    kept: list[bool] = torch.isfinite(rows.to(DTYPES[dtype])).flatten(1).all(1).tolist()
    return kept


def stored(rows: torch.Tensor, dtype: str) -> list[np.ndarray[Any, Any]]:
    """The rows of a [B, ...] tensor as numpy arrays in `dtype`; bfloat16 as uint16 of the same bits."""
    cast = rows.to(DTYPES[dtype]).contiguous()
    return list((cast.view(torch.uint16) if dtype == "bfloat16" else cast).numpy())


def pick_device(name: str | None) -> torch.device:
    """The device called `name`; `auto` or `None` is the first accelerator, or the CPU. Raises `UsageError`.

    A numbered CUDA device also becomes the current device, for library calls that name none.
    """
    device = checked_device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


def share_cpu(processes: int) -> None:
    """Leaves torch in this process its share of the processors, if so many processes compute on the CPU."""
    torch.set_num_threads(max(1, torch.get_num_threads() // processes))


def device_names(text: str) -> tuple[str, ...]:
    """The devices in `text`: names separated by commas, or `all` for each GPU. Raises `UsageError`."""
    if text == "all":
        count = torch.cuda.device_count()
        if not count:
            raise UsageError("--device is 'all', which is every CUDA GPU, but torch finds none",
                             hint="omit --device to use the best device available")
        return tuple(f"cuda:{number}" for number in range(count))
    return tuple(str(checked_device(name)) for name in text.split(","))


def checked_device(name: str | None) -> torch.device:
    """The device called `name`, which this machine has. Raises `UsageError`."""
    there = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available()),
             "xpu": torch.xpu.device_count()}
    if name is None or name == "auto":
        return torch.device(next((kind for kind in ("cuda", "mps", "xpu") if there[kind]), "cpu"))
    had = ", ".join(f"{kind}:{number}" if kind != "cpu" else kind for kind, count in there.items()
                    for number in range(count))
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device is {brief(name)}, expected auto, cpu, cuda, cuda:N or mps: torch finds {had}",
                         hint=_meant(name) or "omit --device to use the best device available") from None
    if (device.index or 0) >= there.get(device.type, 0):
        built = device.type != "cuda" or torch.version.cuda or torch.version.hip
        raise UsageError(f"--device is '{name}', but this machine has no such device: torch finds {had}",
                         hint="omit --device to use the best device available" if built else
                         "this build of torch has no CUDA; install the build for your GPU: see pytorch.org")
    return device


def _meant(name: str) -> str:
    """A hint for a word that people use for a GPU, or ""; torch calls AMD's cuda, too."""
    word, _, number = name.lower().partition(":")
    if word not in ("gpu", "cuda", "nvidia", "amd", "rocm"):
        return ""
    return f"a GPU of NVIDIA or AMD is --device {f'cuda:{number}' if number.isdecimal() else 'cuda'}"
