"""Settles how glibc keeps the memory that a model on the CPU frees.

By default glibc maps each block of more than some MiB afresh and returns it at once, so that activations are paged in
and cleared again and again, and keeps smaller ones in a heap. That has holes, since version 2.36 does not fill them:
aligned blocks take a little more than they leave. How many differs from run to run: the VAE of SD1.5 takes up to 1.5
times what its tensors do, and a step of a LoRA 0.75 GiB more.

In huge pages, 2 MiB instead of 4 KiB, memory is paged in for half of the time, so each block has its own mapping, and
there are no holes. Without them, the heap is kept for the next forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from prep.runtime import glibc, return_heap

# From <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_MAPS = (_MMAP_MAX, 1 << 16)
_KEEP = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, (1 << 31) - 1))
APART = 3 << 19  # more than what is needed for a moment while weights are quantized
_APART = (_MAPS, (_MMAP_THRESHOLD, APART), (_TRIM_THRESHOLD, 1 << 26))
# glibc's own, as it adjusts them to large blocks; what was set cannot be asked for.
_USUAL = (_MAPS, (_MMAP_THRESHOLD, 1 << 25), (_TRIM_THRESHOLD, 1 << 26))
_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_settled: list[tuple[tuple[int, int], ...]] = [_USUAL]  # by contexts within one another


def has_huge_pages(file: Path = _HUGE_PAGES) -> bool:
    """Whether torch asks for huge pages (`prep.runtime.ask_for_huge_pages`), and the system gives them."""
    try:
        given = "[never]" not in file.read_text(encoding="ascii")
    except OSError:
        return False
    blocks = [torch.empty((1 << 22) + 64 * more, dtype=torch.uint8) for more in range(4)]  # one may be so by chance
    return given and all(block.data_ptr() % 4096 == 0 for block in blocks)  # torch then aligns blocks to pages


@contextmanager
def settled_heap(device: torch.device) -> Iterator[bool]:
    """Within the context, passes on `device`, if that is the CPU, page in little memory again: blocks lie apart in huge
    pages, or else freed memory stays with this process. Yields whether one of both is so.

    At the end, it goes back to the system. Without glibc, nothing happens.
    """
    with _settled_as(_APART if device.type == "cpu" and has_huge_pages() else _KEEP, device) as done:
        yield done


@contextmanager
def blocks_apart() -> Iterator[None]:
    """Within the context, each block of `APART` bytes or more goes back to the system as soon as it is freed.

    Weights that are read, changed and freed leave holes otherwise: the denoiser of SD1.5 in 4 bits, 1.35 GB, took
    1.86 GB instead of 1.56.
    """
    with _settled_as(_APART, torch.device("cpu")):
        yield


@contextmanager
def _settled_as(values: tuple[tuple[int, int], ...], device: torch.device) -> Iterator[bool]:
    mallopt = glibc("mallopt") if device.type == "cpu" else None
    if mallopt is None:
        yield False
        return
    _settled.append(values)
    try:
        answers = [mallopt(name, value) for name, value in values]
        yield all(answers)
    finally:
        _settled.remove(values)
        for name, value in _settled[-1]:
            mallopt(name, value)
        if len(_settled) == 1:
            return_heap()


def keeps_heap() -> bool:
    """Whether `settled_heap` works on this system."""
    return glibc("mallopt") is not None
