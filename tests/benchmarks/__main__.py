"""`make bench`: every benchmark, one after another, each in a process of its own. Nothing here passes or fails."""

from __future__ import annotations

import platform
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
BENCHES = ("bench_read", "bench_encode", "bench_again", "bench_start")


def main() -> None:
    print(f"{platform.machine()}, {platform.system()} {platform.release()}, Python {platform.python_version()}")
    for name in BENCHES:
        print(f"\n== {name}: {doc(name)}", flush=True)
        subprocess.run([sys.executable, HERE / f"{name}.py"], check=True)


def doc(name: str) -> str:
    """The first line of a benchmark's docstring."""
    return (HERE / f"{name}.py").read_text().split("\n", 1)[0].strip('"')


if __name__ == "__main__":
    main()
