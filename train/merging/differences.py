"""How much two models differ in what a LoRA does not hold: other layers, norms, biases, text encoders, VAE."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import sqrt

from torch import Tensor

from prep.formatting import counted
from prep.models.checkpoints.stored import Stored
from train.models.targets import Shapes, layers_of

_PIECE = 1 << 24  # numbers that are compared at a time in float32


@dataclass(slots=True)
class _Sum:
    """The differences of several tensors."""

    count: int = 0
    change: float = 0.0  # sums of squares
    size: float = 0.0
    most: tuple[float, str] = (0.0, "")  # relative size and name

    def add(self, name: str, change: float, size: float) -> None:
        """Counts a tensor."""
        self.size += size
        if change:
            self.count, self.change = self.count + 1, self.change + change
            self.most = max(self.most, (sqrt(change / size) if size else 1.0, name))


def beside(base: Stored, tuned: Stored, shapes: Shapes, *, component: str = "") -> Iterator[str]:
    """A note for each kind of tensors with these `shapes` that differ: how many, and by which part of their size, as
    Frobenius norms. `component`: what has them, if not the denoiser. Raises `ModelError`."""
    layers, sums = {f"{name}.weight" for name in layers_of(shapes)}, dict[str, _Sum]()
    for name in shapes:
        kind = "tensor" if component else "bias" if name.endswith(".bias") else (
            "other layer" if name in layers else "norm or other tensor")
        sums.setdefault(kind, _Sum()).add(name, *_squares(base.read(name), tuned.read(name)))
    plural = {"bias": "biases", "norm or other tensor": "norms and other tensors"}
    for kind, found in sums.items():
        if found.count:
            of = f" of the {component}" if component else ""
            differ = "differs" if found.count == 1 else "differ"
            yield (f"{counted(found.count, kind, plural.get(kind, ''))}{of} {differ} by "
                   f"{sqrt(found.change / found.size) if found.size else 1.0:.2%} of their size, which the LoRA does "
                   f"not hold; most '{found.most[1]}', by {found.most[0]:.2%}")


def rounding(base: Stored, tuned: Stored, names: Collection[str]) -> Iterator[str]:
    """A note if the models are of different dtypes: their rounding is in the difference."""
    one, other = (sorted({stored.tensors[name].dtype for name in names}) for stored in (base, tuned))
    if one != other:
        yield (f"the base has its weights in {', '.join(one)}, the other model in {', '.join(other)}: rounding is a "
               "part of the difference")


def _squares(before: Tensor, after: Tensor) -> tuple[float, float]:
    """The sums of squares of the difference, and of the first tensor."""
    change = size = 0.0
    pieces = (value.reshape(-1).split(_PIECE) for value in (before, after))  # type: ignore[no-untyped-call]
    for one, other in zip(*pieces, strict=True):
        size += float(one.float().square().sum())
        change += float((other.float() - one.float()).square().sum())
    return change, size
