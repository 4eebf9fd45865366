"""Heartbeats: which process is there, which is gone, and what a stranger's file may hold."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from prep.errors import PathError
from prep.fs.place import Local
from prep.runs.heartbeat import FRESH, NAME, Heartbeat, boot_id, own_start, read_heartbeat
from prep.runs.requests import ask, is_asked, request_path, waiting

NOW = time.time()


def beat(**other):
    usual = {"token": "a" * 32, "pid": os.getpid(), "host": os.uname().nodename, "boot": boot_id(),
             "start": own_start(), "time": time.time(), "phase": "training", "since": NOW, "step": 4, "stepped": NOW}
    return Heartbeat(**{**usual, **other})


def test_a_process_of_this_computer_is_known_to_be_gone_at_once():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    one = beat(pid=process.pid, start="")
    assert one.life == "running"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert sys.platform != "linux" or one.life == "gone"  # it is still listed
    process.communicate()
    assert one.life == "gone"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says when a process began")
def test_another_process_of_the_same_number_is_another_one():
    assert beat().life == "running" and beat(start="1").life == "gone"


def test_of_another_computer_the_age_decides():
    for other in ({"host": "gpu-7"}, {"boot": "another start of it"}, {"boot": ""}):
        assert beat(**other, pid=1 << 30).life == "running"
        assert beat(**other, pid=1 << 30, time=time.time() - FRESH - 1).life == "silent"
        assert beat(**other, time=time.time() + 1000).life == "running"  # its clock is ahead
    assert beat(ended="NaN").life == "failed"


def test_what_is_written_is_read(tmp_path):
    for one in (beat(), beat(asked=("stop", "sample"), ended="x" * 9)):
        (tmp_path / NAME).write_bytes(one.spell())
        assert read_heartbeat(tmp_path) == one


@pytest.mark.parametrize("change", [
    {"pid": 0.5}, {"pid": -1}, {"pid": 1 << 60}, {"pid": True}, {"host": 7}, {"time": "now"}, {"time": 1e300},
    {"time": float("nan")}, {"step": -1}, {"asked": "stop"}, {"asked": ["rm"]}, {"version": 2}, {"ended": 5},
    {"token": None}], ids=str)
def test_what_is_no_heartbeat_is_none(tmp_path, change):
    (tmp_path / NAME).write_text(json.dumps({**json.loads(beat().spell()), **change}))
    assert read_heartbeat(tmp_path) is None


def test_a_strangers_files_are_not_followed_and_do_not_block(tmp_path):
    (tmp_path / "else").write_bytes(beat().spell())
    for make in (lambda path: path.symlink_to(tmp_path / "else"), os.mkfifo, os.mkdir,
                 lambda path: path.write_bytes(b"[" * 10_000), lambda path: path.write_bytes(b" " * 100_000)):
        place = tmp_path / "run"
        place.mkdir()
        make(place / NAME)
        assert read_heartbeat(place) is None
        make(request_path(place, "stop"))
        assert not is_asked(place, "stop", "a" * 32)
        place.rename(tmp_path / f"run-{len(list(tmp_path.iterdir()))}")
    assert (tmp_path / "else").read_bytes()


def test_only_a_process_that_is_there_is_asked(tmp_path):
    for one, said in ((beat(start="1"), "has ended"), (beat(ended="x"), "failed"),
                      (beat(host="gpu-7", time=NOW - 600), "the last sign of process")):
        (tmp_path / NAME).write_bytes(one.spell())
        if one.life == "running":
            pytest.skip("this system does not say when a process began")
        with pytest.raises(PathError, match=said):
            ask(Local(tmp_path), "stop")
        assert not request_path(tmp_path, "stop").exists()
    (tmp_path / "pictures").mkdir()
    with pytest.raises(PathError, match="is not a training run"):
        ask(Local(tmp_path / "pictures"), "stop")
    one = beat(host="gpu-7", pid=1)
    (tmp_path / NAME).write_bytes(one.spell())
    assert ask(Local(tmp_path), "sample") == one
    assert waiting(tmp_path, one) == ["sample"] and waiting(tmp_path, replace(one, ended="x")) == []


def test_a_request_to_an_earlier_process_is_removed_and_not_obeyed(tmp_path):
    (tmp_path / NAME).write_bytes(beat(host="gpu-7").spell())
    for token, obeyed in (("b" * 32, False), ("a" * 32, True)):
        ask(Local(tmp_path), "stop")
        assert is_asked(tmp_path, "stop", token) == obeyed
        assert not request_path(tmp_path, "stop").exists() and not is_asked(tmp_path, "stop", token)
