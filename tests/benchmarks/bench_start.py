"""`prep --help` and `train --help` as whole processes. Target: 0.3 s or less."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

from results import emit, parser_of, table

ROUNDS = 15


def main() -> None:
    """Prints a line for each command."""
    options = parser_of(__doc__).parse_args()
    rows = []
    for command in ("prep", "train"):
        times = []
        for _ in range(ROUNDS):
            begun = time.monotonic()
            subprocess.run([sys.executable, "-c", f"from {command}.cli import main; main()", "--help"],
                           capture_output=True, check=True)
            times.append(time.monotonic() - begun)
        rows.append((f"{command} --help", f"{statistics.median(times):.3f}", f"{min(times):.3f}", f"{max(times):.3f}"))
    emit("--help, whole processes", table(("seconds", "median", "lowest", "highest"), rows), options.write)


if __name__ == "__main__":
    main()
