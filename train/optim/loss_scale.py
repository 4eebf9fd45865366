"""Dynamic loss scaling for float16 (Micikevicius et al. 2018, section 3.2), with the constants of torch.amp.GradScaler.

Gradients of float16 below 6e-8 would be 0. So the loss is multiplied by a power of two, which a step whose gradients
overflow halves, and many steps in a row without one double. The power is kept in checkpoints: a resumed run goes on as
if it had never stopped. Torch's own class asks the device once more whether a step overflowed, which the norm tells.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FIRST, GROWS_AFTER = 2.0**16, 2000
LEAST, MOST = 1.0, 2.0**24  # below 1 a larger scale was not the cause; above, float32 sums of a batch lose nothing more
SHAPES: Mapping[str, tuple[torch.dtype, tuple[int, ...]]] = {"scale": (torch.float64, ()), "steps": (torch.int64, ())}


@dataclass(slots=True)
class LossScale:
    """The factor of the loss, and what moves it. Changes with `grow` and `halve` only."""

    value: float = FIRST
    steps: int = 0  # without an overflow, since it last changed

    def undo(self, gradients: Sequence[Tensor]) -> None:
        """Divides the gradients by the factor, in place: exactly, unless a number becomes too small."""
        torch._foreach_mul_(list(gradients), 1.0 / self.value)

    def overflowed(self, loss: float, norm: float) -> bool:
        """Whether a step with this loss and norm of the gradients shall be tried with a smaller factor."""
        return math.isfinite(loss) and not math.isfinite(norm) and self.value > LEAST

    def halve(self) -> None:
        """Halves the factor, after a step that overflowed."""
        self.value, self.steps = max(self.value / 2, LEAST), 0

    def grow(self) -> None:
        """Counts a step that did not overflow; after many in a row doubles the factor."""
        self.steps += 1
        if self.steps == GROWS_AFTER:
            self.value, self.steps = min(self.value * 2, MOST), 0

    def tensors(self) -> dict[str, Tensor]:
        """The state, as a checkpoint keeps it."""
        return {"scale": torch.tensor(self.value, dtype=torch.float64), "steps": torch.tensor(self.steps)}

    def put(self, values: Mapping[str, Tensor]) -> None:
        """Restores the state that `tensors` returned."""
        self.value, self.steps = values["scale"].item(), int(values["steps"].item())
