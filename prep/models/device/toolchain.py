"""Whether torch.compile finds what it compiles with. Importing this takes seconds: torch's compiler comes with it."""

from __future__ import annotations

import torch
from torch._inductor.cpp_builder import get_cpp_compiler
from torch._inductor.exc import GPUTooOldForTriton, TritonMissing
from torch.utils._triton import has_triton, triton_backend


def missing_compiler(device: torch.device) -> Exception | None:
    """What torch.compile would raise on a device of this kind before it compiles anything; `None` if it may begin.

    By torch's own search: on a CPU for a C++ compiler, on CUDA for Triton, which itself builds a module with a C
    compiler or has it from before.
    """
    try:
        if device.type == "cpu":
            get_cpp_compiler()
        elif device.type == "cuda":
            if has_triton():
                triton_backend()
            elif (facts := torch.cuda.get_device_properties(device)).major < 7:
                return GPUTooOldForTriton(facts, None)
            else:
                return TritonMissing(None)
    except (TypeError, AttributeError):  # a torch with another search: then its first step finds out
        return None
    except Exception as error:
        return error
    return None
