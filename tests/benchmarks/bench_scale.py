"""A million samples really indexed, and a hundred million by counts: seconds and memory until the first batch.

    python tests/benchmarks/bench_scale.py [--samples 1000000] [--rounds 3] [--directory DIR] [--quick] [--write]

The data set is made first (tests/support/synthetic.py: 9,000 shards of 250 tiny rows; two minutes). Every stage is a
process of its own, each round anew; seconds are of the work alone, after imports. Peak is the process's resident
memory at its highest, imports and mapped files included; private is what the work left that no other process shares.
Cold: the kernel was told to forget these files' pages; it keeps directories and inodes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from results import emit, parser_of, table

if TYPE_CHECKING:
    from prep.loader.index import Index

BATCH = 16
HEADERS = 1000
TASKS, TASK_ROWS = 100_000, 10
Work = Callable[[], object]


def stage_base(root: Path) -> Work:
    from prep.manifest import document as manifest

    return lambda: manifest


def stage_manifest(root: Path) -> Work:
    from prep.manifest.document import read_manifest

    return lambda: read_manifest(root / "m.json")


def stage_tables(root: Path) -> Work:
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest

    def work() -> object:
        audit = open_manifest(read_manifest(root / "m.json"))
        return audit, audit.samples, audit.shards

    return work


def stage_inspect(root: Path) -> Work:
    from prep.manifest import describe as audit
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest

    return lambda: audit.describe_manifest(open_manifest(read_manifest(root / "m.json")))


def stage_look_up(root: Path) -> Work:
    from prep.manifest import describe as audit
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest

    return lambda: audit.describe_samples(open_manifest(read_manifest(root / "m.json")), "0000/00000007.png")


def stage_verify(root: Path) -> Work:
    from prep.maintenance.verify import verify
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest

    return lambda: verify(open_manifest(read_manifest(root / "m.json")), quick=True)["ok"]


def stage_index(root: Path) -> Work:
    from prep.loader.index import open_index
    from prep.manifest.document import read_manifest

    return lambda: open_index(read_manifest(root / "m.json"))


def stage_plan(root: Path) -> Work:
    from prep.batching.plan import step_plan
    from prep.loader.index import open_index
    from prep.manifest.document import read_manifest

    def work() -> object:
        index = open_index(read_manifest(root / "m.json"))
        plan = step_plan(index.counts, seed=0, batch_size=BATCH)
        return index, [index.showings(part.bucket, part.occurrences) for part in plan.at(0)]

    return work


def stage_batch(root: Path) -> Work:
    import torch  # noqa: F401  # its import is no part of the work

    from prep.loader.index import open_index
    from prep.manifest.document import read_manifest

    return lambda: first_batch(open_index(read_manifest(root / "m.json")))


def first_batch(index: Index) -> object:
    from prep.batching.plan import step_plan
    from prep.loader.batches import batches
    from prep.loader.draws import training
    from prep.loader.rows import Rows

    plan = step_plan(index.counts, seed=0, batch_size=BATCH)
    requests = training(index, plan, 0, 1, timesteps=1000)
    with batches(Rows(index), requests, masked=True, pinned=False) as made:
        return index, [len(batch.draws) for batch in made]


def stage_start(root: Path) -> Work:
    import torch  # noqa: F401  # imports are no part of the work

    import prep.batching.plan
    import prep.loader.batches
    import prep.loader.draws  # noqa: F401
    from prep.loader.identity import identify
    from prep.loader.index import open_index
    from prep.loader.shards import check_shards
    from prep.manifest.document import read_manifest

    def work() -> object:
        index = open_index(read_manifest(root / "m.json"))
        known = check_shards(index)
        check_shards(index, known)  # as after the lock
        return identify(index, masked=True, prediction="epsilon"), first_batch(index)

    return work


def stage_headers(root: Path, *, jobs: int, cold: bool) -> Work:
    from prep.cache.reader import Reader
    from prep.manifest.document import read_manifest
    from prep.manifest.opened import open_manifest

    audit = open_manifest(read_manifest(root / "m.json"))
    places = [(shard["digest"], array) for shard in audit.shards[:HEADERS] for array in shard["shapes"]]
    for digest, _ in places:
        for path in audit.cache.shard(digest).rglob("*"):
            if path.is_file():
                forget(path) if cold else path.read_bytes()
    reader = Reader(audit.cache, open_arrays=HEADERS)
    return lambda: reader.open_all(places, jobs=jobs)


def forget(path: Path) -> None:
    """Asks the kernel to drop a file's pages."""
    descriptor = os.open(path, os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def stage_counts(root: Path, *, steps: int) -> Work:
    from prep.batching.plan import step_plan

    def work() -> object:
        plan = step_plan([2_500_000] * 40, seed=0, batch_size=2048, micro_batch=BATCH)
        return [plan.step(*divmod(number * 997, plan.steps_per_epoch)) for number in range(steps)][-1]

    return work


class OneView:
    """A sample, and its only view."""

    __slots__ = ("id",)
    name = ""

    def __init__(self, key: str) -> None:
        self.id = key

    @property
    def views(self) -> tuple[OneView]:
        return (self,)

    @property
    def latent(self) -> str:
        return self.id


def stage_tasks(root: Path) -> Work:
    """Planning and storing what `prep encode` would do with a million pictures, in tasks of ten rows."""
    return planned_in(Path(tempfile.mkdtemp(dir=root)))


def stage_follow(root: Path) -> Work:
    """Following such a plan that another process stored, as every part of an array does."""
    from prep.cache.store import open_cache

    cache = root / "planned"
    if not cache.exists():
        open_cache(cache, create=True)
        subprocess.run([sys.executable, __file__, "--stage", "follow", "--directory", root], check=True,
                       stdout=subprocess.DEVNULL, env=environment())
    return planned_in(cache)


def planned_in(path: Path) -> Work:
    """Planning for a cache. Of targets only what a plan reads of them."""
    import hashlib
    from types import SimpleNamespace

    from prep.cache.store import open_cache
    from prep.encode.plan import plan

    keys = sorted(hashlib.sha256(str(number).encode()).hexdigest() for number in range(TASKS * TASK_ROWS))
    samples = [OneView(key) for key in reversed(keys)]
    targets: Any = SimpleNamespace(samples=samples, keys=lambda: keys,
                                 by_field=lambda: {"latent": keys, "mask": [], "text": []})
    wanted: Any = SimpleNamespace(targets=targets, text_groups=SimpleNamespace(count=lambda keys: None),
                                  group_of=lambda field, key: (64, 64), row_bytes=lambda field, key: 1 << 16)
    cache = open_cache(path, create=True)
    return lambda: len(plan(wanted, cache, shard_bytes=TASK_ROWS << 16).tasks) == TASKS


STAGES: dict[str, tuple[str, Callable[[Path], Work]]] = {
    "base": ("nothing: a process with the manifest's module", stage_base),
    "manifest": ("manifest.read", stage_manifest),
    "tables": ("tables opened, digests checked", stage_tables),
    "inspect": ("prep inspect", stage_inspect),
    "look_up": ("prep inspect --sample", stage_look_up),
    "verify": ("prep verify --quick", stage_verify),
    "index": ("train's index, every place checked", stage_index),
    "plan": ("... and its first step planned", stage_plan),
    "batch": (f"... and its first batch of {BATCH}", stage_batch),
    "start": ("... with shards checked twice and data digested, as train run", stage_start),
    "headers_1": (f"headers of {HEADERS} shards, warm, 1 thread", lambda root: stage_headers(root, jobs=1, cold=False)),
    "headers_8": (f"headers of {HEADERS} shards, warm, 8 threads",
                  lambda root: stage_headers(root, jobs=8, cold=False)),
    "cold_1": (f"headers of {HEADERS} shards, cold, 1 thread", lambda root: stage_headers(root, jobs=1, cold=True)),
    "cold_8": (f"headers of {HEADERS} shards, cold, 8 threads", lambda root: stage_headers(root, jobs=8, cold=True)),
    "tasks": (f"{TASKS:,} tasks of {TASK_ROWS} rows planned and stored", stage_tasks),
    "follow": ("... and followed by another process", stage_follow),
    "counts_1": ("10^8 samples by counts: a step of 2048", lambda root: stage_counts(root, steps=1)),
    "counts_100": ("10^8 samples by counts: 100 steps of 2048", lambda root: stage_counts(root, steps=100)),
}


def memory() -> dict[str, float]:
    """Peak and private memory of this process, in MiB. Linux tells them; elsewhere they are zero."""
    status = Path("/proc/self/status")
    words = dict(line.split(":", 1) for line in status.read_text().splitlines()) if status.exists() else {}
    return {name: int(words.get(key, "0 kB").split()[0]) / 1024 for name, key in
            (("peak", "VmHWM"), ("private", "RssAnon"))}


def one_stage(name: str, root: Path) -> None:
    """In a child: does the work and prints what it took."""
    work = STAGES[name][1](root)
    before, begun, cpu = memory(), time.perf_counter(), time.process_time()
    kept = work()
    spent = {"seconds": time.perf_counter() - begun, "cpu": time.process_time() - cpu}
    after = memory()
    print(json.dumps({**spent, "peak": after["peak"], "private": after["private"] - before["private"]}))
    del kept


def measure(root: Path, rounds: int, names: Sequence[str]) -> list[list[str]]:
    """Each stage in every round, one after another."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, runs in found.items():
            done = subprocess.run([sys.executable, __file__, "--stage", name, "--directory", root],
                                  capture_output=True, text=True, check=False, env=environment())
            if done.returncode:
                sys.exit(f"{name} failed:\n{done.stderr}")
            runs.append(json.loads(done.stdout))
    return [[STAGES[name][0], *columns(runs)] for name, runs in found.items()]


def environment() -> dict[str, str]:
    root = Path(__file__).parent.parent.parent
    return {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}


def columns(runs: list[dict[str, float]]) -> list[str]:
    seconds = [run["seconds"] for run in runs]
    middle = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
    return [f"{1000 * middle['seconds']:.1f}", f"{1000 * min(seconds):.1f}-{1000 * max(seconds):.1f}",
            f"{1000 * middle['cpu']:.1f}", f"{middle['peak']:.0f}", f"{middle['private']:.0f}"]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--samples", type=int, default=None, help="default: a million; 20,000 with --quick")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--directory", type=Path, default=None, help="where the data set is made, or was")
    parser.add_argument("--only", action="append", choices=list(STAGES), help="some stages")
    parser.add_argument("--stage", choices=list(STAGES), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        one_stage(options.stage, options.directory)
        return
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    from synthetic import Scale, build

    with tempfile.TemporaryDirectory() as scratch:
        root = (options.directory or Path(scratch)) / "scale"
        wanted = options.samples or (20_000 if options.quick else 1_000_000)
        begun = time.perf_counter()
        if not (root / "m.json").exists():
            build(root, Scale(samples=wanted))
        made = time.perf_counter() - begun
        document = json.loads((root / "m.json").read_bytes())
        rows = measure(root, options.rounds, options.only or list(STAGES))
    told = table(["", "ms", "from-to", "CPU ms", "peak MiB", "private MiB"], rows)
    shards = sum(field["shards"] for field in document["fields"].values())
    emit("A million samples", f"`bench_scale.py --rounds {options.rounds}`: {document['samples']['train']:,} samples, "
         f"{shards:,} shards, made in {made:.0f} s; the manifest has {len(json.dumps(document)):,} bytes.\n\n{told}",
         options.write)


if __name__ == "__main__":
    main()
