"""How much memory the computer, or the control group of this process, has left. Linux says so; others do not."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

_ROOT = Path("/")


def available(root: Path = _ROOT) -> int | None:
    """Bytes that this process may still take: what is free, or used by files alone, and swap; the least of the computer
    and of each control group around the process (version 2). `None` if the system does not say. `root` is its root.
    """
    computer = _numbers(root / "proc/meminfo", ":")
    if "MemAvailable" not in computer:
        return None
    swap = computer.get("SwapFree", 0) << 10
    left = (computer["MemAvailable"] << 10) + swap
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return left
    inside = PurePosixPath(next((line[3:] for line in lines if line.startswith("0::")), "/"))
    for group in (inside, *inside.parents):
        folder = root / "sys/fs/cgroup" / group.relative_to("/")
        most, used = _number(folder / "memory.max"), _number(folder / "memory.current")
        if most is not None and used is not None:
            of_files = _numbers(folder / "memory.stat", "")
            cached = of_files.get("active_file", 0) + of_files.get("inactive_file", 0)
            allowed = _number(folder / "memory.swap.max")
            left = min(left, max(0, most - used + cached) + (swap if allowed is None else min(swap, allowed)))
    return left


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return None
    return int(text) if text.isdecimal() else None


def _numbers(path: Path, after: str) -> dict[str, int]:
    """The numbers in a file with a name, `after` which follows a number, on each line."""
    try:
        rows = [line.split() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError):
        return {}
    return {row[0].removesuffix(after): int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}
