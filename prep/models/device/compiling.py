"""Compiles encoders with torch.compile, for `prep encode --compile`; what cannot be compiled runs as it is."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from prep.errors import first_line
from prep.models.device.memory import free_memory, is_out_of_memory

BACKEND = "inductor"


class Compiler:
    """Compiles modules if that is `wanted`, each when it is first called; `notices` say which ones could not be.

    A batch or bucket of another size compiles once more, and then for most sizes; after eight times torch runs further
    sizes as they are. Rows differ from those without by rounding, as on another device, and have the same keys.
    """

    def __init__(self, *, wanted: bool = False) -> None:
        self.wanted = wanted
        self.notices: list[str] = []

    def apply(self, module: Any, what: str) -> None:
        """Makes `module` run compiled; `what` names it in a notice."""
        if self.wanted:
            module.forward = self._guarded(module.forward, what)

    def release(self, device: torch.device) -> None:
        """Frees what compiled modules that are gone have left behind: their code refers to their weights."""
        if self.wanted:
            torch.compiler.reset()
            gc.collect()
            free_memory(device)

    def _guarded(self, forward: Callable[..., Any], what: str) -> Callable[..., Any]:
        """`forward` compiled, until that fails."""
        compiled, failed = torch.compile(forward, backend=BACKEND), False

        def run(*args: Any, **options: Any) -> Any:
            nonlocal failed
            if not failed:
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")  # advice of the compiler to those who write models
                        return compiled(*args, **options)
                except Exception as error:  # of a backend, of a C compiler that is missing, of the model itself
                    if is_out_of_memory(error):
                        raise
                    failed, said = True, first_line(error)
                    made = forward(*args, **options)  # raises what has nothing to do with compiling
                    self.notices.append(f"warning: {what} cannot be compiled, so --compile does nothing for it: "
                                        f"{said[:200]}")
                    return made
            return forward(*args, **options)

        return run


def is_whole(module: nn.Module, device: torch.device) -> bool:
    """Whether all weights of a module lie on `device`; layers that are copied there one by one cannot be compiled."""
    return all(weight.device.type == device.type for weight in module.parameters())
