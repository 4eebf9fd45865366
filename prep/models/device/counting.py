"""Counts the memory of tensors while code runs, by what they are for."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

ACTIVATIONS = "activations"  # what is not said to be something else


class Counted(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Within it, the bytes of tensors that this thread makes are counted from when they are made to when they are
    freed; `peak` is by part what there was when it was most.

    A view counts once, with what it is a view of. What kernels allocate and free inside is not seen, and not what
    allocators keep for later.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live: Counter[str] = Counter()
        self.peak: Mapping[str, int] = {}
        self._most = self._now = 0
        self._part = ACTIVATIONS
        self._known: dict[int, _StorageRecord] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled within it, and what keeps a compiler out takes longer than all else here

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = self.call(func, args, kwargs or {})
        for value in tensors_in(made):
            self._see(value, self._part)
        return made

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the operation returns."""
        return func(*args, **kwargs)

    def add(self, part: str, tensors: Iterable[Tensor | None]) -> None:
        """Counts tensors as a part's, whether or not they were counted before."""
        for value in tensors:
            if value is not None:
                self._see(value, part, moved=True)

    @contextmanager
    def making(self, part: str) -> Iterator[None]:
        """Within it, new tensors are a part's."""
        before, self._part = self._part, part
        try:
            yield
        finally:
            self._part = before

    def reset_peak(self) -> None:
        """Forgets the peak so far, as `torch.cuda.reset_peak_memory_stats` does."""
        self._most, self.peak = self._now, dict(self.live)

    def _see(self, value: Tensor, part: str, *, moved: bool = False) -> None:
        storage = value.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        known = self._known.get(key)
        if known is None:
            self._known[key] = _StorageRecord(part, size, weakref.ref(storage, lambda _: self._free(key)))
            self._change(part, size)
        elif moved or size != known.size:  # a storage may be resized
            to = part if moved else known.part
            self._change(known.part, -known.size)
            self._change(to, size)
            known.part, known.size = to, size

    def _free(self, key: int) -> None:
        known = self._known.pop(key)
        self._change(known.part, -known.size)

    def _change(self, part: str, size: int) -> None:
        self.live[part] += size
        self._now += size
        self._look()

    def _look(self) -> None:
        if self._now > self._most:
            self._most, self.peak = self._now, dict(self.live)


def tensors_in(given: Any) -> Iterator[Tensor]:
    """The tensors among what operations are given or return. torch's own function for it takes five times as long."""
    if isinstance(given, Tensor):
        yield given
    elif isinstance(given, list | tuple):
        for each in given:
            yield from tensors_in(each)
    elif isinstance(given, dict):
        yield from tensors_in(list(given.values()))


class _StorageRecord:
    """A storage that lives: what it is for, its bytes, and what says when it is freed."""

    __slots__ = ("part", "reference", "size")

    def __init__(self, part: str, size: int, reference: weakref.ref[torch.UntypedStorage]) -> None:
        self.part, self.size, self.reference = part, size, reference
