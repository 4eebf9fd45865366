"""Makes glibc keep the memory that a model on the CPU frees, for its next forward pass.

By default glibc maps each large block afresh and returns it at once, so that every activation of a VAE is paged in and
cleared again: half of the CPU time of a small VAE at 512 pixels. The heap that is kept instead takes up to half as much
memory again.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

# From <malloc.h>.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _MMAP_MAX = -1, -3, -4
_KEEP = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, (1 << 31) - 1))
APART = 3 << 19  # more than what is needed for a moment while weights are quantized
_APART = ((_MMAP_THRESHOLD, APART), (_TRIM_THRESHOLD, 1 << 26))
# glibc's own, as it adjusts them to large blocks; what was set cannot be asked for.
_USUAL = ((_MMAP_MAX, 1 << 16), (_MMAP_THRESHOLD, 1 << 25), (_TRIM_THRESHOLD, 1 << 26))


@contextmanager
def kept_heap(device: torch.device) -> Iterator[bool]:
    """Within the context, freed memory stays with this process, if `device` is the CPU; yields whether it does.

    At the end, it goes back to the system. Without glibc, nothing happens.
    """
    mallopt = _glibc("mallopt") if device.type == "cpu" else None
    if mallopt is None:
        yield False
        return
    try:
        answers = [mallopt(name, value) for name, value in _KEEP]
        yield all(answers)
    finally:
        _as_usual(mallopt)


def _as_usual(mallopt: Callable[..., int]) -> None:
    """Sets glibc's own values, and returns what is free to the system."""
    for name, value in _USUAL:
        mallopt(name, value)
    return_heap()


def return_heap() -> None:
    """Returns freed memory that glibc keeps to the system."""
    if trim := _glibc("malloc_trim"):
        trim(0)


@contextmanager
def blocks_apart() -> Iterator[None]:
    """Within the context, each block of `APART` bytes or more goes back to the system as soon as it is freed.

    glibc raises that bound to 32 MiB as such blocks are freed. Weights that are read, changed and freed then leave
    holes, which version 2.36 does not fill: aligned blocks take a little more than they leave. The denoiser of SD1.5 in
    4 bits, 1.35 GB, then took 1.86 GB instead of 1.56.
    """
    mallopt = _glibc("mallopt")
    if mallopt is None:
        yield
        return
    try:
        for name, value in _APART:
            mallopt(name, value)
        yield
    finally:
        _as_usual(mallopt)


def keeps_heap() -> bool:
    """Whether `kept_heap` works on this system."""
    return _glibc("mallopt") is not None


def _glibc(name: str) -> Callable[..., int] | None:
    """A function of the C library, if that is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        library = ctypes.CDLL(None)
        return getattr(library, name) if hasattr(library, "gnu_get_libc_version") else None
    except OSError:
        return None
