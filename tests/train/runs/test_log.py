"""The log of a run: a line an event, and no step twice when a run goes on from a checkpoint."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest
from runs import go

from prep.errors import CacheError, Problem
from prep.fs import atomic
from prep.runs.events import MOST_LINE
from train.runs.log import Log


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def logging(path, step=0):
    log = Log(path, lambda event: None)
    return log, log.rewind(step)


def test_numbers_that_json_cannot_spell_are_null(tmp_path):
    log, _ = logging(tmp_path / "log.jsonl")
    with log:
        log("step", 1, loss=math.nan, losses=(1.0, math.inf), rate=1 / 3)
    assert read(tmp_path / "log.jsonl") == [
        {"event": "step", "step": 1, "loss": None, "losses": [1.0, None], "rate": 0.333333}]


def test_what_came_after_a_checkpoint_is_forgotten(tmp_path):
    path = tmp_path / "log.jsonl"
    log, _ = logging(path)
    with log:
        for step in range(1, 6):
            log("step", step)
        log("validation", 3)
        log("stopped", 3)
    with path.open("a") as file:
        file.write('{"event": "step", "st')  # torn by a crash
    log, there = logging(path, 3)
    with log:
        log("step", 4)
    assert there == {"step", "validation"}
    assert [event["step"] for event in read(path)] == [1, 2, 3, 3, 4]
    assert "stopped" not in {event["event"] for event in read(path)}


@pytest.mark.parametrize("name", ["log.jsonl", "losses.bin"])
def test_what_a_full_disk_refused_is_written_before_the_checkpoint(make, setup_of, tmp_path, monkeypatch, name):
    """The step that it stops is kept by a checkpoint, so its records have to be there when the run goes on."""
    setup = setup_of(make(), steps=4, batch_size=2, validation={"every": 0}, sample={"every": 0}, lora={"rank": 2})
    go(setup, tmp_path / "whole")
    write, failed = atomic.write, []

    def once(handle, data):
        log = tmp_path / "run" / "log.jsonl"
        if Path(handle.name).name == name and not failed and log.read_bytes().count(b'"event": "step"') == 1:
            failed.append(name)
            write(handle, bytes(data)[:7])
            raise OSError(errno.ENOSPC, "No space left on device", handle.name)
        write(handle, data)

    monkeypatch.setattr(atomic, "write", once)
    with pytest.raises(Problem, match="No space left on device"):
        go(setup, tmp_path / "run")
    assert failed == [name]
    go(setup, tmp_path / "run", resume=True)
    whole, steps = ([(event["step"], event["loss"]) for event in read(tmp_path / run / "log.jsonl")
                     if event["event"] == "step"] for run in ("whole", "run"))
    assert steps == whole
    assert (tmp_path / "run" / "losses.bin").read_bytes() == (tmp_path / "whole" / "losses.bin").read_bytes()
    assert "checkpoints/step-000002" in (tmp_path / "run" / "log.jsonl").read_text()


def test_a_run_from_the_start_forgets_everything(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "start", "step": 0}\n[]\nnothing\n')
    log, there = logging(path)
    with log:
        log("start", 0)
    assert len(read(path)) == 1 and there == frozenset()


def test_lines_of_another_make_are_dropped(tmp_path):
    path = tmp_path / "log.jsonl"
    good = '{"event": "step", "step": 1}'
    path.write_text("\n".join(['{"event": 3, "step": 1}', '{"event": "step", "step": true}', "[" * 5000,
                               '{"event": "step", "step": 1' + " " * MOST_LINE + "}", good, ""]))
    log, _ = logging(path, 2)
    log.close()
    assert path.read_text() == good + "\n"


@pytest.mark.skipif(os.name != "posix", reason="no pipes")
def test_a_log_that_is_no_file_is_refused_and_not_waited_for(tmp_path):
    path = tmp_path / "log.jsonl"
    os.mkfifo(path)
    with pytest.raises(CacheError, match=r"log.jsonl: is a pipe, expected a plain file") as caught:
        logging(path, 2)
    assert caught.value.hint == "remove it; only the record of the steps so far is lost"
