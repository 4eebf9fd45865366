"""The loader as the training loop sees it: how much of a 5 ms step is spent waiting for the next batch.

    python tests/benchmarks/bench_loader.py [--steps 300] [--rounds 9] [--directory DIR] [--write] [--quick]

The real thing: a manifest made by the real writers, its index, step plan, and `prep.loader.batches`: reading, CRC-32C,
masks, timesteps and float32 noise from keys. A step is 5 ms in which this thread sleeps, as it does while a GPU works.
`wait` is the time in `next(batches)`, for each step, without the first four, which find the ring empty. `flat out` is
the loop without a step: what the loader could feed. Last, how much of its speed plain Python in this thread keeps
while the loader runs flat out beside it. Target: 1 % of the step.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from results import emit, parser_of, table

from prep.batching.plan import step_plan
from prep.demo.tiny_model import build_random
from prep.loader.batches import Batch, batches
from prep.loader.draws import Dropout, training
from prep.loader.index import Index, open_index
from prep.loader.rows import Rows

STEP = 0.005
FILLING = 4  # batches that find the ring empty
KINDS = {  # pixels, tokens, width of the text, micro-batch
    "SD1.5 at 512, 16 a batch": (512, 77, 768, 16), "SDXL at 1024, 4 a batch": (1024, 77, 2048, 4),
    "SDXL at 1024, 16 a batch": (1024, 77, 2048, 16),
}


def made(root: Path, side: int, tokens: int, width: int, count: int) -> Index:
    """An index of `count` samples with masks, written as the tests write theirs."""
    sys.path.append(str(Path(__file__).parents[1] / "support"))
    import real_manifest as making

    making.BUCKETS, making.TOKENS, making.WIDTH = ((side, side),), tokens, width
    root.mkdir()
    build_random(root / "model")
    return open_index(making.build(root, root / "model", counts=(count,), validation=0, prompts=None).manifest)


def feed(index: Index, batch: int, steps: int) -> Iterator[Iterator[Batch]]:
    plan = step_plan(index.counts, seed=0, batch_size=batch, micro_batch=batch)
    requests = training(index, plan, 0, steps, dropout=Dropout(caption=0.1), timesteps=1000)
    return batches(Rows(index), requests, masked=True, pinned=False)


def stepping(index: Index, batch: int, steps: int) -> tuple[float, float]:
    """(share of a step that is waited for, CPU seconds for each step) of a loop that sleeps for its steps."""
    waits, cpu = [], time.process_time()
    with feed(index, batch, steps) as coming:
        while True:
            begun = time.perf_counter()
            if next(coming, None) is None:
                break
            waits.append(time.perf_counter() - begun)
            time.sleep(STEP)
    return statistics.mean(waits[FILLING:]) / STEP, (time.process_time() - cpu) / steps


def flat_out(index: Index, batch: int, steps: int) -> float:
    """Samples a second."""
    with feed(index, batch, steps) as coming:
        for _ in range(FILLING):
            next(coming)
        begun = time.perf_counter()
        for _ in coming:
            pass
        return (steps - FILLING) * batch / (time.perf_counter() - begun)


def speed(seconds: float) -> float:
    """Turns of a plain loop in this thread, a second."""
    turns, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end:
        turns += sum(range(100)) > 0
    return turns / seconds


def kept(index: Index, batch: int) -> float:
    """The share of this thread's speed that is left while a thread takes batches as fast as they come."""
    alone, stop = speed(0.3), threading.Event()

    def take() -> None:
        with feed(index, batch, 1 << 20) as coming:
            for _ in coming:
                if stop.is_set():
                    return

    taker = threading.Thread(target=take)
    taker.start()
    beside = speed(0.6)
    stop.set()
    taker.join()
    return beside / alone


def main() -> None:
    """Prints a line for each kind of row."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--directory", type=Path, default=None, help="where to write the cache; default: the system's")
    options = parser.parse_args()
    steps, rounds, count = (50, 3, 128) if options.quick else (options.steps, options.rounds, 512)
    rows = []
    with tempfile.TemporaryDirectory(dir=options.directory) as scratch:
        opened: dict[tuple[int, int], Index] = {}
        for name, (side, tokens, width, batch) in KINDS.items():
            if (side, width) not in opened:
                opened[side, width] = made(Path(scratch) / f"{side}", side, tokens, width, count)
            index = opened[side, width]
            runs = [(*stepping(index, batch, steps), flat_out(index, batch, steps // 2), kept(index, batch))
                    for _ in range(rounds)]
            waits, cpu, rate, python = zip(*runs, strict=True)
            rows.append((name, f"{statistics.median(waits):.2%}", f"{max(waits):.2%}",
                         f"{statistics.median(cpu) * 1e3:.2f}", f"{statistics.median(rate):.0f}",
                         f"{statistics.median(python):.2f}"))
    columns = ("rows", "wait / 5 ms step", "worst round", "CPU ms a step", "flat out, samples/s", "Python beside it")
    words = f"{steps} steps, {count} samples, {rounds} rounds; warm, masks and noise drawn, CRC-32C checked.\n\n"
    emit("The loader as the loop sees it", words + table(columns, rows), options.write)


if __name__ == "__main__":
    main()
