"""Freed memory is kept for the next forward pass on a CPU, with glibc alone, and given back at the end."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest
import torch

from prep.models.device import allocator

CPU = torch.device("cpu")
FAULTS = """
import resource, sys, torch
from contextlib import nullcontext
from prep.models.device.allocator import kept_heap
with kept_heap(torch.device("cpu")) if sys.argv[1] == "kept" else nullcontext(False) as kept:
    assert kept == (sys.argv[1] == "kept")
    def work():
        return float(torch.empty(16 << 20, dtype=torch.float32).fill_(1)[7])  # 64 MiB
    for _ in range(8):
        work()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(8):
        work()
    print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")


def faults(how: str) -> tuple[int, int]:
    """(pages that eight blocks of 64 MiB, each freed before the next, took from the system, MiB held at the end)."""
    done = subprocess.run([sys.executable, "-c", FAULTS, how], capture_output=True, text=True, check=True)
    pages, held = map(int, done.stdout.split())
    return pages, held


@pytest.mark.slow
@glibc
def test_freed_memory_is_used_again_and_given_back_at_the_end():
    pages, held = faults("kept")
    plain, usual = faults("plain")
    assert pages * 8 < plain, "each block was paged in again"
    assert held < usual + 48, "a block was kept"


def test_other_devices_and_other_libraries_change_nothing(monkeypatch):
    monkeypatch.setattr(allocator, "_glibc", lambda name: pytest.fail("asked"))
    with allocator.kept_heap(torch.device("cuda")) as kept:
        assert not kept
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    with allocator.kept_heap(CPU) as kept:
        assert not kept
    monkeypatch.undo()
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda _: object())  # musl
    with allocator.kept_heap(CPU) as kept:
        assert not kept


@glibc
def test_the_usual_values_come_back_after_an_error(monkeypatch):
    said = []
    monkeypatch.setattr(allocator, "_glibc", lambda name: lambda *values: said.append((name, *values)) or 1)
    with pytest.raises(KeyError), allocator.kept_heap(CPU):
        raise KeyError
    assert said == [("mallopt", -4, 0), ("mallopt", -1, 2**31 - 1), ("mallopt", -4, 1 << 16), ("mallopt", -3, 1 << 25),
                    ("mallopt", -1, 1 << 26), ("malloc_trim", 0)]
