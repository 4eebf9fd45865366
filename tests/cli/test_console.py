"""How commands talk: what goes to stdout and what to stderr, every exit code, and nothing that a terminal obeys."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from prep.cli import console, ticker
from prep.errors import CacheError, Problem
from prep.findings import Finding
from prep.training.table import as_toml

ROOT = Path(__file__).parents[2]

NASTY = "a\x1b[31m\x07\r\x9b2J\u202e\x7f"
SPELLED = "a\\x1b[31m\\x07\\r\\x9b2J\\u202e\\x7f"


@pytest.fixture
def end(capsys):
    """`end(error)`: exit code, stdout and stderr of a command that prints "data" and raises `error`."""

    def go(error=None, args=("go",)):
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

        @app.command()
        def go(number: int = 0) -> None:
            console.put("data")
            if error is not None:
                raise error

        app.command()(lambda: None)
        with pytest.raises(SystemExit) as ending:
            console.run(app, "prep", list(args))
        captured = capsys.readouterr()
        return ending.value.code, captured.out, captured.err

    return go


def test_a_stderr_that_lasts(monkeypatch):
    """Whoever reads a part of it gets that; later words go nowhere, and are no error at the end of the process."""
    read, write = os.pipe()
    with open(write, "w", encoding="utf-8") as stream, monkeypatch.context() as patch:  # noqa: PTH123  # a descriptor
        patch.setattr(sys, "stderr", stream)
        with console.lasting_stderr():
            console.say("heard")
            assert os.read(read, 100) == b"heard\n" and not sys.stderr.isatty()
            os.close(read)
            console.say("unheard")
            console.say("unheard")
        console.say("unheard, too")

    class Gone(io.StringIO):
        def write(self, text):
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(sys, "stderr", Gone())
    with console.lasting_stderr():
        console.say("of no descriptor")


def test_done(end):
    assert end() == (0, "data\n", "")


@pytest.mark.parametrize("code", [0, 1, 7])
def test_an_exit_keeps_its_code(end, code):
    assert end(typer.Exit(code)) == (code, "data\n", "")


@pytest.mark.parametrize("kind", [Problem, *(kind for kind in Problem.__subclasses__()
                                             if kind.__module__ == Problem.__module__)])
def test_a_problem_is_said_with_its_hint_and_code(end, kind):
    assert end(kind("x is 5", hint="make it 6")) == (kind.exit_code, "data\n", "error: x is 5\nhint: make it 6\n")


def test_a_problem_without_a_hint(end):
    assert end(CacheError("x is 5")) == (7, "data\n", "error: x is 5\n")


def test_our_own_bug_shows_where(end):
    code, out, err = end(ZeroDivisionError("nothing to divide by"))
    assert (code, out) == (70, "data\n") and err.startswith("Traceback (most recent call last):\n")
    assert err.endswith("ZeroDivisionError: nothing to divide by\n"
                        "error: this is a bug in prep; the lines above show where\n")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), typer.Abort()])
def test_an_interrupt(end, error):
    assert end(error) == (130, "data\n", "interrupted; finished work is kept. Run the same command again to "
                                         "continue\n")


@pytest.mark.parametrize("say", ["console.put('x')", "console.put_json({})", "[console.put('x' * 999) for _ in '12']"])
def test_a_reader_that_went_away_is_no_failure(say):
    """As in `prep scan photos | head`."""
    script = ("import typer; from prep.cli import console; app = typer.Typer();"
              f"app.command()(lambda: {say} and None); console.run(app, 'prep', [])")
    there, here = os.pipe()
    os.close(there)
    done = subprocess.run([sys.executable, "-c", script], stdout=here, stderr=subprocess.PIPE, text=True, check=False)
    os.close(here)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(("program", "words", "name"), [
    ("train", ("run", ""), "MANIFEST"), ("train", ("run", "m.json", "-o", ""), "--output"),
    ("train", ("run", "m.json", "--init-from="), "--init-from"), ("train", ("check", "m.json", "-c", ""), "--config"),
    ("train", ("check", "m.json", "--model", ""), "--model"), ("train", ("merge", "", "-o", "x"), "LORA"),
    ("train", ("sample", "run", "--model="), "--model"), ("train", ("report", ""), "RUN"),
    ("prep", ("scan", ""), "SOURCE"), ("prep", ("encode", "photos", "--cache", ""), "--cache"),
    ("prep", ("encode", "photos", "--model", "", "--cache", "c"), "--model"),
])
def test_an_empty_path_or_model_is_refused(request, monkeypatch, tmp_path, program, words, name):
    """As typed with "$DIR" where DIR is not set: not the current directory, and not the manifest's model."""
    monkeypatch.chdir(tmp_path)
    result = request.getfixturevalue(program)(*words)
    what = "model" if name == "--model" else "path"
    assert (result.code, result.err) == (2, f"error: {name} is empty, expected a {what}\n"
                                            "hint: name one; a variable of the shell may not be set\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("args", "said"), [
    (["go", "--nmber", "3"], "No such option: --nmber"),
    (["go", "--number", "three"], "Invalid value for '--number'"),
    (["went"], "No such command 'went'"),
    (["go", "extra"], "unexpected extra argument"),
    (["go", f"--{NASTY}"], "No such option"),
])
def test_usage_errors(end, args, said):
    code, out, err = end(args=args)
    assert code == 2 and out == "" and said in err and "Traceback" not in err
    assert not set(err) & set(NASTY[1:2] + "\x07\r\x9b\u202e\x7f")


