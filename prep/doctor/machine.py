"""Looks at what encoding and training run on: processors, memory, devices, and the limits of the system."""

from __future__ import annotations

import platform

from prep.doctor.check import Check
from prep.errors import first_line
from prep.formatting import counted, format_bytes
from prep.runtime import memory_limit, usable_cores

MEMORY = 8 << 30  # bytes: one SDXL checkpoint in half precision, and the rest of a computer
FILES = 1024  # open files: what most systems allow
CUDA = "pip install torch --index-url https://download.pytorch.org/whl/cu128, or the one for your driver"


def check_machine() -> list[Check]:
    """Checks Python, processors, memory and limits."""
    return [_system(), _memory(), *_open_files()]


def _system() -> Check:
    return Check(name="computer", state="ok", what=f"{platform.system()} {platform.machine()}, "
                 f"{counted(usable_cores(), 'processor')}, Python {platform.python_version()}")


def _memory() -> Check:
    limit = memory_limit()
    if limit is None:
        return Check(name="memory", state="note", what="this system does not say how much there is")
    what = f"{format_bytes(limit)} for this process"
    if limit < MEMORY:
        return Check(name="memory", state="warning", what=what,
                     hint="prep encode --dry-run says how much a model needs; --encoder-memory loads less at a time")
    return Check(name="memory", state="ok", what=what)


def _open_files() -> list[Check]:
    try:
        import resource  # here: only POSIX has it
    except ImportError:
        return []
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= soft < FILES:
        return [Check(name="open files", state="warning", what=f"{soft} at a time", hint=f"ulimit -n {FILES}")]
    return [Check(name="open files", state="ok", what="no limit" if soft < 0 else f"{soft} at a time")]


def check_devices() -> list[Check]:
    """Checks the devices of torch, and whether it keeps the memory that models free."""
    try:
        from prep.models.device.allocator import has_huge_pages, keeps_heap  # here: torch may be broken
        from prep.models.device.present import devices, hidden_gpu
    except (ImportError, OSError) as error:
        return [Check(name="torch", state="warning", what=f"it cannot be imported: {first_line(error)}",
                      hint="install it again: https://pytorch.org/get-started/locally")]
    checks: list[Check] = []
    for device in devices():
        if device.name == "cpu":
            checks.append(Check(name="cpu", state="ok", what="used with --device cpu" if checks else "the only device"))
            continue
        memory = "" if device.memory is None else f", {format_bytes(device.memory)}"
        slow = "" if device.bfloat16 else "; bfloat16 is emulated there: --compute float16 or float32 is faster"
        checks.append(Check(name=device.name, state="note" if slow else "ok", what=f"{device.model}{memory}{slow}"))
    if why := hidden_gpu():
        checks.append(Check(name="GPU", state="warning", what=why, hint=CUDA))
    if keeps_heap():
        checks.append(Check(name="allocator", state="ok", what="models on the CPU get memory in huge pages"
                            if has_huge_pages() else "glibc keeps what a VAE on the CPU frees"))
    else:
        checks.append(Check(name="allocator", state="note", what="without glibc, each picture that a VAE encodes on "
                            "the CPU takes new memory from the system: up to half of the time of a small VAE"))
    return checks
