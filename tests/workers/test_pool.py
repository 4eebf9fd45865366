"""A pool of workers: each question gets its own answer, whatever the files make of the process that gives it."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import odd_service
import pytest
from odd_service import DO, SERVICE

from prep.parse import Unparsed
from prep.workers import pool as pools
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.protocol import HEADER, PART, QUESTION, VERSION, frame_of
from prep.workers.service import Limits
from prep.workers.worker import serve

ROOM = Limits(seconds=60, memory=1 << 30)
# A worker finds the module of its service as a command does, and these tests' one lies beside them.
CODE = (f"import sys; sys.path[:0] = [{str(Path(__file__).parents[2])!r}, {str(Path(odd_service.__file__).parent)!r}]; "
        "from prep.workers.worker import main; main()")

posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and limits are POSIX's")


def pool(**options) -> WorkerPool:
    return WorkerPool(SERVICE, **{"command": ("-c", CODE), **options})


@pytest.fixture
def workers():
    with pool() as found:
        yield found


def lost(workers: WorkerPool, what: str, limits: Limits = ROOM) -> tuple[str, str]:
    with pytest.raises(WorkerLost) as error:
        workers.ask(DO, (what, 0), limits)
    return error.value.cause, error.value.detail


@pytest.mark.parametrize("processes", [True, False])
def test_an_answer_has_all_its_parts_in_order(processes):
    with pool(processes=processes) as workers:
        assert workers.ask(DO, ("count", 10_000), ROOM) == list(range(10_000))
        assert workers.ask(DO, ("count", 0), ROOM) == []
        assert workers.started == processes


def test_threads_get_their_own_answers(workers):
    counts = [count % 7 for count in range(200)]
    with ThreadPoolExecutor(3) as threads:
        found = list(threads.map(lambda count: workers.ask(DO, ("count", count), ROOM), counts))
    assert found == [list(range(count)) for count in counts] and workers.started <= 3


@posix
def test_each_way_to_die(workers):
    assert lost(workers, "crash") == ("crash", "by SIGSEGV")
    assert lost(workers, "leave") == ("crash", "with exit code 3")
    assert lost(workers, "eat") == ("memory", "more than 1.0 GiB of memory")
    assert lost(workers, "hang", Limits(seconds=1, memory=1 << 30)) == ("slow", "more than 1 seconds")
    assert lost(workers, "other type")[0] == "crash"
    assert workers.ask(DO, ("count", 3), ROOM) == [0, 1, 2], "the next one is as good as any"


@posix
def test_a_worker_that_is_late_while_it_answers_is_lost(workers):
    """Parts that come and come give it no more time."""
    assert lost(workers, "for ever", Limits(seconds=1, memory=1 << 30))[0] == "slow"


def test_a_bug_of_ours_is_told_as_one(workers):
    with pytest.raises(RuntimeError, match=r"(?s)in a worker: .*ZeroDivisionError"):
        workers.ask(DO, ("bug", 0), ROOM)


def test_a_worker_that_died_between_two_questions_is_replaced(workers):
    assert workers.ask(DO, ("count", 2), ROOM) == [0, 1]
    (worker,) = workers._all
    worker._process.kill()
    worker._process.wait()
    assert workers.ask(DO, ("count", 2), ROOM) == [0, 1] and workers.started == 2


def test_a_worker_that_is_never_ready_is_not_waited_for(monkeypatch):
    monkeypatch.setattr(pools, "START", 0.2)
    with pool(command=("-c", "import time; time.sleep(60)")) as workers:
        assert workers.ask(DO, ("count", 2), ROOM) == [0, 1] and workers.started == 0


def says(data: bytes) -> WorkerPool:
    ready = b"R" + len(VERSION).to_bytes(4, "little") + VERSION
    return pool(command=("-c", f"import sys; sys.stdout.buffer.write({ready + data!r}); sys.stdout.flush(); "
                               "sys.stdin.buffer.read(9)"))


@pytest.mark.parametrize("data", [b"\xff" * 9, b"P\xff\xff\xff\xff", b"P\5\0\0\0abc", b"R\0\0\0\0",
                                  bytes(frame_of(PART, "no number"))], ids=repr)
def test_an_answer_that_is_cut_too_long_or_of_another_kind_is_none(data):
    with says(data) as workers:
        assert lost(workers, "count")[0] == "crash"


def test_an_answer_has_a_bound(monkeypatch):
    monkeypatch.setattr(pools, "MOST_ANSWERED", 4000)
    with pool() as workers:
        assert lost_of(workers, 5000) == "crash"
        assert workers.ask(DO, ("count", 20), ROOM) == list(range(20))


def lost_of(workers: WorkerPool, count: int) -> str:
    with pytest.raises(WorkerLost, match="with an invalid answer: frame of kind") as error:
        workers.ask(DO, ("count", count), ROOM)
    return error.value.cause


def test_a_question_that_is_too_long_is_not_sent(monkeypatch, workers):
    monkeypatch.setattr("prep.workers.protocol.MOST_BYTES", 1000)
    assert lost(workers, "x" * 2000) == ("memory", "more than 1.0 GiB of memory")
    assert workers.ask(DO, ("count", 1), ROOM) == [0]


def test_a_closed_pool_answers_nothing(workers):
    """Least of all in this process: after Ctrl-C, say."""
    for closed in (workers, pool(processes=False)):
        closed.close()
        assert lost(closed, "count") == ("closed", "the command ended before")


def test_a_worker_that_starts_while_the_pool_closes_is_ended(monkeypatch):
    begun, plain = [], pools._start

    def start(command):
        begun.append(plain(command))
        if len(begun) == 2:
            workers.close()
            workers._watch.join(10)  # it ends as the pool is closed
        return begun[-1]

    monkeypatch.setattr(pools, "_start", start)
    with pool() as workers:
        assert lost(workers, "leave")[0] == "crash"
        assert lost(workers, "count") == ("closed", "the command ended before")
        assert all(worker._process.poll() is not None for worker in begun) and not workers._all


def test_closing_ends_workers_whatever_they_do(workers):
    endings = []

    def ask() -> None:
        try:
            workers.ask(DO, ("hang", 0), ROOM)
        except WorkerLost as error:
            endings.append(error.cause)

    thread = threading.Thread(target=ask)
    thread.start()
    while not workers._all or not workers.started:
        time.sleep(0.01)
    (worker,) = workers._all
    workers.close()
    thread.join(30)
    assert not thread.is_alive() and endings and worker._process.poll() == -signal.SIGKILL


@pytest.mark.parametrize("kinds", [(QUESTION, HEADER), (HEADER, HEADER), (PART, QUESTION)])
def test_a_worker_answers_nothing_but_questions(kinds):
    stream = io.BytesIO(b"".join(bytes(frame_of(kind, None)) for kind in kinds))
    with pytest.raises(Unparsed, match=f"frames of kind {kinds[0]} and {kinds[1]}, expected a question"):
        serve(SERVICE, stream, io.BytesIO())


@posix
def test_a_worker_keeps_what_it_prints_to_itself(workers, capfd):
    assert workers.ask(DO, ("print", 0), ROOM) == [7]
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="Linux alone has it")
def test_workers_are_the_first_to_go_when_memory_runs_out(workers):
    workers.ask(DO, ("count", 0), ROOM)
    (worker,) = workers._all
    assert Path(f"/proc/{worker._process.pid}/oom_score_adj").read_text() == "1000\n"
    assert Path(f"/proc/{os.getpid()}/oom_score_adj").read_text() != "1000\n"
