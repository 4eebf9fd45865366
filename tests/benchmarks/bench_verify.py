"""`prep verify` against plain reading and SHA-256 of the same files: GB/s, warm and cold, one thread and many.

    python tests/benchmarks/bench_verify.py [--mib 1024] [--rounds 9] [--directory DIR] [--write] [--quick]

Shards of 256 MiB of SDXL latents, as many as `--mib` asks for. Cold: every file is put out of the page cache before
each pass (`posix_fadvise(DONTNEED)`). Target: the speed of SHA-256 on all cores, or of the disk, whichever is less.
Below, what the manifest adds: all of `prep verify` for a synthetic manifest of many tiny rows, keys computed again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from results import emit, parser_of, table
from rows import SDXL, finite_bytes

from prep.cache.shard_check import verify_shard
from prep.cache.store import Cache, open_cache
from prep.cache.writer import ShardWriter
from prep.maintenance.verify import verify
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest

SHARD_MIB = 256
BLOCK = 1 << 20
Job = Callable[[], object]


def written(root: Path, mib: int) -> Cache:
    """A cache of whole shards of random latents, on the disk."""
    cache = open_cache(root, create=True)
    (spec,) = SDXL["latent"]
    rng = np.random.default_rng(0)
    for shard in range(max(1, mib // SHARD_MIB)):
        keys = sorted(hashlib.sha256(f"{shard} {row}".encode()).hexdigest()
                      for row in range((SHARD_MIB << 20) // spec.row_bytes))
        with ShardWriter(cache, "latent", [spec]) as writer:
            for key in keys:
                writer.add(key, {spec.name: finite_bytes(rng, spec, 1)})
            writer.finish()
    return cache


def read_whole(path: Path) -> None:
    """Every byte, into one buffer."""
    buffer = memoryview(bytearray(BLOCK))
    descriptor = os.open(path, os.O_RDONLY)
    while os.readv(descriptor, [buffer]):
        pass
    os.close(descriptor)


def digest(path: Path) -> None:
    with path.open("rb") as handle:
        hashlib.file_digest(handle, "sha256")


def forget(paths: list[Path]) -> None:
    """Puts files out of the page cache, where the system lets us."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def contenders(cache: Cache, paths: list[Path], jobs: int) -> dict[str, Job]:
    """What is timed, by name."""
    shards = list(cache.shards())

    def on(threads: int, work: Callable[..., object], items: list) -> Job:
        def run() -> None:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(work, items))

        return run

    def check(shard: str) -> None:
        assert verify_shard(cache, shard) == []

    found: dict[str, Job] = {"plain read": on(1, read_whole, paths), "hashlib.file_digest": on(1, digest, paths),
                             "verify": on(1, check, shards), f"plain read, {jobs} threads": on(jobs, read_whole, paths),
                             f"hashlib.file_digest, {jobs} threads": on(jobs, digest, paths),
                             f"verify, {jobs} threads": on(jobs, check, shards)}
    if tool := shutil.which("sha256sum"):
        command = [tool, *map(str, paths)]
        found["sha256sum"] = lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return found


def speed_table(cache: Cache, rounds: int, jobs: int, cold: bool) -> str:
    """GB/s of each contender, its spread, its ratio to SHA-256 on all threads, and CPU seconds for each GB."""
    paths = sorted(path for path in (cache.root / "shards").rglob("*") if path.is_file())
    gigabytes = sum(path.stat().st_size for path in paths) / 1e9
    jobs_of = contenders(cache, paths, jobs)
    speeds: dict[str, list[tuple[float, float]]] = {name: [] for name in jobs_of}
    for number in range(rounds + 1):  # the first warms up
        for name, job in jobs_of.items():
            if cold:
                forget(paths)
            begun, cpu = time.perf_counter(), cpu_seconds()
            job()
            if number:
                speeds[name].append((gigabytes / (time.perf_counter() - begun), (cpu_seconds() - cpu) / gigabytes))
    base = f"hashlib.file_digest, {jobs} threads"
    rows = []
    for name, found in speeds.items():
        rates = [rate for rate, _ in found]
        ratio = statistics.median(rate / other for rate, (other, _) in zip(rates, speeds[base], strict=True))
        rows.append([name, f"{statistics.median(rates):.2f}", f"{min(rates):.2f}-{max(rates):.2f}", f"{ratio:.2f}",
                     f"{statistics.median(cpu for _, cpu in found):.2f}"])
    heads = ["cold" if cold else "warm", "GB/s", "from-to", "x file_digest, all threads", "CPU s/GB"]
    return table(heads, rows)


def cpu_seconds() -> float:
    """Of this process and its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def manifest_table(root: Path, samples: int, jobs: int) -> str:
    """Seconds of all of `prep verify` for rows of a few bytes."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    from synthetic import Scale, build

    path = build(root, Scale(samples=samples)).path
    rows = []
    for name, quick in (("prep verify", False), ("prep verify --quick", True)):
        begun, cpu = time.perf_counter(), cpu_seconds()
        document = verify(open_manifest(read_manifest(path)), quick=quick, jobs=jobs)
        assert document["ok"], document["damaged"][:3]
        rows.append([name, f"{samples:,}", str(document["shards"]), f"{time.perf_counter() - begun:.2f}",
                     f"{cpu_seconds() - cpu:.2f}"])
    return table(["all of it, rows of some bytes", "samples", "shards", "seconds", "CPU s"], rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--directory", type=Path, help="on the disk to be measured (default: the system's for such)")
    options = parser.parse_args()
    mib, rounds, samples = (512, 2, 10_000) if options.quick else (options.mib, options.rounds, options.samples)
    jobs = os.cpu_count() or 2
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        cache = written(Path(scratch) / "large", mib)
        parts = [speed_table(cache, rounds, jobs, cold=False)]
        if hasattr(os, "posix_fadvise"):
            os.sync()
            parts.append(speed_table(cache, rounds, jobs, cold=True))
        parts.append(manifest_table(Path(scratch) / "many", samples, jobs))
    what = f"{mib} MiB in shards of {SHARD_MIB}, {rounds} interleaved rounds, medians."
    emit("Verifying", "\n\n".join([what, *parts]), options.write)


if __name__ == "__main__":
    main()
