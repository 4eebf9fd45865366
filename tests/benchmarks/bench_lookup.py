"""Key → row over 10,000 shards: the ledger with the look-up file and without it, and a million keys located.

    python tests/benchmarks/bench_lookup.py [--shards 10000] [--rows 100] [--rounds 5] [--quick] [--write]

Every shard is one of the real writer, with rows of one byte; nothing is synced while they are written.
"""

from __future__ import annotations

import hashlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from prep.arrays import ArraySpec
from prep.cache.ledger import ledger
from prep.cache.ledger.columns import select
from prep.cache.ledger.index import NAME, Lookup, load_index, save_index
from prep.cache.ledger.ledger import Ledger, load_ledger, write_commit
from prep.cache.records import Task
from prep.cache.store import Cache, open_cache
from prep.cache.writer import ShardWriter
from prep.digest import digest_json
from prep.fs import atomic
from tests.benchmarks.results import emit, parser_of, table
from tests.support.plain_ledger import load_plainly

SPEC = ArraySpec(name="latent", dtype="uint8", shape=(1,))
WANTED = 300_000  # keys of 100,000 pictures: latent, mask, text


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shards", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=100, help="of a shard")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    shards, rounds = (500, 3) if options.quick else (options.shards, options.rounds)
    with tempfile.TemporaryDirectory() as scratch:
        cache = build(Path(scratch) / "cache", shards, options.rows)
        time.sleep(2.1)  # younger stamps are not trusted
        rows = measure(cache, rounds)
        size = (cache.root / NAME).stat().st_size
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2 ** (20 if sys.platform == "darwin" else 10)
    emit("Look-up", "\n".join([
        f"{shards:,} shards of {options.rows} rows; the look-up file has {size / 2**20:.1f} MiB, and no shard is",
        f"opened with it; peak memory {peak:.0f} MiB. Warm, seconds, {rounds} rounds.", "",
        table(["", "median", "from", "to", "CPU"], rows),
    ]), options.write)


def build(root: Path, shards: int, rows: int) -> Cache:
    """A cache of that many shards and commits."""
    cache = open_cache(root, create=True)
    with mock.patch.object(atomic, "sync", lambda handle: handle.flush()), mock.patch.object(atomic, "sync_dir"):
        for number in range(shards):
            keys = sorted(hashlib.sha256(f"{number} {row}".encode()).hexdigest() for row in range(rows))
            with ShardWriter(cache, "latent", [SPEC]) as writer:
                for key in keys:
                    writer.add(key, {"latent": b"\0"})
                shard = writer.finish()
            task = Task(key=digest_json({"number": number}), field="latent", rows=tuple(keys))
            write_commit(cache, task, shard, [], {"host": "h", "device": "cpu", "milliseconds": 7})
    return cache


def measure(cache: Cache, rounds: int) -> list[list[str]]:
    """A line of the table for each way."""
    plain = load_plainly(cache)
    load_ledger(cache, remember=True)
    rng = np.random.default_rng(0)
    wanted = np.sort(rng.choice(plain.keys, min(WANTED, len(plain.keys)), replace=False))
    names = [key.ljust(32, b"\0").hex() for key in wanted.tolist()]
    ways: dict[str, Callable[[], Any]] = {
        "every commit and shard read": lambda: load_plainly(cache),
        "with the look-up file": lambda: load_ledger(cache),
        "with it, 63 shards newer than it": lambda: load_behind(cache),
        "the file, read and checked": lambda: load_index(cache),
        "the file, written": lambda: save_index(cache, load_index(cache)),
        f"{len(names):,} keys located, as columns": lambda: plain.locate(wanted),
        f"{len(names):,} keys resolved, as records": lambda: plain.resolve(names),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    worked: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, run in ways.items():
            begun, working = time.perf_counter(), time.process_time()
            run()
            seconds[way].append(time.perf_counter() - begun)
            worked[way].append(time.process_time() - working)
    return [[way, *(f"{figure(found):.3f}" for figure, found in (
        (statistics.median, seconds[way]), (min, seconds[way]), (max, seconds[way]), (statistics.median, worked[way])))]
        for way in ways]


def load_behind(cache: Cache) -> Ledger:
    """The ledger when the file lacks 63 shards and their commits: the most before it is written anew."""
    full = load_index(cache)
    behind = dict(list(full.shards.items())[:-63])
    numbers = np.arange(len(full.shards), dtype=np.int32)
    numbers[len(behind):] = -1
    commits = {task: found for task, found in full.commits.items()
               if found[1].shard and found[1].shard.digest in behind}
    known = Lookup(commits=commits, shards=behind, columns=select(full.columns, numbers))
    with mock.patch.object(ledger, "load_index", lambda _: known):
        return load_ledger(cache)


if __name__ == "__main__":
    main()
