"""Freed memory is kept for the next forward pass on a CPU, with glibc alone, and given back at the end."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
import torch

from prep import runtime
from prep.encode.engines.ray import ONE_ARENA
from prep.models.device import allocator

CPU = torch.device("cpu")
FAULTS = """
import resource, sys, torch
from contextlib import nullcontext
from prep.models.device.allocator import settled_heap
from threading import Thread
with settled_heap(torch.device("cpu")) if sys.argv[1] == "kept" else nullcontext(False) as kept:
    assert kept == (sys.argv[1] == "kept")
    def work():
        return float(torch.empty(SIZE << 18, dtype=torch.float32).fill_(1)[7])  # MiB
    def look():
        for _ in range(8):
            work()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(8):
            work()
        print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    if sys.argv[2] == "thread":
        thread = Thread(target=look)
        thread.start()
        thread.join()
    else:
        look()
print(int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() >> 20)
"""

glibc = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's allocator")


def faults(how: str, where: str = "main", mib: int = 64, **environment: str) -> tuple[int, int]:
    """(pages that eight blocks of so many MiB, each freed before the next, took from the system, MiB held at the end).
    """
    done = subprocess.run([sys.executable, "-c", FAULTS.replace("SIZE", str(mib)), how, where], capture_output=True,
                          text=True, check=True, env={**os.environ, **environment})
    pages, held = map(int, done.stdout.split())
    return pages, held


@pytest.mark.slow
@glibc
def test_freed_memory_is_used_again_and_given_back_at_the_end():
    pages, held = faults("kept")
    plain, usual = faults("plain")
    assert pages * 8 < plain, "each block was paged in again"
    assert held < usual + 48, "a block was kept"


@pytest.mark.slow
@glibc
def test_a_thread_keeps_its_memory_in_the_one_arena_that_ray_s_workers_have():
    """In an arena of its own it does not, which is why they have one."""
    one, _ = faults("kept", "thread", 32, **ONE_ARENA["env_vars"])
    own, _ = faults("kept", "thread", 32)
    assert one * 8 < own


def test_other_devices_and_other_libraries_change_nothing(monkeypatch):
    monkeypatch.setattr(allocator, "glibc", lambda name: pytest.fail("asked"))
    with allocator.settled_heap(torch.device("cuda")) as kept:
        assert not kept
    monkeypatch.undo()
    monkeypatch.setattr(sys, "platform", "darwin")
    with allocator.settled_heap(CPU) as kept:
        assert not kept
    monkeypatch.undo()
    monkeypatch.setattr(runtime.ctypes, "CDLL", lambda _: object())  # musl
    with allocator.settled_heap(CPU) as kept:
        assert not kept


@pytest.mark.slow
def test_huge_pages_are_those_that_torch_asks_for_and_the_system_gives(tmp_path):
    file = tmp_path / "enabled"
    code = ("import sys; from pathlib import Path; from prep.runtime import ask_for_huge_pages as ask\n"
            "ask()\nfrom prep.models.device.allocator import has_huge_pages as has\nprint(has(Path(sys.argv[1])))")
    for text, given, wanted in (("always [madvise] never", "1", "True"), ("always madvise [never]", "1", "False"),
                                ("always [madvise] never", "0", "False")):
        file.write_text(text)
        done = subprocess.run([sys.executable, "-c", code, file], capture_output=True, text=True, check=True,
                              env={**os.environ, "THP_MEM_ALLOC_ENABLE": given})
        assert done.stdout.strip() == wanted, (text, given)
    assert not allocator.has_huge_pages(tmp_path / "none")


@glibc
def test_blocks_lie_apart_in_huge_pages_and_contexts_may_be_within_others(monkeypatch):
    said = []
    for module in (allocator, runtime):
        monkeypatch.setattr(module, "glibc", lambda name: lambda *values: said.append(values) or 1)
    monkeypatch.setattr(allocator, "has_huge_pages", lambda: True)
    apart = [(-4, 1 << 16), (-3, allocator.APART), (-1, 1 << 26)]
    with allocator.settled_heap(CPU):
        assert said == apart
        monkeypatch.setattr(allocator, "has_huge_pages", lambda: False)
        with allocator.settled_heap(CPU):
            assert said[3:] == [(-4, 0), (-1, 2**31 - 1)]
        assert said[5:] == apart
    assert said[8:] == [(-4, 1 << 16), (-3, 1 << 25), (-1, 1 << 26), (0,)]


@glibc
def test_the_usual_values_come_back_after_an_error(monkeypatch):
    said = []
    monkeypatch.setattr(allocator, "has_huge_pages", lambda: False)
    for module in (allocator, runtime):
        monkeypatch.setattr(module, "glibc", lambda name: lambda *values: said.append((name, *values)) or 1)
    with pytest.raises(KeyError), allocator.settled_heap(CPU):
        raise KeyError
    assert said == [("mallopt", -4, 0), ("mallopt", -1, 2**31 - 1), ("mallopt", -4, 1 << 16), ("mallopt", -3, 1 << 25),
                    ("mallopt", -1, 1 << 26), ("malloc_trim", 0)]
