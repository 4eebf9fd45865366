"""Claims: every task is taken once, by whoever asks first."""

from __future__ import annotations

import multiprocessing
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from prep.encode.engines.claims import Claims, SharedClaims


def test_alone_every_task_is_free_and_failures_are_counted():
    claims = Claims()
    assert claims.take("a") and claims.take("a")
    assert [claims.failed(), claims.failed()] == [1, 2]


def test_each_task_is_taken_once():
    claims, tasks = SharedClaims(multiprocessing.get_context("spawn"), list("abcdefgh")), "abcdefgh"
    with ThreadPoolExecutor(4) as pool:
        taken = Counter(task for task, free in zip(tasks * 8, pool.map(claims.take, tasks * 8), strict=True) if free)
    assert taken == Counter(tasks)


def test_failures_are_counted_together():
    claims = SharedClaims(multiprocessing.get_context("spawn"), [])
    with ThreadPoolExecutor(4) as pool:
        assert sorted(pool.map(lambda _: claims.failed(), range(40))) == list(range(1, 41))


@pytest.mark.parametrize("kind", ["alone", "shared"])
def test_no_task_is_free_once_it_is_to_stop(kind):
    context = multiprocessing.get_context("spawn")
    claims, others = Claims(), SharedClaims(context, ["a", "b"]) if kind == "shared" else Claims()
    claims.tell(others)
    assert claims.take("a") and others.take("a") and not others.stopped
    claims.stop()
    assert not claims.take("b") and not others.take("b") and others.stopped
    late = SharedClaims(context, ["a"])
    claims.tell(late)
    assert not late.take("a")
