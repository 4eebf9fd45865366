"""Jobs of a project: their states, whatever ends the processes behind them, and the order of their turns."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.errors import PathError, UsageError
from prep.jobs.job import Job, Stop, checked_words, read_job
from prep.jobs.log import tail
from prep.jobs.queue import add, again, changing, first, job_of, jobs_of, remove, stop
from prep.jobs.runner import Runner, _next
from prep.runtime import main_of, python

QUICK = ("prep", "codes")
PATIENCE = 60.0  # seconds, on a busy machine


def wait_for(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def lasting(tmp_path: Path) -> tuple[str, ...]:
    """A command that goes on until it is ended."""
    from PIL import Image

    (tmp_path / "photos").mkdir()
    Image.new("RGB", (300, 300), "red").save(tmp_path / "photos" / "a.png")
    return ("prep", "view", "photos", "--no-open")


def started(project: Path, runner: Runner) -> Job:
    """The first job, which the runner has started and whose command has printed something."""
    runner.step()
    wait_for(lambda: bool(tail(job_of(project, "1"), 1 << 16)) or job_of(project, "1").is_over)
    return job_of(project, "1")


def states(project: Path) -> list[str]:
    return [job.state for job in jobs_of(project)]


def test_jobs_run_one_after_another_in_the_projects_directory(tmp_path: Path) -> None:
    add(tmp_path, QUICK)
    add(tmp_path, ("prep", "scan", "missing"))
    add(tmp_path, ("prep", "init", "--help"))
    seen: list[list[str]] = []
    Runner(tmp_path).run(lambda jobs: seen.append([job.state for job in jobs]))
    assert all(states.count("running") <= 1 for states in seen)
    assert states(tmp_path) == ["done", "failed", "done"]
    assert [job_of(tmp_path, name).code for name in "123"] == [0, 5, 0]
    assert "source missing does not exist" in tail(job_of(tmp_path, "2"), 1 << 16)
    assert "decoder-crashed" in tail(job_of(tmp_path, "1"), 1 << 16)


def test_findings_are_no_failure(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "empty.png").touch()
    add(tmp_path, ("prep", "scan", "photos"))
    Runner(tmp_path).run()
    assert [(job.state, job.code) for job in jobs_of(tmp_path)] == [("done", 1)]
    assert "done with findings after" in jobs_of(tmp_path)[0].says


def test_job_is_stopped(tmp_path: Path, lasting: tuple[str, ...]) -> None:
    add(tmp_path, lasting)
    runner = Runner(tmp_path)
    assert started(tmp_path, runner).state == "running"
    assert stop(tmp_path, "1").stopping == "soon"
    wait_for(lambda: job_of(tmp_path, "1").is_over)
    assert job_of(tmp_path, "1").state in ("stopped", "done")  # which it is, its command says by its exit code
    with pytest.raises(UsageError, match="job 000001 is over"):
        stop(tmp_path, "1")


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_job_is_stopped_now_with_all_that_it_started(tmp_path: Path, lasting: tuple[str, ...]) -> None:
    add(tmp_path, lasting)
    started(tmp_path, Runner(tmp_path))
    stop(tmp_path, "1", "now")
    wait_for(lambda: job_of(tmp_path, "1").is_over)
    assert (job_of(tmp_path, "1").state, job_of(tmp_path, "1").code) == ("stopped", 128 + signal.SIGKILL)


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
@pytest.mark.parametrize("how", ["soon", "now", ""])
def test_job_outlives_who_started_it_and_its_keeper(how: Stop | Literal[""], tmp_path: Path,
                                                  lasting: tuple[str, ...]) -> None:
    add(tmp_path, lasting)
    run = subprocess.Popen(python(*main_of("prep.cli.main"), "jobs", "run", str(tmp_path)), stderr=subprocess.DEVNULL)
    wait_for(lambda: bool(tail(job_of(tmp_path, "1"), 1 << 16)))
    run.kill()
    run.wait()
    assert states(tmp_path) == ["running"]
    keeper, child = (json.loads((tmp_path / "jobs" / "000001" / name).read_bytes())["pid"]
                     for name in ("started.json", "child.json"))
    os.kill(keeper, signal.SIGKILL)
    wait_for(lambda: job_of(tmp_path, "1").alone == child)
    add(tmp_path, QUICK)
    Runner(tmp_path).step()
    assert states(tmp_path) == ["running", "waiting"]  # its device is not free
    assert "running, without its keeper" in job_of(tmp_path, "1").says
    with pytest.raises(UsageError, match="job 000001 runs"):
        remove(tmp_path, "1")
    if how:
        stop(tmp_path, "1", how)
    else:
        os.killpg(child, signal.SIGKILL)
    wait_for(lambda: job_of(tmp_path, "1").is_over)
    assert job_of(tmp_path, "1").state == ("stopped" if how else "lost")
    assert again(tmp_path, "1").words == lasting


def test_job_has_one_keeper(tmp_path: Path) -> None:
    job = add(tmp_path, QUICK)
    for _ in range(3):
        subprocess.run(python(*main_of("prep.jobs.keeper"), str(job.folder)), check=True)
    wait_for(lambda: job_of(tmp_path, "1").is_over)
    assert tail(job_of(tmp_path, "1"), 1 << 16).count("decoder-crashed") == 1


def test_order_is_kept_and_changed(tmp_path: Path) -> None:
    for _ in range(3):
        add(tmp_path, QUICK)
    first(tmp_path, "3")
    assert [job.name for job in jobs_of(tmp_path)] == ["000003", "000001", "000002"]
    stop(tmp_path, "1")  # which waits: it is removed
    add(tmp_path, QUICK)
    assert [job.name for job in jobs_of(tmp_path)] == ["000003", "000002", "000004"]
    remove(tmp_path, "3")
    (tmp_path / "jobs" / "order.json").write_text("{")
    assert [job.name for job in jobs_of(tmp_path)] == ["000002", "000004"]


def test_number_of_a_removed_job_has_not_its_turn(tmp_path: Path) -> None:
    for _ in range(3):
        add(tmp_path, QUICK)
    first(tmp_path, "3")
    remove(tmp_path, "3")
    assert add(tmp_path, QUICK).name == "000003"
    assert [job.name for job in jobs_of(tmp_path)] == ["000001", "000002", "000003"]


@given(st.lists(st.tuples(st.sampled_from(["running", "waiting", "done"]),
                          st.sampled_from(["", "cpu", "cuda", "cuda:0", "cuda:1", "cuda:0,cuda:1", "all"]))))
def test_no_two_jobs_share_a_device_and_none_overtakes(given_jobs: list[tuple[str, str]]) -> None:
    jobs = [Job(folder=Path(f"{number:06}"), words=("prep", "encode", "--device", device), added=0.0,
                state=state)  # type: ignore[arg-type]
            for number, (state, device) in enumerate(given_jobs)]
    turns = _next(jobs)

    def shares(one: Job, other: Job) -> bool:
        every = [set(job.device.split(",")) for job in (one, other)]
        on_cuda = all(job.device.startswith("cuda") for job in (one, other)) and {"cuda"} in every
        return bool(every[0] & every[1]) or on_cuda or any(each <= {"", "all"} for each in every)

    before = [job for job in jobs if job.state == "running"]
    for job in (job for job in jobs if job.state == "waiting"):
        assert (job in turns) == (not any(shares(job, other) for other in before))
        before.append(job)


def test_training_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    add(tmp_path, ("train", "run", "missing.json", "-o", "run", "--steps", "3"))
    Runner(tmp_path).run()
    assert states(tmp_path) == ["failed"]
    assert again(tmp_path, "1").words == ("train", "run", "missing.json", "-o", "run", "--steps", "3")
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    assert again(tmp_path, "1").words == ("train", "run", "--resume", "-o", "run")


def test_training_without_o_goes_on_where_it_wrote(tmp_path: Path) -> None:
    words = ("train", "run", "sets/cats.json", "--steps", "3")
    job = add(tmp_path, words)
    (job.folder / "ended.json").write_text('{"code": 130, "stopped": true, "time": 1.0}')
    assert again(tmp_path, "1").words == words
    (tmp_path / "runs" / "cats" / "checkpoints" / "step-000001").mkdir(parents=True)
    assert again(tmp_path, "1").words == ("train", "run", "--resume", "-o", "runs/cats")


@pytest.mark.skipif(sys.platform == "win32", reason="permissions of POSIX")
def test_queue_is_its_owners_alone_and_what_crashes_left_is_removed(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        job = add(tmp_path, QUICK)
    finally:
        os.umask(before)
    assert job.folder.parent.stat().st_mode & 0o777 == 0o700
    left = job.folder.parent / f".{'0' * 16}.partial"
    (left / "inner").mkdir(parents=True)
    left.with_name(f".{'1' * 16}.partial").touch()
    first(tmp_path, "1")
    assert sorted(path.name for path in job.folder.parent.iterdir()) == ["000001", "lock", "order.json"]


@pytest.mark.parametrize(("words", "more"), [
    (("-orun",), ()), (("--output=run",), ()), (("--output", "run"), ()), (("-o", "other", "-o", "run"), ()),
    (("--device=cuda:1", "-o", "run"), ("--device", "cuda:1"))])
def test_training_that_goes_on_has_its_directory_and_device(tmp_path: Path, words: tuple[str, ...],
                                                            more: tuple[str, ...]) -> None:
    (tmp_path / "run" / "checkpoints" / "step-000001").mkdir(parents=True)
    job = add(tmp_path, ("train", "run", "missing.json", *words))
    (job.folder / "ended.json").write_text('{"code": 130, "stopped": true, "time": 1.0}')
    assert again(tmp_path, "1").words == ("train", "run", "--resume", "-o", "run", *more)


@pytest.mark.parametrize(("words", "says"), [
    ((), "the command is empty, expected one of prep or train"), (("prep",), "expected one of prep or train"),
    (("ls", "-l"), "expected one of prep or train"), (("/usr/bin/prep", "scan"), "expected one of prep or train"),
    (("prep", "a\0b"), "the command has a null character, which no program takes"),
    (("prep", *"a" * 1000), "the command has 1001 words of 1004 characters, expected at most 1000 of 65536"),
    (("prep", "a" * 70_000), "the command has 2 words of 70004 characters, expected at most 1000 of 65536"),
    (("prep", "jobs", "run", "."), "the command is prep jobs, which starts jobs itself"),
    (("prep", "studio", "."), "the command is prep studio, which starts jobs itself")])
def test_other_commands_are_refused(tmp_path: Path, words: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        add(tmp_path, words)
    assert not (tmp_path / "jobs").exists()
    with pytest.raises(UsageError, match=says):
        checked_words(words)


@pytest.mark.parametrize("document", [b"", b"[]", b"{}", b'{"format": "latentry/job", "version": 1}', b"\xff",
                                      b"[" * 9999,
                                      b'{"format": "latentry/job", "version": 1, "added": 1.0, "words": ["sh", "-c"]}'])
def test_directories_of_strangers_are_no_jobs(tmp_path: Path, document: bytes) -> None:
    folder = tmp_path / "jobs" / "000001"
    folder.mkdir(parents=True)
    (folder / "job.json").write_bytes(document)
    (tmp_path / "jobs" / "000002").symlink_to("/dev")
    assert read_job(folder) is None
    assert jobs_of(tmp_path) == []
    Runner(tmp_path).run()
    assert add(tmp_path, QUICK).name == "000003"


def test_queue_that_another_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prep.jobs.queue.PATIENCE", 0.2)
    with changing(tmp_path), pytest.raises(PathError, match="another process has been changing the jobs of"):
        add(tmp_path, QUICK)
    assert add(tmp_path, QUICK).name == "000001"


def test_keeper_that_does_not_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prep.jobs.runner.STARTS", 0.2)
    monkeypatch.setattr("prep.jobs.runner.main_of", lambda _: ("-c", "pass"))
    add(tmp_path, QUICK)
    with pytest.raises(PathError, match="the process that runs job 000001 did not start"):
        Runner(tmp_path).step()


@pytest.mark.parametrize(("words", "says"), [
    (("burn", "."), "prep jobs has no burn"), (("list", ".", "--now"), "--now is for stop, but list is given"),
    (("add", "."), "no command is given"),
    (("stop", "."), "stop is given 0 words after the project, expected the number of a job"),
    (("list", ".", "1"), "list is given 1 word after the project, expected none")])
def test_commands_of_the_queue_that_make_no_sense(prep, words: tuple[str, ...], says: str) -> None:  # type: ignore[no-untyped-def]
    done = prep("jobs", *words)
    assert done.code == 2
    assert says in done.err


def test_queue_from_a_terminal(prep, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    assert "000001  waiting  prep codes" in prep("jobs", "add", tmp_path, "--", "prep", "codes").out
    assert "done after" in prep("jobs", "run", tmp_path).err
    listed = json.loads(prep("jobs", "list", tmp_path, "--json").out)
    assert [(job["state"], job["code"]) for job in listed["jobs"]] == [("done", 0)]
    assert "decoder-crashed" in prep("jobs", "log", tmp_path, "1").out
    assert prep("jobs", "again", tmp_path, "1").out.startswith("000002  waiting")
    assert prep("jobs", "first", tmp_path, "2").code == 0
    assert prep("jobs", "remove", tmp_path, "2").code == 0
    assert prep("jobs", "stop", tmp_path, "1").code == 2


def test_exit_code_tells_of_what_was_run_now(prep, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    add(tmp_path, ("prep", "scan", "missing"))
    assert prep("jobs", "run", tmp_path).code == 1
    add(tmp_path, QUICK)
    assert prep("jobs", "run", tmp_path).code == 0


def test_missing_project_and_job(tmp_path: Path) -> None:
    with pytest.raises(PathError, match="there is no directory"):
        jobs_of(tmp_path / "missing")
    with pytest.raises(PathError, match="there is no directory"):
        add(tmp_path / "missing", QUICK)
    for name in ("7", "../7", "x"):
        with pytest.raises(PathError, match="there is no job"):
            job_of(tmp_path, name)
