"""`prep --help` and `train --help` as whole processes. Target: 0.3 s or less."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

ROUNDS = 15


def main() -> None:
    for command in ("prep", "train"):
        times = []
        for _ in range(ROUNDS):
            begun = time.monotonic()
            subprocess.run([sys.executable, "-c", f"from {command}.cli import main; main()", "--help"],
                           capture_output=True, check=True)
            times.append(time.monotonic() - begun)
        print(f"{command} --help: median {statistics.median(times):.3f} s, from {min(times):.3f} to {max(times):.3f}")


if __name__ == "__main__":
    main()
