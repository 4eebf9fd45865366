"""Nearest pictures and clusters are those of a plain search: exactly, whatever the blocks, whatever the order."""

from __future__ import annotations

import tracemalloc
from contextlib import contextmanager
from math import fsum, sqrt

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.similarity import neighbors as searching
from prep.similarity import vectors as blocks
from prep.similarity.clusters import clusters, usual_count
from prep.similarity.duplicates import resemblances
from prep.similarity.neighbors import nearest, neighbors
from prep.similarity.vectors import vectors_of

# Few directions, so that many rows are the same or equally far.
DIRECTIONS = st.tuples(*[st.integers(-2, 2)] * 3).filter(any)
SETS = st.lists(DIRECTIONS, min_size=1, max_size=14)


def rows_of(directions):
    rows = np.array(directions, float).reshape(len(directions), -1)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)


def cosine(first, second):
    """From exact sums."""
    def dot(one, two):
        return fsum(float(a) * float(b) for a, b in zip(one, two, strict=True))

    return dot(first, second) / (sqrt(dot(first, first)) * sqrt(dot(second, second)))


@contextmanager
def small_blocks(size, dense=16):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "BLOCK", size)
        patch.setattr(searching, "DENSE", dense)
        yield


def plain(rows, pictures, others, count):
    return [sorted((-cosine(rows[one], rows[two]), two) for two in others if two != one)[:count] for one in pictures]


def as_pairs(found):
    return [[(-cosine, other) for cosine, other in zip(*both, strict=True) if other >= 0]
            for both in zip(found.cosines.tolist(), found.others.tolist(), strict=True)]


@given(SETS, st.integers(1, 5), st.integers(1, 6), st.sampled_from([0, 16]), st.data())
def test_neighbors_are_those_of_a_plain_search(directions, count, block, dense, data):
    rows, every = rows_of(directions), list(range(len(directions)))
    some = sorted(data.draw(st.sets(st.sampled_from(every), min_size=1)))
    others = sorted(data.draw(st.sets(st.sampled_from(every))))
    ticked = []
    with small_blocks(block, dense):
        vectors = vectors_of(rows)
        assert as_pairs(neighbors(vectors, count, tick=ticked.append)) == plain(rows, every, every, count)
        assert as_pairs(neighbors(vectors, count, np.array(some))) == plain(rows, some, some, count)
        found = nearest(vectors, np.array(some), np.array(others, np.int64), count)
        assert as_pairs(found) == plain(rows, some, others, count)
    assert sum(ticked) == len(rows)


@given(SETS, st.floats(0.2, 1.0), st.integers(1, 6))
def test_a_picture_is_kept_unless_it_resembles_one_that_is(directions, least, block):
    rows = rows_of(directions)
    kept, dropped = [], []
    for one in range(len(rows)):
        best = max(((cosine(rows[one], rows[two]), -two) for two in kept), default=(-2.0, 0))
        if best[0] >= least:
            dropped.append((one, -best[1], best[0]))
        else:
            kept.append(one)
    with small_blocks(block):
        found = resemblances(vectors_of(rows), np.arange(len(rows)), least)
    assert [(each.picture, each.other, each.cosine) for each in found] == dropped


@given(SETS, st.integers(1, 6), st.integers(1, 6), st.randoms())
def test_clusters_depend_on_the_rows_alone(directions, count, block, random):
    rows = rows_of(directions)
    order = list(range(len(rows)))
    random.shuffle(order)
    found = clusters(vectors_of(rows), count)
    with small_blocks(block):
        other = clusters(vectors_of(rows, order), count)
    assert other.labels.tolist() == found.labels[order].tolist() and np.array_equal(other.places, found.places)
    sizes = np.bincount(found.labels).tolist()
    assert sizes == sorted(sizes, reverse=True) and min(sizes) > 0 and len(found) <= min(count, len(set(directions)))
    assert found.labels[found.medoids].tolist() == list(range(len(found)))
    for first in range(len(rows)):  # the same rows are in the same cluster
        assert len({found.labels[two] for two in order if rows[two].tobytes() == rows[first].tobytes()}) == 1
    assert len(found.places) == len(found) and np.allclose(np.average(found.places, axis=0, weights=sizes), 0)


def test_clusters_are_the_clumps_that_there_are():
    rng = np.random.default_rng(1)
    middles = np.eye(5, 64)[:, ::-1]
    truth = rng.permutation(np.repeat(np.arange(5), (40, 30, 20, 10, 5)))
    found = clusters(vectors_of(rows_of(middles[truth] + 0.04 * rng.normal(size=(105, 64)))), 5)
    assert sorted({(int(label), int(clump)) for label, clump in zip(found.labels, truth, strict=True)}) == [
        (0, 0), (1, 1), (2, 2), (3, 3), (4, 4)]
    assert (usual_count(1), usual_count(63), usual_count(5000), usual_count(10**6)) == (1, 6, 50, 64)


def test_exact_products_match_slow_ones_at_real_widths():
    """Of rows that differ by as little as float16 can say; the screen in float32 alone would take others."""
    rng = np.random.default_rng(2)
    base = rng.normal(size=(1, 768))
    rows, some = rows_of(base + 0.003 * rng.normal(size=(24, 768))), range(24)
    with small_blocks(7, dense=0):
        found = neighbors(vectors_of(rows), 3)
    assert as_pairs(found) == plain(rows, some, some, 3)
    mean = np.mean([-cosine for found in plain(rows, some, some, 23) for cosine, _ in found])
    assert vectors_of(rows).mean() == pytest.approx(mean, abs=1e-4)  # lengths are 1 but for rounding


def test_memory_stays_bounded_and_a_search_can_be_interrupted():
    rows = rows_of(np.random.default_rng(3).normal(size=(3000, 256)))
    rows[:1500] = rows[0]  # as blank pictures have: each tile is measured whole
    tracemalloc.start()
    try:
        found = neighbors(vectors_of(rows), 4)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 80 << 20
    assert found.others[:2].tolist() == [[1, 2, 3, 4], [0, 2, 3, 4]]
    assert found.cosines[1499, 3] == pytest.approx(1, abs=1e-12)

    def stop(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        neighbors(vectors_of(rows), 4, tick=stop)
