"""Reading rows, warm and cold, in shuffled batches of 16 and one by one: our reader against memcpy and its peers.

    python tests/benchmarks/bench_read.py [--rounds 9] [--cold 5] [--directory DIR] [--only SDXL] [--write] [--quick]

Rows of SDXL (463 kB) and of Flux (4.7 MB), 0.47 GB of each, of which every contender has its own files. All fill the
same reused buffers, in the same shuffled order, and take turns within each round; ratios are medians of the rounds'.
Bytes are compared once, for every row, before anything is timed. Our reader checks CRC-32C on every row but where it
says that it does not; tensorstore and zarr-python check it too, `.npz` checks CRC-32, the others check nothing.

Cold: before each pass the contender is closed, its files leave the page cache (`posix_fadvise(DONTNEED)`), and how much
of them stayed is looked up (`mincore`). Ours tells the kernel which rows come 32 ahead, as training does.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import peers
from peers import Data, Fill, Open
from results import emit, parser_of, table
from rows import FLUX, SDXL, Kind, arrays, drawn, keys_of

from prep.cache.reader import Reader, RowTargets
from prep.cache.records import RowRef
from prep.cache.store import Cache, open_cache
from prep.cache.writer import ShardWriter

BATCH = 16
AHEAD = 2  # batches of which the kernel is told before they are read
OURS, TWO, UNCHECKED = "**latentry**", "latentry, two threads", "latentry, unchecked"
Times = dict[str, list[tuple[float, float]]]  # (wall, CPU) seconds by contender


@dataclass(frozen=True, kw_only=True)
class Contender:
    """Rows on the disk and a way to open them."""

    open: Open
    root: Path
    resident: list[float] = field(default_factory=list)  # of its bytes, what stayed in the page cache; cold passes


class Ours:
    """Our reader, with its buffers split once as in training's ring."""

    def __init__(self, root: Path, refs: dict[str, list[RowRef]], *, check: bool = True, threads: int = 1) -> None:
        self.reader, self.refs = Reader(Cache(root=root), check=check), refs
        self.split: dict[int, dict[str, RowTargets]] = {}
        self.others = ThreadPoolExecutor(threads - 1) if threads > 1 else None
        self.threads = threads

    def __call__(self, out: Data, picks: Sequence[int]) -> None:
        split = self.split.get(id(out))
        if split is None:
            split = self.split[id(out)] = {name: RowTargets(rows) for name, rows in out.items()}
        shares = [range(number, len(picks), self.threads) for number in range(self.threads)]
        reading = [self.others.submit(self.read, split, picks, share) for share in shares[1:]] if self.others else []
        self.read(split, picks, shares[0])
        for other in reading:
            other.result()

    def read(self, split: dict[str, RowTargets], picks: Sequence[int], share: range) -> None:
        for name, refs in self.refs.items():
            rows = split[name] if len(share) == len(split[name].rows) else split[name].only(share)
            self.reader.read_batch(rows, name, [refs[picks[place]] for place in share])

    def soon(self, picks: Sequence[int]) -> None:
        for name, refs in self.refs.items():
            self.reader.advise(name, [refs[pick] for pick in picks])


def contenders(kind: Kind, data: Data, scratch: Path) -> dict[str, Contender]:
    """Every library that is installed, its files written."""
    found = {}
    for name, make in peers.FILES.items():
        root = scratch / "".join(letter for letter in name if letter.isalnum())
        root.mkdir()
        try:
            found[name] = Contender(open=make(data, root), root=root)
        except ImportError as error:
            print(f"left out: {name}: {error}", flush=True)
    cache = open_cache(scratch / "cache", create=True)
    refs: dict[str, list[RowRef]] = {}
    for name, specs in kind.items():
        with ShardWriter(cache, name, specs) as writer:
            for row, key in enumerate(keys_of(data)):
                writer.add(key, {spec.name: data[spec.name][row].data for spec in specs})
            shard = writer.finish()
        refs |= {spec.name: [RowRef(shard=shard.digest, row=row) for row in range(shard.rows)] for spec in specs}
    shards = {name: places[0].shard for name, places in refs.items()}
    ours = {
        "sequential read": peers.sequential(cache, shards, arrays(kind)),
        OURS: lambda: Ours(cache.root, refs),
        TWO: lambda: Ours(cache.root, refs, threads=2),
        UNCHECKED: lambda: Ours(cache.root, refs, check=False),
    }
    for name, make_reader in peers.OURS.items():
        try:
            ours[name] = make_reader(cache, shards)
        except ImportError as error:
            print(f"left out: {name}: {error}", flush=True)
    first = {"memcpy": found.pop("memcpy")}
    return first | {name: Contender(open=opened, root=cache.root) for name, opened in ours.items()} | found


def agree(field_of: dict[str, Contender], data: Data, out: Data) -> None:
    """Every contender gives the same bytes, for every row; also one row at a time."""
    rows = peers.count(data)
    for name, contender in field_of.items():
        if name == "sequential read":
            continue
        fill = contender.open()
        for start in range(0, rows, BATCH):
            picks = list(range(start, min(start + BATCH, rows)))
            for array in out:
                out[array][:] = 0
            fill(out, picks)
            for array in out:
                assert np.array_equal(out[array][: len(picks)], data[array][picks]), f"{name} gives other bytes"


def one_pass(fill: Fill, out: Data, order: Sequence[int], batch: int, *, told: bool) -> tuple[float, float]:
    """(wall, CPU) seconds of an epoch."""
    soon = getattr(fill, "soon", None) if told else None
    wall, cpu = time.perf_counter(), time.process_time()
    if soon is not None:
        soon(order[: AHEAD * batch])
    for start in range(0, len(order), batch):
        if soon is not None:
            soon(order[start + AHEAD * batch : start + (AHEAD + 1) * batch])
        fill(out, order[start : start + batch])
    return time.perf_counter() - wall, time.process_time() - cpu


