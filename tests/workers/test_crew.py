"""A crew does the same wherever its workers run; what goes wrong on a cluster is tested with scan and encode."""

from __future__ import annotations

import multiprocessing
import time
from threading import Event

import crew_work
import pytest

from prep.errors import CacheError, UsageError
from prep.workers.crew import ATTEMPTS, Crew, Failure, GivenUp, Lost, Worker
from prep.workers.processes import Processes, Threads


class Told:
    """A host whose workers answer at once what `answer(unit)` returns or raises, one unit at a time."""

    workers, ahead, at_once, where, advice = 1, 2, 1, "of a test", "look at the test"

    def __init__(self, answer):
        self.answer, self.sent, self.ended = answer, [], 0

    def start(self):
        return Worker(handle=object())

    def send(self, worker, unit):
        self.sent.append(unit)
        return len(self.sent), unit

    def wait(self, answers, seconds):
        return answers

    def take(self, answer):
        return self.answer(answer[1])

    def hear(self, worker, now):
        return None

    def end(self, worker):
        self.ended += 1


def lost(unit):
    if unit == 1:
        raise Lost("gone")
    return unit


def test_a_unit_is_given_up_and_those_that_waited_behind_it_are_not_to_blame():
    host, notes = Told(lost), []
    with Crew(host, note=notes.append) as crew:
        assert dict(crew.as_completed(range(4))) == {0: 0, 1: GivenUp("gone"), 2: 2, 3: 3}
    assert host.sent.count(1) == ATTEMPTS and notes == [f"note: {ATTEMPTS} workers of a test lost and replaced"]
    assert host.ended == ATTEMPTS + 1


def test_workers_that_are_lost_again_and_again_end_the_work():
    host = Told(lost)
    host.at_once = 2  # so that nobody knows which unit is to blame
    with pytest.raises(CacheError, match=r"7 workers of a test were lost in a row.* the last: gone") as error, \
            Crew(host) as crew:
        dict(crew.as_completed([1] * 9))
    assert error.value.hint.startswith("look at the test; finished work is kept")


@pytest.mark.parametrize("repeat", [True, False])
def test_an_error_that_may_not_come_again(repeat):
    host = Told(lambda unit: Failure(problem=None, said="odd"))
    with Crew(host, repeat=repeat) as crew:
        if repeat:
            assert list(crew.in_order([7])) == [GivenUp("odd")] and host.sent == [7] * ATTEMPTS
        else:
            with pytest.raises(RuntimeError, match="in a worker of a test: odd"):
                list(crew.in_order([7]))


def test_a_problem_ends_the_work():
    with pytest.raises(UsageError, match="no"), Crew(
            Told(lambda unit: Failure(problem=UsageError("no"), said="no")), repeat=True) as crew:
        list(crew.in_order([7]))


def test_after_a_stop_nothing_is_begun():
    host = Told(lambda unit: unit)
    with Crew(host, stopped=lambda: len(host.sent) > 0) as crew:
        assert list(crew.as_completed(range(9))) == [(0, 0)]
    assert host.sent[0] == 0 and crew.pending == 0


def test_a_unit_that_takes_too_long():
    host = Told(lambda unit: unit)
    host.wait = lambda answers, seconds: []
    with Crew(host, limit=lambda unit: -1) as crew:
        assert list(crew.in_order([0])) == [GivenUp("it took more than -1 s (--task-seconds)")]


def test_threads_give_results_in_the_order_of_the_units():
    def work(unit):
        time.sleep(0.02 * (unit == 0))
        return unit

    closed = []
    with Crew(Threads(work, 3, lambda: closed.append(1))) as crew:
        assert crew.at_once == 3 and list(crew.in_order(range(20))) == list(range(20))
    assert closed == [1]


def test_threads_that_are_interrupted_end_at_once():
    stop = Event()
    with pytest.raises(KeyboardInterrupt), Crew(Threads(lambda unit: stop.wait(60), 2, stop.set)) as crew:
        for unit in range(9):
            crew.add(unit)
        crew.step(0)
        raise KeyboardInterrupt
    assert stop.is_set()


def processes(work, workers, report=lambda *_: None):
    return Processes(multiprocessing.get_context("spawn"), work, workers,
                     lambda unit, code: OSError(f"unit {unit}, code {code}"), report)


def test_processes_do_a_unit_each_and_report():
    reports = []
    with Crew(processes(crew_work.square, 2, lambda *values: reports.append(values))) as crew:
        assert list(crew.in_order([3, 2])) == [9, 4]
    assert {("stage", "squaring", 3, "rows"), ("tick", "squaring", 3), ("tick", "squaring", 2)} <= set(reports)
    assert not multiprocessing.active_children()


def test_units_that_are_one_object_have_a_result_each():
    with Crew(processes(crew_work.square, 3)) as crew:
        assert list(crew.in_order([7, 2, 7])) == [49, 4, 49]


@pytest.mark.parametrize(("work", "error", "said"), [(crew_work.fail, ValueError, "unit 5"),
                                                     (crew_work.leave, OSError, "unit 5, code 3")])
def test_a_process_that_fails_ends_the_work(work, error, said):
    with pytest.raises(error, match=said), Crew(processes(work, 1)) as crew:
        list(crew.in_order([5]))
    assert not multiprocessing.active_children()
