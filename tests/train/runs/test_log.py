"""The log of a run: a line an event, and no step twice when a run goes on from a checkpoint."""

from __future__ import annotations

import json
import math

from train.runs.log import Log


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_numbers_that_json_cannot_spell_are_null(tmp_path):
    with Log(tmp_path / "log.jsonl", lambda event: None) as log:
        log("step", 1, loss=math.nan, losses=(1.0, math.inf), rate=1 / 3)
    assert read(tmp_path / "log.jsonl") == [
        {"event": "step", "step": 1, "loss": None, "losses": [1.0, None], "rate": 0.333333}]


def test_what_came_after_a_checkpoint_is_forgotten(tmp_path):
    path = tmp_path / "log.jsonl"
    with Log(path, lambda event: None) as log:
        for step in range(1, 6):
            log("step", step)
    with path.open("a") as file:
        file.write('{"event": "step", "st')  # torn by a crash
    with Log(path, lambda event: None) as log:
        log.rewind(3)
        log("step", 4)
    assert [event["step"] for event in read(path)] == [1, 2, 3, 4]


def test_a_run_from_the_start_forgets_everything(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"event": "start", "step": 0}\n[]\nnothing\n')
    with Log(path, lambda event: None) as log:
        log.rewind(0)
        log("start", 0)
    assert len(read(path)) == 1
