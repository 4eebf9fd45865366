"""A second `prep encode` with nothing changed, 5,000 small pictures: seconds of work after start-up, and in all.

    python tests/benchmarks/bench_again.py [--pictures 5000] [--rounds 5]

Every run is a process of its own. Target: below 2 s of work.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from prep.demo.build import build_random


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", type=int, default=5000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        build_random(root / "model")
        write_pictures(root / "photos", options.pictures)
        time.sleep(2.1)  # younger stamps are not trusted
        encode(root)
        runs = [encode(root) for _ in range(options.rounds)]
    work, whole = ([run[place] for run in runs] for place in (0, 1))
    print(f"work after start-up: median {statistics.median(work):.2f} s, from {min(work):.2f} to {max(work):.2f}")
    print(f"whole process:       median {statistics.median(whole):.2f} s, from {min(whole):.2f} to {max(whole):.2f}")


def write_pictures(root: Path, count: int) -> None:
    root.mkdir()
    rng = np.random.default_rng(0)
    for number in range(count):
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(root / f"{number:05}.png")
        (root / f"{number:05}.txt").write_text(f"caption {number % 50}")


def encode(root: Path) -> tuple[float, float]:
    """Seconds of work as the command reports them, and of the whole process."""
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", "from prep.cli import main; main()", "encode", root / "photos", "--resolution", "64",
         "--model", root / "model", "--cache", root / "cache", "-o", root / "m.json", "--batch-size", "32", "--json"],
        capture_output=True, check=True)
    return json.loads(done.stdout)["seconds"], time.monotonic() - begun


if __name__ == "__main__":
    main()
