"""The thread that writes: order, bounded memory, errors, and what an interruption leaves."""

from __future__ import annotations

import signal
import threading
import time

import numpy as np
import pytest

from prep.encode.engines.writing import Abandoned, WritingThread, size_of


def rows_of(*keys, size=8):
    return [(key, {"latent": np.zeros(size, np.uint8)}) for key in keys]


def collector(found):
    return lambda rows: found.append([key for key, _ in rows])


def test_tasks_are_written_in_order_by_one_other_thread():
    found, threads = [], set()

    def consume(rows):
        threads.add(threading.get_ident())
        found.append([key for key, _ in rows])

    with WritingThread() as writing:
        for task in ("ab", "c", "", "def"):
            writing.write(consume, rows_of(*task))
    assert found == [["a", "b"], ["c"], [], ["d", "e", "f"]]
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_the_encoder_goes_on_while_the_disk_is_slow_but_no_further_than_memory_allows():
    slow, made = threading.Event(), []

    def rows():
        for row in rows_of(*"abcdefgh", size=40):
            made.append(row[0])
            yield row

    def consume(given):
        slow.wait(20)
        for _ in given:
            pass

    def release():
        patience = time.monotonic() + 10
        while len(made) < 3 and time.monotonic() < patience:
            time.sleep(0.01)
        time.sleep(0.2)  # more would come now, were there no limit
        held.append(len(made))
        slow.set()

    held: list[int] = []
    helper = threading.Thread(target=release)
    helper.start()
    with WritingThread(most_bytes=100) as writing:
        writing.write(consume, rows())
    helper.join()
    assert held == [3] and len(made) == 8  # two rows of 40 bytes wait, and the third is in the encoder's hands


def test_a_row_above_the_limit_is_written_alone():
    found = []
    with WritingThread(most_bytes=10) as writing:
        writing.write(collector(found), rows_of(*"abc", size=100))
    assert found == [["a", "b", "c"]]


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_an_error_of_the_thread_ends_the_run_and_nothing_more_is_written(kind):
    found, made = [], []

    def fail(rows):
        next(rows)
        raise kind(28, "No space left on device")

    def endless():
        while True:
            made.append(1)
            yield from rows_of("a")

    with pytest.raises(kind, match="No space left"), WritingThread(most_bytes=64) as writing:
        writing.write(fail, endless())
    assert len(made) < 50
    with pytest.raises(kind), WritingThread() as writing:  # also if it comes after the last row
        writing.write(fail, rows_of("a"))
        while writing._error is None:
            time.sleep(0.01)
        with pytest.raises(kind):
            writing.write(collector(found), rows_of("b"))
    assert found == []


def test_an_error_after_the_last_row_is_not_lost():
    def fail(rows):
        list(rows)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"), WritingThread() as writing:
        writing.write(fail, rows_of("a"))


def test_an_interruption_completes_earlier_tasks_and_abandons_its_own():
    found, ended, slow = [], [], threading.Event()

    def first(rows):
        slow.wait(20)
        found.append([key for key, _ in rows])

    def second(rows):
        try:
            found.append([key for key, _ in rows])
        except Abandoned:
            ended.append("abandoned")
            raise

    def interrupted():
        yield from rows_of("c")
        slow.set()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), WritingThread() as writing:
        writing.write(first, rows_of("a", "b"))
        writing.write(second, interrupted())
    assert found == [["a", "b"]] and ended == ["abandoned"]


def test_the_size_of_what_is_no_row():
    assert size_of(("key", "a reject")) == 0 and size_of(rows_of("a", size=9)[0]) == 9


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no such clock on this system")
def test_an_interruption_while_it_waits_for_the_last_task_leaves_no_thread_at_work():
    ended = []

    def slow(rows):
        list(rows)
        time.sleep(0.3)
        ended.append(writing.abandoned.is_set())

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt), WritingThread() as writing:
            writing.write(slow, rows_of("a"))
            signal.setitimer(signal.ITIMER_REAL, 0.1)
        assert ended == [True]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
