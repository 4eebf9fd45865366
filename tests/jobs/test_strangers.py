"""Directories of jobs that a stranger, an archive or a crash made: nothing outside is read, written or waited for."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import pytest

from prep.errors import PathError
from prep.fs.untrusted import NotRegularFile, append_regular
from prep.jobs.job import Job, read_job
from prep.jobs.log import size_of, tail
from prep.jobs.queue import add, job_of, jobs_of, remove
from prep.jobs.runner import Runner
from prep.runs.heartbeat import boot_id

QUICK = ("prep", "codes")
posix = pytest.mark.skipif(sys.platform == "win32", reason="links and pipes of POSIX")


def running_elsewhere(project: Path, **started: object) -> Job:
    """A job whose keeper is on another computer, or says so."""
    job = add(project, QUICK)
    body = {"pid": 1, "start": "", "boot": "elsewhere", "host": "elsewhere", "time": 1.0, **started}
    (job.folder / "started.json").write_text(json.dumps(body))
    return job


@posix
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_files_of_a_job_are_files(tmp_path: Path, kind: str) -> None:
    secret = tmp_path / "secret"
    secret.write_text('{"title": "secret", "done": 1}\n')
    job = running_elsewhere(tmp_path)
    for name in ("log.txt", "progress.jsonl", "stop.request", "ended.json"):
        if kind == "link":
            (job.folder / name).symlink_to(secret)
        else:
            os.mkfifo(job.folder / name)
    found = job_of(tmp_path, "1")
    assert (found.state, found.doing, found.stopping) == ("running", "", None)
    assert (tail(found, 100), size_of(found)) == ("", 0)


@posix
@pytest.mark.parametrize("name", ["log.txt", "progress.jsonl"])
def test_jobs_write_to_no_link(tmp_path: Path, name: str) -> None:
    (tmp_path / "project").mkdir()
    job = add(tmp_path / "project", QUICK)
    (job.folder / name).symlink_to(tmp_path / "outside")
    Runner(tmp_path / "project").run()
    assert not (tmp_path / "outside").exists()
    assert job_of(tmp_path / "project", "1").state == ("failed" if name == "log.txt" else "done")


@posix
def test_lock_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "lock").symlink_to(tmp_path / "outside")
    with pytest.raises(NotRegularFile, match="lock is a link"):
        add(tmp_path, QUICK)
    assert not (tmp_path / "outside").exists()
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NotRegularFile, match="pipe is a pipe"):
        append_regular(tmp_path / "pipe")


@posix
def test_linked_directory_is_no_job(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    job = add(tmp_path / "other", QUICK)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "000001").symlink_to(job.folder)
    (tmp_path / "jobs" / "000002").symlink_to(tmp_path / "nowhere")
    assert jobs_of(tmp_path) == []
    assert add(tmp_path, QUICK).name == "000003"


@pytest.mark.parametrize("started", [{"pid": 0}, {"pid": -1}, {"pid": 10**30}, {"pid": "1"}])
def test_process_of_no_number_keeps_no_job(tmp_path: Path, started: dict[str, object]) -> None:
    import platform

    job = running_elsewhere(tmp_path, boot=boot_id() or "here", host=platform.node(), **started)
    os.utime(job.folder / "started.json", (1, 1))
    assert job_of(tmp_path, "1").state == "lost"


@pytest.mark.parametrize(("ago", "state"), [(0, "running"), (3600, "lost"), (-3600, "lost")])
def test_time_of_a_sign_tells_whether_another_computer_keeps_a_job(tmp_path: Path, ago: float, state: str) -> None:
    job = running_elsewhere(tmp_path)
    then = time.time() - ago
    os.utime(job.folder / "started.json", (then, then))
    assert job_of(tmp_path, "1").state == state


@pytest.mark.parametrize(("line", "says"), [
    ('{"title": "Encoding", "done": 7, "total": 5}', "Encoding 100 %"), ('{"title": "x", "done": -1, "total": 5}', ""),
    ('{"title": "x", "done": 1e9, "total": 5}', ""), (f'{{"title": "x", "done": 1, "total": {10**400}}}', ""),
    ('{"title": 5, "done": 1, "total": 5}', ""), ("[" * 9999, ""), ("", "")])
def test_progress_that_cannot_be(tmp_path: Path, line: str, says: str) -> None:
    job = running_elsewhere(tmp_path, time=time.time())
    (job.folder / "progress.jsonl").write_text(f"{line}\n")
    assert job_of(tmp_path, "1").says == ", ".join(filter(None, ("running", "0 s", says)))


def test_command_that_the_system_cannot_start(tmp_path: Path) -> None:
    add(tmp_path, ("prep", "scan", "€" * 60_000))
    add(tmp_path, ("prep", "scan", "\ud800"))
    Runner(tmp_path).run()
    assert [job.state for job in jobs_of(tmp_path)] == ["failed", "failed"]
    assert [job.code for job in jobs_of(tmp_path)] == [PathError.exit_code] * 2
    assert all("error: the command cannot be started" in tail(job, 1000) for job in jobs_of(tmp_path))


def test_half_of_a_removed_job_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a crash could leave one that waits: without the files that tell of its end."""
    job = add(tmp_path, QUICK)
    Runner(tmp_path).run()

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("prep.fs.atomic.remove_tree", crash)
    with pytest.raises(KeyboardInterrupt):
        remove(tmp_path, "1")
    assert read_job(job.folder) is None
    assert jobs_of(tmp_path) == []
