"""A plan is followed by whoever comes later; a damaged one is made again."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prep.cache import plans
from prep.cache.ledger.columns import unpacked
from prep.cache.records import Task
from prep.cache.store import Cache, open_cache

WANTED = "ef" * 32
TASKS = (
    Task(key="ab" * 32, field="latent", rows=("01" * 32, "02" * 32)),
    Task(key="cd" * 32, field="text", rows=("03" * 32,)),
)


def stored(cache: Cache) -> tuple[Task, ...] | None:
    """The tasks of the stored plan."""
    plan = plans.read_plan(cache, WANTED)
    return None if plan is None else tuple(plan)


def test_the_first_plan_is_followed(cache: Cache) -> None:
    assert stored(cache) is None
    assert plans.write_plan(cache, WANTED, TASKS) == TASKS
    assert plans.write_plan(cache, WANTED, TASKS[:1]) == TASKS
    assert stored(cache) == TASKS
    plans.remove_plan(cache, WANTED)
    plans.remove_plan(cache, WANTED)
    assert stored(cache) is None


def test_a_plan_that_is_followed_is_young_again(cache: Cache) -> None:
    plans.renew_plan(cache, WANTED)  # there is none
    assert plans.plans_of(cache) == {}
    plans.write_plan(cache, WANTED, TASKS)
    os.utime(cache.plan(WANTED), (1e9, 1e9))
    assert plans.plans_of(cache) == {WANTED: 1e9}
    plans.renew_plan(cache, WANTED)
    assert plans.plans_of(cache)[WANTED] > 1.7e9 and stored(cache) == TASKS


def test_an_empty_plan(cache: Cache) -> None:
    assert plans.write_plan(cache, WANTED, []) == ()
    assert stored(cache) == ()


def test_a_plan_knows_its_keys_and_rows_without_its_tasks(cache: Cache) -> None:
    plans.write_plan(cache, WANTED, TASKS)
    plan = plans.read_plan(cache, WANTED)
    assert plan is not None and list(plan.task_keys()) == [task.key for task in TASKS]
    assert unpacked(plan.row) == [key for task in TASKS for key in task.rows]


@pytest.mark.parametrize("change", [lambda data: data[:40], lambda data: b"", lambda data: bytes(len(data))])
def test_a_torn_plan_is_made_again(cache: Cache, change: Callable[[bytes], bytes]) -> None:
    plans.write_plan(cache, WANTED, TASKS)
    cache.plan(WANTED).write_bytes(change(cache.plan(WANTED).read_bytes()))
    assert stored(cache) is None
    assert plans.write_plan(cache, WANTED, TASKS[:1]) == TASKS[:1]
    assert stored(cache) == TASKS[:1]


def test_another_table_is_no_plan(cache: Cache) -> None:
    plans.write_plan(cache, WANTED, TASKS)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, pa.schema({"a": pa.int32()})):
        pass
    body = sink.getvalue().to_pybytes()
    cache.plan(WANTED).write_bytes(body + hashlib.sha256(body).digest())
    assert stored(cache) is None


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 1 << 30), bit=st.integers(0, 7))
def test_a_flipped_bit_never_makes_another_plan(
    tmp_path_factory: pytest.TempPathFactory, place: int, bit: int
) -> None:
    cache = open_cache(tmp_path_factory.getbasetemp() / "plans", create=True)
    plans.remove_plan(cache, WANTED)
    plans.write_plan(cache, WANTED, TASKS)
    data = bytearray(cache.plan(WANTED).read_bytes())
    data[place % len(data)] ^= 1 << bit
    cache.plan(WANTED).write_bytes(data)
    assert stored(cache) in (None, TASKS)
