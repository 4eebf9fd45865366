"""Large data sets by counts of work, not by time: memory a sample, Python objects a sample, files opened for a batch.

tests/benchmarks/bench_scale.py measures a million samples with the same data; here it is twelve thousand.
"""

from __future__ import annotations

import gc
import os
import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_plans import micro_batches
from synthetic import Scale, build

from prep.batching.plan import step_plan
from prep.loader.batches import batches
from prep.loader.draws import training
from prep.loader.index import Index, open_index
from prep.loader.rows import Rows
from prep.manifest.describe import describe_manifest, describe_samples
from prep.manifest.document import Manifest, read_manifest
from prep.manifest.opened import open_manifest

SMALL, LARGE = (Scale(samples=samples, buckets=8, per_shard=500, batch_rows=512) for samples in (2_048, 12_288))
MORE = LARGE.samples - SMALL.samples
DIGESTING = 5 << 19  # bytes that reading a table to compare its digest takes at most, whatever its size


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[Scale, Manifest]:
    """A small and a large data set, alike."""
    root = tmp_path_factory.mktemp("scale")
    return {scale: build(root / str(scale.samples), scale) for scale in (SMALL, LARGE)}


def read(manifest: Manifest) -> Manifest:
    return read_manifest(manifest.path)


def peak_bytes(work: Callable[[], object]) -> int:
    """Bytes that Python and NumPy held at the most while `work` ran, and what Arrow holds after it; no mapped files."""
    work()  # what is loaded once is not a sample's
    gc.collect()
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        kept = work()
        peak = tracemalloc.get_traced_memory()[1] + pa.total_allocated_bytes() - before
        del kept
        return peak
    finally:
        tracemalloc.stop()


def blocks(work: Callable[[], object]) -> int:
    """Python objects (blocks of its allocator) that are still held after `work`."""
    work()
    gc.collect()
    before = sys.getallocatedblocks()
    kept = work()
    gc.collect()
    after = sys.getallocatedblocks()
    del kept
    return after - before


def first_batch(index: Index, size: int = 16) -> list[int]:
    """Reads the first step; the samples in it."""
    plan = step_plan(index.counts, seed=0, batch_size=size)
    with batches(Rows(index), training(index, plan, 0, 1, timesteps=1000), masked=True,
                 pinned=False) as made:
        return [shot.sample for batch in made for shot in batch.draws]


MOST = 200  # bytes a sample; a name as a Python string would be 80 of them, a sample as a dictionary 3,000
WORK: dict[str, Callable[[Manifest], object]] = {
    "train's index": lambda manifest: (index := open_index(read(manifest)), index.counts),
    "tables": lambda manifest: (audit := open_manifest(read(manifest)), audit.samples),
    "inspect": lambda manifest: describe_manifest(open_manifest(read(manifest))),
    "inspect --sample": lambda manifest: describe_samples(open_manifest(read(manifest)), "0000/00000007.png"),
}


@pytest.mark.parametrize("work", [
    work if work == "train's index" else pytest.param(work, marks=pytest.mark.slow) for work in WORK])
def test_a_sample_costs_numbers_and_no_objects(made, work):
    """Bytes for their columns, and no Python object each."""
    do = WORK[work]
    assert peak_bytes(lambda: do(made[LARGE])) < DIGESTING + MOST * LARGE.samples
    few, many = (blocks(lambda scale=scale: do(made[scale])) for scale in (SMALL, LARGE))
    assert many - few < 0.1 * MORE  # the shard table's rows; a shard has hundreds of samples


@pytest.mark.slow
def test_a_measure_of_objects_that_would_see_them(made):
    """The two measures find what they are there to find: a name held for each sample."""
    def names(scale: Scale) -> list[str]:
        return open_index(read(made[scale])).samples.table["name"].to_pylist()

    def columns(scale: Scale) -> list[np.ndarray]:
        return [np.ones(scale.samples) for _ in range(50)]

    assert blocks(lambda: names(LARGE)) - blocks(lambda: names(SMALL)) > 0.9 * MORE
    assert peak_bytes(lambda: columns(LARGE)) > 400 * LARGE.samples
    assert peak_bytes(lambda: pa.concat_arrays([pa.array(range(LARGE.samples))] * 50)) > 400 * LARGE.samples


OPENED: list[str] | None = None  # paths, while a test counts them


