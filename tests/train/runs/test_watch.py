"""What one sees of a run."""

from __future__ import annotations

import io
import re
from types import SimpleNamespace

import pytest

from prep.runs.lines import line
from train.runs import watch
from train.runs.watch import RunDisplay, watching

START = {"event": "start", "step": 0, "steps": 10, "steps_per_epoch": 5, "device": "cpu", "parameters": 7}


def step(number, loss=1.0):
    return {"event": "step", "step": number, "loss": loss, "samples_per_second": 8.0, "wait": 0.25, "seconds": 1.0,
            "lr": 1e-4, "grad_norm": 0.0625}


def test_progress_smooths_the_loss_and_guesses_the_end(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    progress = RunDisplay()
    progress.take(START)
    assert progress.remaining() == "?"
    now[0] = 200.0
    progress.take(step(1, 1.0))
    assert progress.remaining() == "?"  # it took long, as first steps do, and says nothing of the others
    now[0] = 210.0
    progress.take(step(2, 2.0))
    assert progress.cells() == {"step": "2/10", "loss": "2.0000", "smoothed": "1.1000", "validation": "-",
                                "rate": "0.0001", "gradient": "0.0625", "samples/s": "8.0", "waiting for data": "25%",
                                "left": "0:01:20"}
    progress.take({**step(3), "memory": 3 << 30})  # on a GPU
    assert progress.cells()["memory"] == "3.0 GiB"
    progress.take({"event": "validation", "step": 2, "loss": 0.5})
    assert progress.cells()["validation"] == "0.5000"


def test_after_the_last_step_nothing_is_left():
    """Also where one step, which is slower than others, is all that a resumed run had to do."""
    progress = RunDisplay()
    progress.take(START)
    progress.take(step(10))
    assert progress.remaining() == "0:00:00"


def test_a_loss_that_is_no_number_is_passed_over():
    progress = RunDisplay()
    progress.take(step(1, None))
    assert progress.cells()["loss"] == "-"


@pytest.mark.parametrize(("event", "said"), [
    (START, "10 steps, 5 per epoch, 7 trained parameters on cpu"),
    ({**START, "device": "cuda", "offload": 12},
     "10 steps, 5 per epoch, 7 trained parameters on cuda, 12 blocks in system RAM"),
    ({"event": "validation", "step": 4, "loss": 0.25}, "step 4: validation loss 0.25"),
    ({"event": "validation", "step": 4, "loss": 0.25, "sources": {"a": {"loss": 0.5}, "b": {"loss": 0.125}}},
     "step 4: validation loss 0.25 (a 0.5, b 0.125)"),
    ({"event": "sample", "step": 4, "picture": "samples/x.png"}, "step 4: samples/x.png"),
    ({"event": "checkpoint", "step": 4, "folder": "checkpoints/x"}, "step 4: checkpoints/x"),
    ({"event": "warning", "step": 4, "text": "look [red]out[/]"}, "warning: look [red]out[/]"),
    ({"event": "warning", "step": 4, "text": "prompt '\x1b[2Ja\nb'"}, "warning: prompt '\\x1b[2Ja\\nb'"),
    ({"event": "end", "step": 4, "result": "lora.safetensors"}, "done: lora.safetensors"),
    ({"event": "end", "step": 4, "result": "x", "proposal": {"checkpoint": "step-000002", "reason": "y"}},
     "done: x; proposed: step-000002"),
    ({"event": "end", "step": 4, "result": "x", "proposal": {"checkpoint": None, "reason": "y"}}, "done: x"),
    ({"event": "evaluation", "step": 4, "held_out": 0.75, "training": 0.5, "nearest": 0.9, "drift": 0.125, "copies": 1,
      "prompt_fit": 0.25}, "step 4: likeness 0.7500 to held-out pictures and 0.5000 to training pictures; 1 copy; "
     "drift 0.1250; prompt fit 0.2500"),
    ({"event": "evaluation", "step": 4, "held_out": None, "training": 0.5, "drift": None, "copies": 0},
     "step 4: likeness 0.5000 to training pictures; 0 copies"),
    ({"event": "stopped", "step": 4}, "stopped after step 4; the same command with --resume continues from there"),
    (step(1), None),
])
def test_every_event_has_its_line(event, said):
    assert line(event) == said


def test_where_there_is_no_terminal_steps_come_every_ten_seconds(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(watch.time, "monotonic", lambda: now[0])
    with watching(quiet=False) as show:
        show(START)
        for number in range(1, 5):
            now[0] += 6
            show(step(number))
    captured = capsys.readouterr()
    assert captured.out == "" and [text.split("  ")[0] for text in captured.err.splitlines()] == [
        "10 steps, 5 per epoch, 7 trained parameters on cpu", "step 1/10", "step 3/10"]


def test_slow_steps_and_the_last_one_always_have_a_line(capsys, monkeypatch):
    monkeypatch.setattr(watch.time, "monotonic", lambda: 100.0)
    with watching(quiet=False) as show:
        show({**START, "steps": 4})
        for number, seconds in ((1, 1.0), (2, 1.0), (3, 24.0), (4, 1.0)):
            show({**step(number), "seconds": seconds, "samples_per_second": 1 / seconds})
    lines = capsys.readouterr().err.splitlines()
    assert [text.split("  ")[0] for text in lines[1:]] == ["step 1/4", "step 3/4", "step 4/4"]
    assert "s per sample 24  " in lines[2] and "samples/s 1.0  " in lines[3]


def test_a_run_without_a_step_left_says_so(capsys):
    with watching(quiet=False) as show:
        show({**START, "step": 2000, "steps": 2000})
        show({"event": "end", "step": 2000, "result": "lora.safetensors"})
    assert capsys.readouterr().err.splitlines()[-1] == "already finished: 2,000 of 2,000 steps; lora.safetensors"


@pytest.mark.parametrize("quiet", [True, False])
def test_what_a_terminal_would_obey_is_spelled_out(capsys, quiet):
    with watching(quiet=quiet) as show:
        show({"event": "warning", "step": 0, "text": "prompt '\x1b]0;owned\x07' has no row"})
    assert capsys.readouterr().err == "warning: prompt '\\x1b]0;owned\\x07' has no row\n"


def test_a_terminal_shows_a_live_table(monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(watch, "Console", lambda **_: watch_console(screen))
    with watching(quiet=False) as show:
        show(START)
        show({"event": "warning", "step": 0, "text": "mind [the] gap"})
        show(step(1))
    text = screen.getvalue()
    assert "warning: mind [the] gap" in text and "samples/s" in text and "1/10" in text


LONGEST = {**step(123456), "loss": 1234.5678, "lr": 1.23e-05, "grad_norm": 1.23e-05, "samples_per_second": 1234.5,
           "memory": 79 << 30, "skipped": False}


@pytest.mark.parametrize("width", [24, 40, 60, 80, 100, 120, 200])
def test_no_number_of_the_table_is_cut(monkeypatch, width):
    """Where the terminal is too narrow for all beside each other, the others are below."""
    screen, shown = io.StringIO(), RunDisplay()
    monkeypatch.setattr(watch, "Console", lambda **_: watch_console(screen, width))
    with watching(quiet=False) as show:
        for event in ({**START, "steps": 1000000}, {"event": "validation", "step": 0, "loss": 1234.5678}, LONGEST):
            shown.take(event)
            show(event)
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen.getvalue())
    drawn = [line for line in text.splitlines() if line.strip() and line.strip()[0] in "┏┃┡│└"]
    assert drawn and max(map(len, drawn)) <= width and "…" not in text
    for title, value in shown.cells().items():
        assert value in re.split(r"\s*[│┃]\s*", text) and set(title.split()) <= set(re.findall(r"[\w/]+", text)), title


def watch_console(screen, width=100):
    from rich.console import Console

    return Console(file=screen, force_terminal=True, width=width, color_system=None)


def test_a_phase_with_a_total_says_its_share():
    seen = []
    table = watch._Table(SimpleNamespace(update=lambda cells: seen.append(cells.caption)))
    with table.progress("loading the model", None, ""), table.progress("loading the denoiser", 200, "bytes") as tick:
        for count in (1, 99, 100):
            tick(count)
    assert seen == ["loading the model", "loading the denoiser", "loading the denoiser: 0 %",
                    "loading the denoiser: 50 %", "loading the denoiser: 100 %", "loading the model", ""]
