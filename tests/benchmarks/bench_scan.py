"""prep scan against a plain decode of the same files with Pillow, in one process. Target on 2 cores: 1.7 times as fast.

    LATENTRY_REAL_DATA=/path/to/data python tests/benchmarks/bench_scan.py

The photos are copied until there are 3,000, which a scan that reads them for the first time, and again when none has
changed, goes through with two workers. Without LATENTRY_REAL_DATA they are drawn. Copies are compared once, so what
near-duplicates cost is measured apart, on thumbnails of as many different pictures.
"""

from __future__ import annotations

import io
import os
import shutil
import statistics
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np
from PIL import Image
from results import emit, parser_of, table

from prep.scan.duplicates.correlation import near_duplicates
from prep.scan.duplicates.identity import sampled, thumb_of
from prep.scan.duplicates.signature import LENGTH, likely_blocks
from prep.scan.memo import ScanMemo
from prep.scan.protocol import BlobMessage, PreviewMessage
from prep.scan.scanner import scan
from prep.scan.worker import LIMITS, PREVIEW, SERVICE
from prep.sources.item import Item
from prep.sources.walk import walk_source
from prep.workers.pool import WorkerPool

ROUNDS, PICTURES, JOBS = 3, 3000, 2


def main() -> None:
    """Prints the tables."""
    options = parser_of(__doc__).parse_args()
    rounds, pictures = (1, 200) if options.quick else (ROUNDS, PICTURES)
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "in"
        fill(root, pictures)
        files = [one.picture.file for one in walk_source(root, source=0, masks="none") if isinstance(one, Item)]
        rows = [one_round(root, files, Path(scratch) / f"{number}.sqlite") for number in range(rounds)]
    plain, plain_cpu, first, first_cpu, again = (statistics.median(column) for column in zip(*rows, strict=True))
    count, ratios = len(files), sorted(row[0] / row[2] for row in rows)
    cpu = sorted(JOBS * row[1] / row[3] for row in rows)
    text = table(("ms a picture", "wall", "CPU"), [
        ("Pillow, one process", f"{plain / count * 1e3:.2f}", f"{plain_cpu / count * 1e3:.2f}"),
        (f"prep scan, {JOBS} workers", f"{first / count * 1e3:.2f}", f"{first_cpu / count * 1e3:.2f}"),
        ("prep scan, nothing changed", f"{again / count * 1e3:.3f}", ""),
    ])
    text += (f"\n\n{count} pictures, {rounds} interleaved rounds. Times as fast as Pillow: {spread(ratios)} by the "
             f"clock, {spread(cpu)} were both cores idle otherwise (twice Pillow's CPU time over the scan's).\n\n")
    emit("prep scan", text + apart(options.quick), options.write)


def one_round(root: Path, files: list[str], remembered: Path) -> tuple[float, float, float, float, float]:
    """Seconds: Pillow by the clock and of CPU, a first scan by the clock and of CPU, a second scan by the clock."""
    begun, spent = time.monotonic(), cpu_seconds()
    for file in files:
        with Image.open(file) as picture:
            picture.load()
    plain, plain_cpu = time.monotonic() - begun, cpu_seconds() - spent
    begun, spent = time.monotonic(), cpu_seconds()
    one_scan(root, remembered)
    first, first_cpu = time.monotonic() - begun, cpu_seconds() - spent
    begun = time.monotonic()
    one_scan(root, remembered)
    return plain, plain_cpu, first, first_cpu, time.monotonic() - begun


def one_scan(root: Path, remembered: Path) -> None:
    memory = ScanMemo(remembered)
    scan(walk_source(root, source=0, masks="none"), jobs=JOBS, memory=memory)
    memory.close()


def cpu_seconds() -> float:
    """Of this process and of those that it started and waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({values[0]:.2f} to {values[-1]:.2f})"


def apart(quick: bool) -> str:
    """What starting a worker, comparing and keeping cost."""
    begun = time.monotonic()
    with WorkerPool(SERVICE) as workers:
        workers.ask(PREVIEW, PreviewMessage(BlobMessage(b"nothing here", 0, None, ""), 8), LIMITS)
        start = time.monotonic() - begun
    count = 300 if quick else 1000
    thumbs = [thumb_of(sampled(drawn(number)), (384, 256)) for number in range(count)]
    begun = time.monotonic()
    near_duplicates(thumbs)
    compared = time.monotonic() - begun
    hashed = [f"{many:,} signatures {compared_signatures(many):.1f} s" for many in
              ((10_000,) if quick else (100_000, 300_000))]  # the second more than are all compared with all
    return (f"A worker is ready after {start:.2f} s. Comparing {count} different pictures takes {compared:.2f} s, and "
            f"{' and '.join(hashed)}. Kept of a picture: {kept_bytes()} bytes, and its thumbnail while there "
            "are no more than 10,000.")


def compared_signatures(many: int) -> float:
    """Seconds, of a processor, that the comparison of random signatures takes; one in a thousand is a copy."""
    rng = np.random.default_rng(0)
    rows = rng.integers(-127, 128, (many, LENGTH), np.int8)
    rows[999::1000] = rows[::1000]
    signatures = [row.tobytes() for row in rows]
    begun = time.process_time()
    assert sum(map(len, likely_blocks(signatures))) == many // 1000
    return time.process_time() - begun


def kept_bytes() -> int:
    """Bytes for each picture of a large scan, its name and path included."""
    from prep.fs.blob import Blob
    from prep.scan.duplicates.copies import ScannedPicture
    from prep.scan.duplicates.identity import Identity

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kept = [ScannedPicture(name=f"subject/{number:08d}.jpg",
                           picture=Blob(file=f"/home/somebody/photos/subject/{number:08d}.jpg"),
                           identity=Identity(file=f"{number:064x}", sample=number << 8,
                                             size=(1000 + number % 999, 2000),
                                             signature=number.to_bytes(63, "little")))
            for number in range(20000)]
    size = (tracemalloc.get_traced_memory()[0] - before) // len(kept)
    tracemalloc.stop()
    return size


def drawn(seed: int) -> Image.Image:
    """Something with large and small shapes, 384x256."""
    rng = np.random.default_rng(seed)
    coarse, fine = (Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).resize((384, 256)) for side in
                    (7, 60))
    return Image.blend(coarse, fine, 0.25)


def fill(root: Path, count: int) -> None:
    """At least `count` pictures with captions."""
    named = os.environ.get("LATENTRY_REAL_DATA")
    if named:
        photos = Path(named) / "photos"
        each = sum(path.suffix != ".txt" for path in photos.rglob("*.*"))
        for number in range(-(-count // each)):
            shutil.copytree(photos, root / str(number))
        return
    root.mkdir()
    for number in range(63):
        stream = io.BytesIO()
        drawn(number).resize((1152, 864)).save(stream, "JPEG", quality=90)
        for copy in range(-(-count // 63)):
            (root / f"{number}-{copy}.jpg").write_bytes(stream.getvalue())
            (root / f"{number}-{copy}.txt").write_text("a drawing")


if __name__ == "__main__":
    main()
