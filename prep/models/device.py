"""Which device a name means here."""

from __future__ import annotations

import torch

from prep.errors import UsageError, first_line


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
