"""Writing a shard with digest, CRC-32C and fsync, against the same bytes written and synced by a bare loop.

    python tests/benchmarks/bench_write.py [--rows 1000] [--rounds 9] [--directory DIR] [--write] [--quick]

Rows of SDXL (latent, mask, text: three shards) and of Flux (latent, text with two arrays, mask). The bare loop writes
the rows' bytes in blocks of 1 MiB, and syncs each file; it needs no memory but the rows and knows nothing of what it
wrote. SHA-256 and CRC-32C are also timed alone, over the same rows. Target: 0.5 of the bare loop, or bound by SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from results import emit, parser_of, table
from rows import FLUX, SDXL, Kind, drawn, keys_of

from prep.cache import shard_format
from prep.cache.store import open_cache
from prep.cache.writer import ShardWriter

BLOCK = 1 << 20
Rows = dict[str, np.ndarray]


def latentry(kind: Kind, data: Rows, root: Path) -> None:
    cache = open_cache(root, create=True)
    keys = keys_of(data)
    for field, specs in kind.items():
        with ShardWriter(cache, field, specs) as writer:
            for row, key in enumerate(keys):
                writer.add(key, {spec.name: data[spec.name][row].data for spec in specs})
            writer.finish()


def bare(data: Rows, root: Path, *, sync: bool) -> None:
    root.mkdir()
    for name, rows in data.items():
        flat = rows.reshape(-1).data
        descriptor = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        for start in range(0, len(flat), BLOCK):
            os.write(descriptor, flat[start : start + BLOCK])
        if sync:
            os.fsync(descriptor)
        os.close(descriptor)


def sha256(data: Rows) -> None:
    for rows in data.values():
        running, flat = hashlib.sha256(), rows.reshape(-1).data
        for start in range(0, len(flat), BLOCK):
            running.update(flat[start : start + BLOCK])


def crc32c(data: Rows) -> None:
    for rows in data.values():
        for row in rows:
            shard_format.crc32c(row)


def measure(kind: Kind, data: Rows, scratch: Path, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds by way, ways taking turns; what was written is removed, and that on the disk, in between."""
    root = scratch / "out"
    ways: dict[str, Callable[[], None]] = {
        "bare write, fsync": lambda: bare(data, root, sync=True),
        "bare write, no fsync": lambda: bare(data, root, sync=False),
        "latentry": lambda: latentry(kind, data, root),
        "SHA-256 alone": lambda: sha256(data),
        "CRC-32C alone": lambda: crc32c(data),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        names = list(ways)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wall, cpu = time.perf_counter(), time.process_time()
            ways[name]()
            if number:  # the first round warms up
                times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
            shutil.rmtree(root, ignore_errors=True)
            os.sync()
    return times


def report(times: dict[str, list[tuple[float, float]]], gigabytes: float) -> str:
    """A line for each way; the ratio is the median of the rounds' own."""
    raw, rows = [wall for wall, _ in times["bare write, fsync"]], []
    for name, runs in times.items():
        walls = [wall for wall, _ in runs]
        rows.append((name, f"{gigabytes / statistics.median(walls):.2f}", f"{gigabytes / max(walls):.2f}",
                     f"{gigabytes / min(walls):.2f}", f"{statistics.median(cpu for _, cpu in runs) / gigabytes:.2f}",
                     f"{statistics.median(base / own for base, own in zip(raw, walls, strict=True)):.2f}"))
    return table(("way", "GB/s", "lowest", "highest", "CPU s/GB", "x bare"), rows)


def main() -> None:
    """Prints a table for each kind of row."""
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, default=1000, help="of SDXL; Flux has a tenth")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=None, help="where to write; default: the system's")
    options = parser.parse_args()
    rows, rounds = (200, 3) if options.quick else (options.rows, options.rounds)
    for title, kind, count in (("SDXL", SDXL, rows), ("Flux", FLUX, rows // 10)):
        data = drawn(kind, count)
        gigabytes = sum(one.nbytes for one in data.values()) / 1e9
        with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
            times = measure(kind, data, Path(scratch), rounds)
        words = f"{count} rows, {gigabytes:.2f} GB, {rounds} rounds taking turns; `x bare`: to write and fsync.\n\n"
        emit(f"Writing shards, {title} rows", words + report(times, gigabytes), options.write)


if __name__ == "__main__":
    main()