def warm(field_of: dict[str, Contender], out: Data, rows: int, rounds: int, batch: int) -> Times:
    """Epochs from the page cache, contenders taking turns; each has had a pass before."""
    fills = {name: contender.open() for name, contender in field_of.items()}
    times: Times = {name: [] for name in fills}
    rng = np.random.default_rng(1)
    for number in range(-1, rounds):
        order = rng.permutation(rows).tolist()
        names = list(fills)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            taken = one_pass(fills[name], out, order, batch, told=False)
            if number >= 0:
                times[name].append(taken)
    return times


def cold(field_of: dict[str, Contender], out: Data, rows: int, rounds: int) -> Times:
    """Epochs from the disk."""
    times: Times = {name: [] for name in field_of if name not in ("memcpy", TWO, UNCHECKED)}
    rng = np.random.default_rng(2)
    for number in range(rounds):
        order = rng.permutation(rows).tolist()
        names = list(times)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            contender = field_of[name]
            contender.resident.append(forget(contender.root))
            times[name].append(one_pass(contender.open(), out, order, BATCH, told=True))
            gc.collect()
    return times


def forget(root: Path) -> float:
    """Empties the page cache of the files below `root`; the share of their pages that stayed."""
    pages = stayed = 0
    for path in sorted(one for one in root.rglob("*") if one.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        here, still = resident(descriptor)
        pages, stayed = pages + here, stayed + still
        os.close(descriptor)
    return stayed / max(pages, 1)


def resident(descriptor: int) -> tuple[int, int]:
    """(pages of a file, those in the page cache)."""
    size = os.fstat(descriptor).st_size
    if not size:
        return 0, 0
    with mmap.mmap(descriptor, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE) as mapped:
        pages = (size + mmap.PAGESIZE - 1) // mmap.PAGESIZE
        seen, start = (ctypes.c_ubyte * pages)(), (ctypes.c_char * size).from_buffer(mapped)
        failed = ctypes.CDLL(None, use_errno=True).mincore(
            ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), seen)
        del start
    if failed:
        raise OSError(ctypes.get_errno(), "mincore")
    return pages, sum(one & 1 for one in seen)


def report(times: Times, gigabytes: float, against: Sequence[str]) -> str:
    """One line a contender."""
    rows = []
    for name, runs in times.items():
        walls = [wall for wall, _ in runs]
        ratios = [statistics.median(other / own for (other, _), own in zip(times[peer], walls, strict=True))
                  for peer in against if peer in times]
        rows.append((name, f"{gigabytes / statistics.median(walls):.2f}", f"{gigabytes / max(walls):.2f}",
                     f"{gigabytes / min(walls):.2f}", f"{statistics.median(cpu for _, cpu in runs) / gigabytes:.3f}",
                     *(f"{ratio:.3g}" for ratio in ratios)))
    shown = [peer for peer in against if peer in times]
    return table(("reader", "GB/s", "lowest", "highest", "CPU s/GB", *(f"x {peer}" for peer in shown)), rows)


def run(title: str, kind: Kind, rows: int, rounds: int, cold_rounds: int, directory: Path | None, write: bool) -> None:
    """All sections of one kind of row."""
    data = drawn(kind, rows)
    gigabytes = sum(one.nbytes for one in data.values()) / 1e9
    out = {name: np.zeros((BATCH, spec.row_bytes), np.uint8) for name, spec in arrays(kind).items()}
    with tempfile.TemporaryDirectory(dir=directory) as scratch:
        found = contenders(kind, data, Path(scratch))
        agree(found, data, out)
        head = f"{rows} rows, {gigabytes:.2f} GB, {rounds} rounds taking turns, CRC-32C checked.\n\n"
        in_batches = warm(found, out, rows, rounds, BATCH)
        emit(f"Reading {title} rows, warm, shuffled batches of {BATCH}",
             head + report(in_batches, gigabytes, ("memcpy", "MosaicML MDS")), write)
        one_row = {name: buffer[:1] for name, buffer in out.items()}
        singly = warm(found, one_row, rows, rounds, 1)
        emit(f"Reading {title} rows, warm, one by one",
             head + report(singly, gigabytes, ("memcpy", "MosaicML MDS")), write)
        if not cold_rounds:
            return
        from_disk = cold(found, out, rows, cold_rounds)
        stayed = max(max(one.resident, default=0.0) for one in found.values())
        head = (f"{rows} rows, {gigabytes:.2f} GB, {cold_rounds} rounds taking turns. At most {stayed:.1%} of a "
                "contender's pages had stayed in the page cache.\n\n")
        emit(f"Reading {title} rows, cold, shuffled batches of {BATCH}",
             head + report(from_disk, gigabytes, ("sequential read", "MosaicML MDS")), write)


def main() -> None:
    """Prints three tables for each kind of row."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cold", type=int, default=5, help="rounds from the disk; 0: none")
    parser.add_argument("--only", choices=("SDXL", "Flux"))
    parser.add_argument("--directory", type=Path, default=None, help="where to write the files; default: the system's")
    options = parser.parse_args()
    if options.rounds < 1 or options.cold < 0:
        parser.error(f"--rounds is {options.rounds} and --cold is {options.cold}, expected at least 1 and 0")
    rounds, cold_rounds, part = (3, min(1, options.cold), 4) if options.quick else (options.rounds, options.cold, 1)
    for title, kind, rows in (("SDXL", SDXL, 1024), ("Flux", FLUX, 96)):
        if options.only in (None, title):
            run(title, kind, rows // part, rounds, cold_rounds, options.directory, options.write)


if __name__ == "__main__":
    main()