def _hook(event: str, arguments: tuple) -> None:
    if event == "open" and OPENED is not None and isinstance(arguments[0], str | bytes | os.PathLike):
        OPENED.append(os.fspath(arguments[0]))


@pytest.fixture
def opened() -> Iterator[list[str]]:
    """Every path that is opened during the test. The hook stays with the process, and then does nothing."""
    global OPENED
    if not getattr(sys, "_latentry_counts_opens", False):
        sys.addaudithook(_hook)
        sys._latentry_counts_opens = True  # type: ignore[attr-defined]
    OPENED = []
    yield OPENED
    OPENED = None


@pytest.mark.parametrize("scale", [SMALL, LARGE], ids=["small", "large"])
def test_the_first_batch_opens_its_own_shards(made, opened, scale):
    """A header, the shard index and the rows for each array of the batch's rows; no other shard."""
    index = open_index(read(made[scale]))
    assert not [path for path in opened if "shards" in Path(str(path)).parts]
    drawn = first_batch(index)
    views, texts = index.samples.views, index.samples.texts
    wanted = {index.shards[int(number)].digest for sample in drawn for number in
              (views["latent_shard"][sample], views["mask_shard"][sample], texts["shard"][sample]) if number >= 0}
    touched = Counter(Path(str(path)).relative_to(made[scale].cache_root).parts[2] for path in opened
                      if "shards" in Path(str(path)).parts)
    assert len(drawn) == 16 and set(touched) == wanted and max(touched.values()) <= 3


def test_a_manifest_has_one_size_for_any_number_of_samples(made):
    few, many = (made[scale].path.stat().st_size for scale in (SMALL, LARGE))
    assert many - few < 64 and many < 4096  # digits of counts


HUGE = tuple(2_400_000 + 5_003 * bucket for bucket in range(40))  # 10^8 samples in 40 buckets


@pytest.mark.parametrize("underfill", ["drop", "partial", "repeat"])
def test_a_plan_of_a_hundred_million_samples_takes_no_array_of_them(underfill):
    """Twenty steps of an epoch, what is left out and what is repeated: less than a byte for a hundred samples."""
    def steps() -> int:
        plan = step_plan(HUGE, seed=3, batch_size=256, micro_batch=64, underfill=underfill)
        last = plan.steps_per_epoch - 1
        shown = sum(len(part.occurrences) for number in range(0, last, last // 20) for part in plan.step(7, number))
        lists = (plan.left_out(7), plan.repeated(7))
        assert all(len(found) <= 2 * 64 + 256 for listed in lists for found in listed.values())
        assert underfill == "partial" or any(lists)
        return shown

    assert sum(HUGE) > 99_000_000
    assert peak_bytes(steps) < 1_000_000


def test_steps_of_a_hundred_million_samples_show_nothing_twice():
    """A thousand steps from all over an epoch: as many places, each in its bucket's range, none seen before."""
    plan = step_plan(HUGE, seed=3, batch_size=64, micro_batch=64)
    picks = np.random.default_rng(0).choice(plan.steps_per_epoch, 1000, replace=False)
    seen: dict[int, list[np.ndarray]] = {}
    for number in picks.tolist():
        for part in plan.step(0, number):
            seen.setdefault(part.bucket, []).append(part.occurrences)
    assert len(seen) == len(HUGE)
    for bucket, parts in seen.items():
        together = np.concatenate(parts)
        assert len(np.unique(together)) == len(together)
        assert together.min() >= 0 and together.max() < HUGE[bucket]
        assert abs(together.mean() / HUGE[bucket] - 0.5) < 0.15  # spread over the bucket, not its beginning


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 120), min_size=1, max_size=40), st.sampled_from([(16, 16), (16, 4), (7, 7), (1, 1)]),
       st.integers(-5, 1 << 40), st.integers(0, 1 << 20))
def test_each_sample_is_shown_once_an_epoch(counts, batch, seed, epoch):
    """Many buckets, uneven, some empty: the whole epoch is a permutation of the samples."""
    plan = step_plan(counts, seed=seed, batch_size=batch[0], micro_batch=batch[1])
    shown = Counter((part.bucket, int(one)) for part in micro_batches(plan, epoch) for one in part.occurrences)
    assert set(shown.values()) <= {1}
    assert set(shown) == {(bucket, one) for bucket, count in enumerate(counts) for one in range(count)}
