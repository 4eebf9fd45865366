"""A second `prep encode` with nothing changed: seconds of work after start-up, CPU seconds, peak memory.

    python -m tests.benchmarks --only bench_again [--write] [--quick]
    python -m tests.benchmarks.bench_again [--pictures 5000 100000] [--rounds 9] [--keep DIR]

Each picture, caption and mask is a file of its own with bytes of its own. The first run's rows have the right keys and
shapes and made-up values, written by the real shard writer, since no encoder is measured here. The second run, which
remembers what is at rest by then, is not timed either; the ones after it are the command itself, each a process of its
own. Targets: 0.5 s of work for 5,000 pictures, 8 s for 100,000.
"""

from __future__ import annotations

import io
import json
import os
import statistics
import struct
import subprocess
import sys
import tempfile
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from prep.fs.memo import REST_NS
from tests.benchmarks.results import emit, parser_of, table

ROOT = Path(__file__).parent.parent.parent
COMMAND = "from prep.cli.main import main; main()"
FILL = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.benchmarks.bench_again import fill; fill()"
MODEL = "import pathlib, sys; from prep.demo.tiny_model import build_random; build_random(pathlib.Path(sys.argv[1]))"
SIZES = ((64, 64), (96, 56), (56, 100), (70, 66))  # pixels: three buckets of 16 pixels a step


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """What one run took."""

    work: float  # seconds after start-up, as the command says
    whole: float  # seconds of the process
    cpu: float  # seconds of all its threads, user and system
    memory: float  # MiB at the highest


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--pictures", type=int, nargs="+", default=[5000, 100_000])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--keep", type=Path, help="make the pictures here, or use those that are here")
    options = parser.parse_args()
    counts, rounds = ([500], 3) if options.quick else (options.pictures, options.rounds)
    rows = []
    for count in counts:
        for masks in (False, True):
            with tempfile.TemporaryDirectory() as scratch:
                root = (options.keep or Path(scratch)) / f"{count}{'-masks' * masks}"
                runs = measure(root, count, rounds, masks=masks)
            rows.append([f"{count:,} pictures, captions{' and masks' * masks}", *described(runs)])
    text = table(["again", "work s", "from-to", "CPU s", "whole process s", "peak MiB"], rows)
    told = f"{text}\n\nMedians of {rounds} runs (`bench_again.py`)."
    emit("Second prep encode, nothing changed", told, options.write)


def described(runs: list[Run]) -> list[str]:
    """The cells of a row."""
    work = [run.work for run in runs]
    cpu, whole, memory = (statistics.median(getattr(run, name) for run in runs) for name in ("cpu", "whole", "memory"))
    return [f"{statistics.median(work):.2f}", f"{min(work):.2f}-{max(work):.2f}", f"{cpu:.2f}", f"{whole:.2f}",
            f"{memory:.0f}"]


def measure(root: Path, count: int, rounds: int, *, masks: bool) -> list[Run]:
    """The timed runs; what they run on is made first where it is not there."""
    if not root.exists():
        subprocess.run([sys.executable, "-c", MODEL, root / "model"], check=True)  # there: torch stays out of this one
        write_pictures(root / "photos", count, masks=masks)
        time.sleep(REST_NS / 1e9 + 1)  # younger stamps are not trusted
    encode(root, FILL, masks=masks)
    time.sleep(2.1)
    encode(root, COMMAND, masks=masks)
    return [encode(root, COMMAND, masks=masks) for _ in range(rounds)]


def write_pictures(root: Path, count: int, *, masks: bool) -> None:
    """`count` PNGs of four shapes, each with a text chunk of its own, with captions and masks that are as unlike."""
    root.mkdir(parents=True)
    rng = np.random.default_rng(0)
    pictures = [png(rng.integers(0, 256, (high, wide, 3), dtype=np.uint8)) for wide, high in SIZES]
    drawn = [png(rng.integers(0, 256, (high, wide), dtype=np.uint8)) for wide, high in SIZES]
    for number in range(count):
        stem, shape = str(root / f"{number:06}"), number % len(SIZES)
        write(f"{stem}.png", marked(pictures[shape], number))
        write(f"{stem}.txt", b"picture number %d of many" % number)
        if masks:
            write(f"{stem}-masklabel.png", marked(drawn[shape], number))


def write(path: str, data: bytes) -> None:
    with open(path, "wb") as file:  # noqa: PTH123  (a path a picture would be half of the time)
        file.write(data)


def png(pixels: np.ndarray[Any, Any]) -> bytes:
    sink = io.BytesIO()
    Image.fromarray(pixels).save(sink, "PNG")
    return sink.getvalue()


def marked(data: bytes, number: int) -> bytes:
    """The PNG `data` with a tEXt chunk that no other number's has, before its IEND chunk of 12 bytes."""
    body = b"tEXtnumber\0%d" % number
    return data[:-12] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + data[-12:]


def encode(root: Path, program: str, *, masks: bool) -> Run:
    """One run of the command."""
    words = ["encode", root / "photos", "--resolution", "64", "--step", "16", "--model", root / "model", "--cache",
             root / "cache", "-o", root / "m.json", "--mask", "sidecar" if masks else "none", "--json"]
    begun = time.monotonic()
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen([sys.executable, "-c", program, *words], stdout=out)
        _, status, usage = os.wait4(child.pid, 0)
        whole = time.monotonic() - begun
        child.returncode = os.waitstatus_to_exitcode(status)
        if child.returncode:
            raise subprocess.CalledProcessError(child.returncode, words)
        out.seek(0)
        work = json.load(out)["seconds"]
    peak = usage.ru_maxrss / (1 << 20 if sys.platform == "darwin" else 1 << 10)  # bytes there, KiB elsewhere
    return Run(work=work, whole=whole, cpu=usage.ru_utime + usage.ru_stime, memory=peak)


def fill() -> None:
    """The command, with an executor that makes rows up and writes them as the real one does."""
    from prep.cli.main import main as command
    from prep.encode.engines import local

    local.run = make_up
    command()


def make_up(job: Any, progress: Any) -> Any:
    from prep.cache.ledger.ledger import write_commit
    from prep.cache.writer import ShardWriter
    from prep.encode.engines.job import Outcome

    made = dict.fromkeys(("latent", "mask", "text"), 0)
    for task in job.tasks:
        specs = job.specs.arrays_of(task.field, job.bucket_of(task))
        with ShardWriter(job.cache, task.field, specs) as writer:
            for key in task.rows:
                row = (bytes.fromhex(key) * (specs[0].row_bytes // 32 + 1))[: specs[0].row_bytes]
                writer.add(key, {specs[0].name: row})
            write_commit(job.cache, task, writer.finish(), [], {})
        made[task.field] += len(task.rows)
    return Outcome(encoded=made, transient=())


if __name__ == "__main__":
    main()
