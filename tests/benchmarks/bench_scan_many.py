"""prep scan of very many pictures: peak memory and time, the first, again, and after a change.

    python -m tests.benchmarks --only bench_scan_many [--write] [--quick]
    python -m tests.benchmarks.bench_scan_many [--pictures 10000 100000] [--keep DIR]

Pictures are JPEG files of 160x120 with a caption each, all different, in directories of a thousand; one in a thousand
is a smaller copy of another. Each scan is a process of its own: the first, another, and one after a picture was added.
What does not depend on the number of pictures is what memory should be but for some hundred bytes a picture.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from tests.benchmarks.results import emit, parser_of, table

SCAN = "import sys; sys.argv[0] = 'prep'; from prep.cli.main import main; main()"
WATCH = """
import json, resource, subprocess, sys, time
begun = time.monotonic()
done = subprocess.run([sys.executable, *sys.argv[1:]], stdout=subprocess.PIPE, check=False)
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
found = json.loads(done.stdout)
print(json.dumps({"seconds": time.monotonic() - begun, "cpu": usage.ru_utime + usage.ru_stime,
                  "pictures": found["pictures"], "memory": usage.ru_maxrss,
                  "near": sum(one["code"] == "near-duplicate" for one in found["findings"])}))
"""  # ru_maxrss: of the largest process; the command's own, since a worker takes less
SETTLE = 61  # seconds after which files are at rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One scan."""

    pictures: int
    seconds: float
    cpu: float  # of the command and its workers
    memory: float  # MiB, of the largest process
    near: int


def main() -> None:
    """Prints the table."""
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=int, nargs="+", default=[10_000, 100_000])
    parser.add_argument("--keep", type=Path, help="a directory for the pictures, kept for the next time")
    options = parser.parse_args()
    rows = []
    for count in [1000, 2000] if options.quick else options.pictures:
        with tempfile.TemporaryDirectory() as scratch:
            root = (options.keep or Path(scratch)) / f"pictures-{count}"
            fill(root, count)
            time.sleep(SETTLE)
            extra = root / "another.jpg"
            for name in ("first", "again", "one more"):
                if name == "one more":
                    Image.effect_noise((160, 120), 90).save(extra)
                run = one_scan(root, Path(scratch))
                rows.append((f"{count:,}, {name}", f"{run.seconds:.1f}", f"{run.cpu:.1f}",
                             f"{1e3 * run.seconds / run.pictures:.3f}", f"{run.memory:.0f}", str(run.near)))
            extra.unlink()
    emit("prep scan of very many pictures", table(
        ("pictures", "s", "CPU s", "ms each", "peak MiB", "near-duplicates"), rows), options.write)


def one_scan(root: Path, remembered: Path) -> Run:
    """A scan of `root`, with what is remembered in a place of its own."""
    environment = {**os.environ, "LATENTRY_USER_CACHE": str(remembered)}
    done = subprocess.run([sys.executable, "-c", WATCH, "-c", SCAN, "scan", str(root), "--json", "--quiet"],
                          stdout=subprocess.PIPE, check=True, env=environment)
    found = json.loads(done.stdout)
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10  # ru_maxrss
    return Run(pictures=found["pictures"], seconds=found["seconds"], cpu=found["cpu"], memory=found["memory"] / unit,
               near=found["near"])


def fill(root: Path, count: int) -> None:
    """`count` pictures below `root`, unless they are there."""
    if root.exists():
        return
    rng = np.random.default_rng(count)
    picture = Image.new("RGB", (160, 120))
    for number in range(count):
        folder = root / f"{number // 1000:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        if number % 1000 == 999:
            picture = picture.resize((128, 96))
        else:
            coarse, fine = (Image.fromarray(rng.integers(0, 256, (high, wide, 3), np.uint8)).resize((160, 120))
                            for wide, high in ((8, 6), (40, 30)))
            picture = Image.blend(coarse, fine, 0.25)
        picture.save(folder / f"{number:06d}.jpg", quality=85)
        (folder / f"{number:06d}.txt").write_text(f"drawing {number}")


if __name__ == "__main__":
    main()
