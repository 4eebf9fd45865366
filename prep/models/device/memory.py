"""Fits batches into the memory of a device: a batch that does not fit is halved, and so are all that follow."""

from __future__ import annotations

import errno
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import torch

from prep.errors import OutOfMemoryError
from prep.models.tensors import pick_device
from prep.runtime import killable, peak_resident, return_heap

Row = TypeVar("Row")
Items = TypeVar("Items", bound="Sliced")

# Messages of PyTorch's allocators: those for CPU and MPS raise a plain RuntimeError.
_MESSAGES = ("out of memory", "can't allocate memory", "not enough memory", "cannot allocate memory")


class Sliced(Protocol):
    """A list or an array."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Any: ...


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, in device or host memory."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    allocates = isinstance(error, RuntimeError) or type(error).__name__ == "SafetensorError"  # which maps files
    return allocates and any(words in str(error).lower() for words in _MESSAGES)


class FittingBatches:
    """Runs a model on batches; remembers the largest size that the device's memory held."""

    def __init__(self, device: torch.device, compute: str, most: int | None = None) -> None:
        """`most` limits the items at a time, whatever the memory."""
        self.size = most  # items at a time; None: no batch was too large so far
        self.refused: int | None = None  # items of the first batch that was too large
        self.device, self._compute = device, compute

    def run(self, items: Items, forward: Callable[[Items], Sequence[Row]], one: str) -> list[Row]:
        """The rows of `forward` for all items. Raises `OutOfMemoryError` if not even `one` of them fits."""
        rows: list[Row] = []
        while len(rows) < len(items):
            part: Items = items[len(rows):len(items) if self.size is None else len(rows) + self.size]
            made = _tried(part, forward)
            if made is None:
                self._halve(len(part), one)
            else:
                rows += made
        return rows

    def parts(self, items: Items) -> list[Items]:
        """The batches that `run` would make of `items`, if none of them is too large."""
        size = self.size or len(items)
        return [items[start:start + size] for start in range(0, len(items), size)]

    def one(self, forward: Callable[[], Sequence[Row]], what: str) -> Row:
        """The only row of `forward`. Raises `OutOfMemoryError` if `what` does not fit."""
        return self.run([None], lambda _: forward(), what)[0]

    def _halve(self, tried: int, one: str) -> None:
        if tried == 1:
            raise too_little_memory(self.device, one, self._compute)
        self.refused, self.size = self.refused or tried, tried // 2
        free_memory(self.device)


def too_little_memory(device: torch.device, what: str, compute: str, *, offload: bool = False) -> OutOfMemoryError:
    """The error for a device that does not hold `what`; the hint names options of `prep encode`."""
    less = ["--compute bfloat16"] if compute == "float32" else []
    less += ["--encoder-memory with fewer GiB than the device has"] if offload and device.type != "cpu" else []
    less += ["a smaller --resolution"]
    less += ["--device cpu"] if device.type != "cpu" else ["a computer with more memory"]
    return OutOfMemoryError(f"{device} has too little memory for {what}",
                            hint=f"{', '.join(less[:-1])} or {less[-1]}; finished rows are kept")


def _tried(part: Items, forward: Callable[[Items], Sequence[Row]]) -> Sequence[Row] | None:
    """The rows of `part`, or `None` if they do not fit; the error, whose frames hold tensors, is gone by then."""
    try:
        with killable():
            return forward(part)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    return None


def move(model: Any, device: torch.device, what: str, compute: str, *, offload: bool = False) -> Any:
    """`model` on its device; `offload`: --encoder-memory applies to it. Raises `OutOfMemoryError`."""
    try:
        return model.to(device)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    raise too_little_memory(device, what, compute, offload=offload)


def peak_memory(name: str) -> int | None:
    """Bytes that this process has had at most, on the device `name` if that has memory of its own; `None`: unknown."""
    device = pick_device(name)
    if device.type == "cuda":
        return torch.cuda.max_memory_reserved(device)
    return peak_resident()


def free_memory(device: torch.device) -> None:
    """Returns what PyTorch keeps for later allocations to the device, or on a CPU what glibc keeps."""
    if device.type in ("cuda", "mps", "xpu"):
        getattr(torch, device.type).empty_cache()
    elif device.type == "cpu":
        return_heap()


@contextmanager
def memory_freed(device: torch.device) -> Iterator[None]:
    """At the end of the context, the device has the memory of what nobody uses any longer: also of pipelines, whose
    parts refer to one another."""
    try:
        yield
    finally:
        gc.collect()
        free_memory(device)
