"""Warm shuffled batches of 16 SDXL rows: our reader against memcpy and against one file per sample.

    python tests/benchmarks/bench_read.py [--rows 256] [--rounds 11] [--directory DIR]

A row is latent 4x128x128 and text 77x2048 in bfloat16, mask 1x128x128 in uint8: 463 kB. Every contender fills the same
reused batch buffers, in the same shuffled order, one after another within each round; what is compared is the median
of the rounds. Bytes are compared once before anything is timed. Our reader checks CRC-32C on every row, in all its
numbers but the one that says so; .npz checks CRC-32; the others check nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from prep.cache.reader import Reader
from prep.cache.store import open_cache
from prep.cache.writer import ShardWriter
from prep.records import ArraySpec, RowRef

BATCH = 16
SPECS = {
    "latent": ArraySpec(name="latent", dtype="bfloat16", shape=(4, 128, 128)),
    "mask": ArraySpec(name="mask", dtype="uint8", shape=(1, 128, 128)),
    "text": ArraySpec(name="hidden", dtype="bfloat16", shape=(77, 2048)),
}
ROW_BYTES = sum(spec.row_bytes for spec in SPECS.values())
Buffers = dict[str, np.ndarray]
Fill = Callable[[Buffers, list[int]], None]


def drawn(rows: int) -> Buffers:
    """Random bits, uint8 [rows, row_bytes] for each field; no reader here looks at values."""
    rng = np.random.default_rng(0)
    return {field: rng.integers(0, 256, (rows, spec.row_bytes), np.uint8) for field, spec in SPECS.items()}


def memcpy(data: Buffers) -> Fill:
    def fill(out: Buffers, picks: list[int]) -> None:
        for field, rows in data.items():
            target = out[field]
            for place, pick in enumerate(picks):
                target[place] = rows[pick]

    return fill


def latentry(data: Buffers, root: Path, *, check: bool) -> Fill:
    cache = open_cache(root, create=True)
    keys = sorted(hashlib.sha256(str(row).encode()).hexdigest() for row in range(len(data["latent"])))
    refs = {}
    for field, spec in SPECS.items():
        with ShardWriter(cache, field, [spec]) as writer:
            for key, row in zip(keys, data[field], strict=True):
                writer.add(key, {spec.name: memoryview(row)})
            shard = writer.finish()
        refs[field] = [RowRef(shard=shard.digest, row=row) for row in range(shard.rows)]
    reader = Reader(root, check=check)

    def fill(out: Buffers, picks: list[int]) -> None:
        for field, spec in SPECS.items():
            places = refs[field]
            reader.read_batch(out[field], spec.name, [places[pick] for pick in picks])

    return fill


def npz(data: Buffers, root: Path) -> Fill:
    root.mkdir()
    for row in range(len(data["latent"])):
        np.savez(root / f"{row}.npz", **{field: rows[row] for field, rows in data.items()})

    def fill(out: Buffers, picks: list[int]) -> None:
        for place, pick in enumerate(picks):
            with np.load(root / f"{pick}.npz") as stored:
                for field in SPECS:
                    out[field][place] = stored[field]

    return fill


def torch_pt(data: Buffers, root: Path) -> Fill:
    root.mkdir()
    for row in range(len(data["latent"])):
        torch.save({field: torch.from_numpy(rows[row].copy()) for field, rows in data.items()}, root / f"{row}.pt")

    def fill(out: Buffers, picks: list[int]) -> None:
        for place, pick in enumerate(picks):
            stored = torch.load(root / f"{pick}.pt", weights_only=True)
            for field in SPECS:
                out[field][place] = stored[field].numpy()

    return fill


def safetensors(data: Buffers, root: Path) -> Fill:
    root.mkdir()
    for row in range(len(data["latent"])):
        tensors = {field: torch.from_numpy(rows[row].copy()) for field, rows in data.items()}
        save_file(tensors, root / f"{row}.safetensors")

    def fill(out: Buffers, picks: list[int]) -> None:
        for place, pick in enumerate(picks):
            stored = load_file(root / f"{pick}.safetensors")
            for field in SPECS:
                out[field][place] = stored[field].numpy()

    return fill


def agree(fills: dict[str, Fill], data: Buffers, out: Buffers) -> None:
    """Every contender gives the same bytes, for every row."""
    rows = len(data["latent"])
    for name, fill in fills.items():
        for start in range(0, rows, BATCH):
            picks = list(range(start, min(start + BATCH, rows)))
            fill(out, picks)
            for field in SPECS:
                assert np.array_equal(out[field][: len(picks)], data[field][picks]), f"{name} gives other bytes"


def measure(fills: dict[str, Fill], out: Buffers, rows: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """(wall, CPU) seconds of a shuffled epoch, for each round, contenders taking turns."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in fills}
    rng = np.random.default_rng(1)
    for number in range(rounds):
        order = rng.permutation(rows).tolist()
        names = list(fills)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            wall, cpu = time.perf_counter(), time.process_time()
            for start in range(0, rows - BATCH + 1, BATCH):
                fills[name](out, order[start : start + BATCH])
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    return times


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--directory", type=Path, default=None, help="where to write the files; default: the system's")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = drawn(options.rows)
    out = {field: np.empty((BATCH, spec.row_bytes), np.uint8) for field, spec in SPECS.items()}
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        root = Path(scratch)
        fills = {
            "memcpy": memcpy(data),
            "latentry": latentry(data, root / "cache", check=True),
            "latentry, unchecked": latentry(data, root / "cache", check=False),
            "safetensors": safetensors(data, root / "safetensors"),
            ".pt (torch.save)": torch_pt(data, root / "pt"),
            ".npz": npz(data, root / "npz"),
        }
        agree(fills, data, out)
        times = measure(fills, out, options.rows, options.rounds)
    report(times, options.rows // BATCH * BATCH * ROW_BYTES / 1e9)


def report(times: dict[str, list[tuple[float, float]]], gigabytes: float) -> None:
    """One line a contender; ratios are medians of the rounds' own ratios, which a busy machine moves least."""
    print(f"{'reader':22}{'GB/s':>8}{'lowest':>8}{'highest':>8}{'CPU s/GB':>10}{'x memcpy':>10}{'x .npz':>8}")
    for name, rounds in times.items():
        speeds = [gigabytes / wall for wall, _ in rounds]
        cpu = statistics.median(cpu for _, cpu in rounds) / gigabytes
        ratios = [
            statistics.median(other / own for (other, _), (own, _) in zip(times[peer], rounds, strict=True))
            for peer in ("memcpy", ".npz")
        ]
        print(f"{name:22}{statistics.median(speeds):8.2f}{min(speeds):8.2f}{max(speeds):8.2f}{cpu:10.3f}"
              f"{ratios[0]:10.2f}{ratios[1]:8.1f}")


if __name__ == "__main__":
    main()
