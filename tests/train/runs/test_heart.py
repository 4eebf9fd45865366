"""The heartbeat of a training process: while it works, at its end, after a failure; and requests to it."""

from __future__ import annotations

import errno
import os
import time

import pytest

from prep.fs.place import Local
from prep.runs.heartbeat import NAME, read_heartbeat
from prep.runs.requests import ask, request_path
from train.runs import heart
from train.runs.heart import Heart
from train.runs.log import Log


@pytest.fixture
def log(tmp_path):
    with Log(tmp_path / "log.jsonl", lambda event: None) as made:
        made.rewind(0)
        yield made


def until(true):
    patience = time.monotonic() + 30
    while not true():
        assert time.monotonic() < patience
        time.sleep(0.01)


def test_it_beats_beside_slow_phases_and_is_gone_at_the_end(tmp_path, log, monkeypatch):
    monkeypatch.setattr(heart, "BEAT", 0.02)
    monkeypatch.setattr(heart, "LOOK", 0.01)
    with Heart(tmp_path, log):
        first = read_heartbeat(tmp_path)
        assert (first.pid, first.life, first.phase, first.step) == (os.getpid(), "running", "training", 0)
        log("step", 7, loss=1.0)
        with log.phase("validating step 7"):
            until(lambda: read_heartbeat(tmp_path).phase == "validating step 7")
            now = read_heartbeat(tmp_path)
            assert now.step == 7 and first.time <= now.stepped <= now.since <= now.time and now.token == first.token
        until(lambda: read_heartbeat(tmp_path).phase == "training")
    assert not (tmp_path / NAME).exists() and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(("error", "said"), [(ValueError("x is 5\nand more"), "x is 5"),
                                             (KeyboardInterrupt(), "interrupted")])
def test_a_failure_leaves_why(tmp_path, log, error, said):
    with pytest.raises(type(error)), Heart(tmp_path, log):
        raise error
    assert read_heartbeat(tmp_path).ended == said and read_heartbeat(tmp_path).life == "failed"


def test_a_stop_is_no_failure(tmp_path, log):
    with pytest.raises(KeyboardInterrupt), Heart(tmp_path, log):
        log("stopped", 3)
        raise KeyboardInterrupt
    assert not (tmp_path / NAME).exists()


def test_requests_reach_the_process_that_is_asked_and_no_later_one(tmp_path, log):
    with Heart(tmp_path, log) as one:
        ask(Local(tmp_path), "sample")
        until(one.sample.is_set)
        assert not one.stop.is_set() and not request_path(tmp_path, "sample").exists()
        assert read_heartbeat(tmp_path).asked == ("sample",)
        token = read_heartbeat(tmp_path).token
    request_path(tmp_path, "stop").write_text(token)
    with Heart(tmp_path, log) as other:
        assert not request_path(tmp_path, "stop").exists()
        request_path(tmp_path, "stop").write_text(token)  # whoever read the heartbeat before
        until(lambda: not request_path(tmp_path, "stop").exists())
        assert not other.stop.is_set()


def test_a_full_disk_ends_nothing(tmp_path, log, monkeypatch):
    def full(path, data):
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(heart, "write_passing", full)
    with Heart(tmp_path, log) as one:
        assert not one.stop.is_set() and read_heartbeat(tmp_path) is None