def test_nothing_that_a_terminal_obeys_is_printed(end, capsys):
    assert end(CacheError(f"{NASTY} is damaged", hint=f"rm {NASTY}"))[2] == (
        f"error: {SPELLED} is damaged\nhint: rm {SPELLED}\n")
    assert "\x1b" not in end(ValueError(NASTY))[2]
    console.put(f"{NASTY}\tx\ny \u00e9\u732b")
    assert capsys.readouterr().out == f"{SPELLED}\tx\ny \u00e9\u732b\n"
    console.say("lone \udcff")  # a byte of a file name that is no UTF-8
    assert capsys.readouterr().err == "lone \\udcff\n"


def test_json_stays_json(capsys):
    document = {"name": NASTY + "\udcff\n\t"}
    console.put_json(document)
    out = capsys.readouterr().out
    assert json.loads(out) == document and out.isascii() and all(one.isprintable() or one == "\n" for one in out)


def test_names_of_files_never_reach_the_terminal_raw(prep, tmp_path):
    folder = tmp_path / "pic\x1b[2Jtures"
    result = prep("scan", folder)
    assert result.code == 5 and "pic\\x1b[2Jtures does not exist" in result.err and "\x1b" not in result.err
    folder.mkdir()
    (folder / "evil\x1b]0;x\x07.png").write_bytes(b"no picture")
    result = prep("scan", folder)
    assert result.code == 1 and "\x1b" not in result.out + result.err and "evil" in result.out


def test_rejected_names_are_spelled_out_in_the_report_of_encode(capsys):
    from prep.encode.report import EncodeReport

    finding = Finding(path=f"{NASTY}.png", code="truncated", severity="error", detail="ends early")
    console.put(EncodeReport(manifest=finding.path, encoded={}, reused={}, rejected=(finding,), notices=(), bytes=0,
                             samples={}, dry_run=True).as_text(0))
    assert f"rejected: $'{SPELLED}.png': truncated: ends early" in capsys.readouterr().out


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "slow", "shown", "drawn"), [
    (Terminal, 0.0, True, True),
    (io.StringIO, 0.0, True, False),  # a file or a pipe
    (Terminal, 0.0, False, False),  # --quiet
    (Terminal, 60.0, True, False),  # done before anybody would wonder
])
def test_the_bar_is_for_people_who_wait(monkeypatch, stream, slow, shown, drawn):
    err = stream()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(ticker, "SLOW", slow)
    monkeypatch.setenv("TERM", "xterm")
    with ticker.progress("reading", 3, unit="pictures", shown=shown) as tick:
        for _ in range(3):
            tick(1)
    assert ("reading" in err.getvalue()) == drawn
    assert drawn or err.getvalue() == ""


def test_the_bar_goes_away_when_work_fails(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setattr(ticker, "SLOW", 0.0)
    with pytest.raises(ValueError, match="stop"), ticker.progress("reading", None) as tick:
        tick()
        bar = tick._bar
        raise ValueError("stop")
    assert not bar.live.is_started and tick._bar is None


def test_a_panic_of_a_library_in_rust_is_a_bug(end):
    panic = type("PanicException", (BaseException,), {"__module__": "pyo3_runtime"})
    code, _, err = end(panic("index out of range"))
    assert code == 70 and err.endswith("error: this is a bug in prep; the lines above show where\n")


@pytest.mark.skipif(os.name != "posix", reason="closes streams as a shell does")
@pytest.mark.parametrize("closed", [
    (1,), (0, 1, 2), *(pytest.param(closed, marks=pytest.mark.slow) for closed in ((0,), (2,), (1, 2)))], ids=str)
def test_closed_streams_change_neither_files_nor_the_exit_code(closed, tmp_path):
    shell = " ".join(f"{number}>&-" for number in closed)
    for words, code in ((["init", "-o", "train.toml"], 0), (["init", "-o", "train.toml"], 5), (["--help"], 0)):
        command = [sys.executable, "-P", "-m", "train", *words]
        ending = subprocess.run(["sh", "-c", f'exec "$@" {shell}', "sh", *command], cwd=tmp_path, capture_output=True,
                                check=False, env={**os.environ, "PYTHONPATH": str(ROOT)})
        assert ending.returncode == code, ending.stderr
    assert (tmp_path / "train.toml").read_text() == as_toml()


@pytest.mark.parametrize(("program", "headings"), [
    ("prep", ["Start", "Look at pictures", "Make a cache", "Look at a cache, and keep it", "Work on a project",
              "Share"]),
    ("train", ["Train", "Look at a run", "Use the result"])])
def test_help_lists_every_command_once_in_groups_of_80_columns(request, monkeypatch, program, headings):
    monkeypatch.setenv("COLUMNS", "80")
    lines = request.getfixturevalue(program)("--help").out.splitlines()
    listed = lines[lines.index(f"{headings[0]}:"):]
    assert [line[:-1] for line in listed if line.endswith(":") and not line.startswith(" ")] == headings
    app = __import__(f"{program}.cli.main", fromlist=["app"]).app
    assert sorted(line.split()[0] for line in listed if line.startswith("  ")) == sorted(
        typer.main.get_command(app).commands)
    assert max(map(len, lines)) <= 80
