"""How both commands talk: data on stdout, everything else on stderr, an exit code for every ending.

Names and captions come from strangers: control characters in them are spelled out wherever they are printed. Color is
for terminals. With --json, stdout has exactly one JSON document, also when the command fails.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TextIO

from prep.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USAGE, Problem, first_line, from_system
from prep.formatting import printable
from prep.fs.paths import in_cache

if TYPE_CHECKING:
    import typer

ERROR, VERSION = "latentry/error", 1
_STYLES = {"error": "1;31", "rejected": "31", "warning": "33", "info": "36", "note": "36", "hint": "36"}
_HEAD = re.compile(rf"^({'|'.join(_STYLES)})(?=[:\s])", re.MULTILINE)


@dataclass(slots=True)
class _Call:
    """What holds for one run of a command."""

    as_json: bool = False
    color: bool = True
    documented: bool = False  # a JSON document is on stdout


_call = _Call()


def run(app: typer.Typer, name: str, args: Sequence[str] | None = None) -> NoReturn:
    """Runs `app` on `args` (default: the command line's) and exits, with the code that errors.py gives the ending."""
    global _call
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that this terminal cannot spell ends nothing
    words = list(sys.argv[1:] if args is None else args)
    options = words[:words.index("--")] if "--" in words else words
    _call = _Call(as_json="--json" in options, color="--no-color" not in options)  # also for errors in the others
    try:
        code = app(words, prog_name=name, standalone_mode=False)
    except BaseException as error:
        code = _ended(error, name)
    sys.exit(_interrupted(name) if code == EXIT_INTERRUPTED else code if isinstance(code, int) else 0)


def _ended(error: BaseException, name: str) -> int:
    """The exit code for what a command raised; reports an ending, and raises what is none."""
    import typer  # here: for those who only want to print something

    pipe = error.__context__ if isinstance(error, SystemExit) else error  # click makes SystemExit(1) of a closed pipe
    if isinstance(pipe, BrokenPipeError):
        _close_stdout()
        return 0
    if isinstance(error, typer.Abort | KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, OSError):
        error = from_system(error, in_cache=bool(error.filename) and in_cache(error.filename))
    if isinstance(error, Problem):
        say_problem(error)
        _put_errors([_described(error)])
        return error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "show"):  # click's, or that of typer's own copy of click
        usage = io.StringIO()
        error.show(usage)
        say(usage.getvalue().rstrip())
        command = getattr(getattr(error, "ctx", None), "command_path", name)
        _put_errors([_entry(error.format_message(), f"{command} --help lists the options", EXIT_USAGE, "usage")])
        return EXIT_USAGE
    if not isinstance(error, Exception):
        raise error
    say("".join(traceback.format_exception(error)).rstrip())
    say(f"error: this is a bug in {name}; the lines above show where")
    _put_errors([_entry(f"{type(error).__name__}: {first_line(error)}", "", EXIT_BUG, "bug")])
    return EXIT_BUG


def _interrupted(name: str) -> int:
    again = " with --resume" if name == "train" else ""
    message = "interrupted; finished work is kept"
    hint = f"run the same command again{again} to continue"
    say(f"{message}. {hint[0].upper()}{hint[1:]}")
    _put_errors([_entry(message, hint, EXIT_INTERRUPTED, "interrupted")])
    return EXIT_INTERRUPTED


def fail(problems: Sequence[Problem]) -> NoReturn:
    """Ends a command that found several problems at once, with the exit code of the first."""
    import typer

    for problem in problems:
        say_problem(problem)
    _put_errors([_described(problem) for problem in problems])
    raise typer.Exit(problems[0].exit_code)


def _described(problem: Problem) -> dict[str, Any]:
    return _entry(problem.message, problem.hint, problem.exit_code, problem.kind)


def _entry(message: str, hint: str, exit_code: int, kind: str) -> dict[str, Any]:
    return {"message": message, "hint": hint, "exit_code": exit_code, "kind": kind}


def _put_errors(errors: Sequence[Mapping[str, Any]]) -> None:
    """With --json, the first error as a document, and those that came with it, unless stdout has a document already."""
    if not _call.as_json or _call.documented:
        return
    others = {"others": list(errors[1:])} if len(errors) > 1 else {}
    try:
        put_json({"format": ERROR, "version": VERSION, "error": errors[0], **others})
    except BrokenPipeError:
        _close_stdout()


def _close_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes at its end


def say(text: str) -> None:
    """A line on stderr."""
    print(_painted(harmless(text), sys.stderr), file=sys.stderr, flush=True)  # noqa: T201


def say_problem(problem: Problem) -> None:
    """`error: …` and, when there is one, `hint: …` on stderr."""
    say(f"error: {printable(problem.message)}")  # one line each, whatever names are in them
    if problem.hint:
        say(f"hint: {printable(problem.hint)}")


def put(text: str) -> None:
    """A line of data on stdout, at once, so that a reader who went away is noticed here."""
    print(_painted(harmless(text), sys.stdout), flush=True)  # noqa: T201


def harmless(text: str) -> str:
    """`text` with control characters spelled out, but for newlines and tabs."""
    return "\n".join("\t".join(printable(cell) for cell in line.split("\t")) for line in text.split("\n"))


def put_json(document: Mapping[str, Any]) -> None:
    """`document` on stdout, readable and parseable; characters that a terminal would obey are escaped."""
    _call.documented = True
    spelled = json.dumps(document, indent=1, ensure_ascii=True).replace("\x7f", "\\u007f")  # which json leaves as it is
    print(spelled, flush=True)  # noqa: T201


def screen_width() -> int | None:
    """The columns of the terminal that stdout is; None for a file or a pipe, where nothing is folded or left out."""
    return shutil.get_terminal_size(fallback=(120, 24)).columns if sys.stdout.isatty() else None


def color_allowed() -> bool:
    """Whether there may be color where there is a terminal: not with --no-color."""
    return _call.color


def _painted(text: str, stream: TextIO) -> str:
    """`text` with the severities at the heads of its lines in color, where `stream` shows color."""
    if not _shows_color(stream):
        return text
    return _HEAD.sub(lambda head: f"\x1b[{_STYLES[head[1]]}m{head[1]}\x1b[0m", text)


def _shows_color(stream: TextIO) -> bool:
    """As rich decides: terminals do, unless NO_COLOR or TERM=dumb is set; with FORCE_COLOR, anything does."""
    if not _call.color or not (stream.isatty() or os.environ.get("FORCE_COLOR")):
        return False
    from rich.console import Console  # here: neither a pipe nor --help waits for it

    console = Console(file=stream)
    return console.color_system is not None and not console.no_color and not console.legacy_windows
