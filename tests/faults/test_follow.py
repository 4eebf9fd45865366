"""Who follows a plan that others follow, too: where it begins, and what it does when they end before it."""

from __future__ import annotations

import random
import shutil

import pytest

from prep.cache import plans
from prep.digest import digest_json
from prep.encode import plan as encode
from prep.encode.engines import order
from prep.encode.engines.claims import Claims

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu", "--json")


@pytest.fixture
def run(prep, setting, tmp_path, monkeypatch):
    """`run(*options)` encodes with tasks of two rows; the report."""
    monkeypatch.setattr(encode, "TASK_ROWS", 2)
    pictures, model = setting

    def go(*options, name="m.json"):
        result = prep("encode", pictures, "--model", model, "--cache", tmp_path / "cache", "-o", tmp_path / name,
                      *SMALL, *options)
        assert result.code == 0, result.err
        return result.json

    return go


class Job:
    """As much of a job as the order of tasks needs."""

    cache = None
    claims = Claims()


class Task:
    def __init__(self, key):
        self.key = key


def in_turn(tasks, writers, seed, monkeypatch):
    """What `writers` of one plan do when one finishes after the other, in any order: how often each task is made."""
    draw, done, made = random.Random(seed), set(), []
    monkeypatch.setattr(order, "is_done", lambda _, key: key in done)
    monkeypatch.setattr(order, "start_at", lambda left: draw.randrange(len(left)) if left else 0)
    at = dict.fromkeys(range(writers))
    all_tasks = [Task(key) for key in range(tasks)]
    orders = {number: order.unfinished(Job, order.from_random_start(all_tasks)) for number in at}
    while orders:
        number = draw.choice(sorted(orders))
        if at[number] is not None:
            done.add(at[number])
        task = next(orders[number], None)
        if task is None:
            del orders[number]
        else:
            at[number] = task.key
            made.append(task.key)
    return made


@pytest.mark.parametrize("writers", [1, 2, 8])
def test_every_task_is_done_and_seldom_twice(monkeypatch, writers):
    for seed in range(20):
        made = in_turn(100, writers, seed, monkeypatch)
        assert set(made) == set(range(100))
        assert len(made) - 100 <= 8 * (writers - 1), "most of the work is done twice"


def test_a_run_alone_does_its_tasks_in_their_order_from_anywhere(monkeypatch):
    made = in_turn(10, 1, 3, monkeypatch)
    assert made == [(made[0] + step) % 10 for step in range(10)]


def test_work_that_another_ended_between_look_and_plan_is_not_done_again(run, tmp_path, monkeypatch):
    """The other's plan is gone, too: nothing but a second look can tell."""
    run()
    shutil.move(tmp_path / "cache", tmp_path / "done")
    plain = plans.write_plan

    def late(cache, wanted, tasks):
        for kind in ("shards", "commits"):
            shutil.copytree(tmp_path / "done" / kind, cache.root / kind)
        return plain(cache, wanted, tasks)

    monkeypatch.setattr(encode, "write_plan", late)
    again = run()
    assert sum(again["encoded"].values()) == 0 and not list((tmp_path / "cache" / "plans").iterdir())


def test_rows_lost_since_the_plan_was_made_are_made_again(run, monkeypatch):
    """A run was interrupted, and then a finished shard was lost, of whose rows the stored plan says nothing."""
    plain = plans.write_plan
    monkeypatch.setattr(encode, "write_plan", lambda cache, wanted, tasks: plain(cache, wanted, tasks[1:-1]))
    report = run("--mask", "sidecar")
    assert report["encoded"] == {"latent": 5, "mask": 2, "text": 4} and not report["rejected"]


def test_a_torn_plan_goes_with_the_run(run, tmp_path, monkeypatch):
    plain = plans.write_plan

    def tear(cache, wanted, tasks):
        stored = plain(cache, wanted, tasks)
        cache.plan(wanted).write_bytes(b"half")
        return stored

    monkeypatch.setattr(encode, "write_plan", tear)
    run()
    assert not list((tmp_path / "cache" / "plans").iterdir())


def test_the_key_of_a_task_is_the_digest_of_its_document():
    """It is spelled without the JSON library."""
    for field, rows in (("latent", ["0" * 64]), ("text", ["ab" * 32, "cd" * 32, "ef" * 32])):
        assert encode._task(field, rows).key == digest_json({"kind": "task", "field": field, "rows": rows})
