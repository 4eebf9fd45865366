"""What both programs have in common: versions, help, completion, `python -m`, color."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys

import pytest
from typer.main import get_command

import prep.cli.main
import train.cli.main
from prep.cli import console
from prep.cli.signature import complete

APPS = {"prep": prep.cli.main.app, "train": train.cli.main.app}
COMMANDS = [(program, name) for program, app in APPS.items() for name in get_command(app).commands]


@pytest.mark.parametrize("program", APPS)
def test_version_names_this_program_and_the_libraries_that_compute(program, request):
    result = request.getfixturevalue(program)("--version")
    first, python, *libraries = result.out.splitlines()
    assert result.code == 0 and first == f"{program} (Latentry) {importlib.metadata.version('latentry')}"
    assert python == f"Python {sys.version.split()[0]}"
    assert f"torch {importlib.metadata.version('torch')}" in libraries


@pytest.mark.parametrize(("program", "name"), COMMANDS)
def test_help_has_a_short_form(program, name, request):
    run = request.getfixturevalue(program)
    short = run(name, "-h")
    assert short.code == 0 and short.out.startswith(f"Usage: {program} {name}") and short == run(name, "--help")


@pytest.mark.parametrize("program", APPS)
def test_a_program_runs_as_a_module(program):
    done = subprocess.run([sys.executable, "-m", program, "-h"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"Usage: {program} [OPTIONS] COMMAND")


def completions(program, typed):
    """What a bash shell gets for what is typed so far."""
    words = [program, *typed.split(" ")]
    environment = {**os.environ, f"_{program.upper()}_COMPLETE": "complete_bash",
                   "COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run([sys.executable, "-m", program], capture_output=True, text=True, env=environment)
    return done.stdout.split()


@pytest.mark.parametrize(("program", "typed", "offered"), [
    ("prep", "encode photos --crop ", ["center", "random", "focus"]),
    ("prep", "mask photos --with c", ["color", "clipseg"]),
    ("prep", "scan photos --select truncated", ["truncated"]),
    ("prep", "codes near-dup", ["near-duplicate"]),
    ("train", "run m.json --method ", ["lora", "full"]),
])
def test_shells_complete_choices(program, typed, offered):
    assert completions(program, typed) == offered


def test_completion_shows_meanings():
    assert complete({"truncated": "ends early", "blank": "one color"})("t") == [("truncated", "ends early")]


# ---- color -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal(monkeypatch):
    """Color as on a terminal, whatever the tests run in."""
    for name in ("NO_COLOR", "TERM", "FORCE_COLOR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("FORCE_COLOR", "1")
    return monkeypatch


BAD = ("scan", "nowhere")
RED = "\x1b[1;31merror\x1b[0m: "


def test_severities_are_colored_on_a_terminal(prep, terminal, photos):
    assert prep(*BAD).err.startswith(RED)
    (photos / "bad.png").write_bytes(b"x")
    assert "\n\x1b[1;31merror\x1b[0m" in "\n" + prep("scan", photos).out


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_color_can_be_switched_off(prep, terminal, variable, value):
    terminal.setenv(variable, value)
    assert prep(*BAD).err.startswith("error: ")


@pytest.mark.parametrize("words", [("--no-color", *BAD), (*BAD, "--no-color")])
def test_an_option_switches_color_off_in_any_place(prep, terminal, words):
    assert prep(*words).err.startswith("error: ")


def test_a_pipe_gets_no_color(prep, monkeypatch):
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    assert prep(*BAD).err.startswith("error: ")


def test_names_are_never_painted(terminal, capsys):
    console.say("a.png: error: warning")
    assert "\x1b" not in capsys.readouterr().err
