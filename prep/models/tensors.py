"""Tensors to rows: the stored dtypes, and whether a row survives them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from prep.errors import UsageError, first_line

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def finite_rows(rows: torch.Tensor, dtype: str) -> list[bool]:
    """For each row of a float32 [B, ...] tensor: whether all of it is finite once stored as `dtype`."""
    kept: list[bool] = torch.isfinite(rows.to(DTYPES[dtype])).flatten(1).all(1).tolist()
    return kept


def stored(rows: torch.Tensor, dtype: str) -> list[np.ndarray[Any, Any]]:
    """The rows of a [B, ...] tensor as numpy arrays in `dtype`; bfloat16 as uint16 of the same bits."""
    cast = rows.to(DTYPES[dtype]).contiguous()
    return list((cast.view(torch.uint16) if dtype == "bfloat16" else cast).numpy())


def pick_device(name: str) -> torch.device:
    """The device called `name`; `auto` is the first accelerator, or the CPU. Raises `UsageError`."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"device '{name}' cannot be used: {first_line(error)}",
                         hint="--device auto, cpu, cuda, cuda:1 or mps") from None
    return device
