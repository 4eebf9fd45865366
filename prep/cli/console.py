"""Output of both commands: data on stdout, everything else on stderr, and an exit code for every outcome.

Names and captions are untrusted: control characters in them are escaped wherever they are printed. Only terminals get
color. With --json, stdout has exactly one JSON document, also if the command fails.
"""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import sys
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TextIO, cast

from prep.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USAGE, Problem, first_line, from_system, is_panic
from prep.formatting import printable
from prep.fs.paths import in_cache
from prep.fs.remote.copies import more_room
from prep.runtime import ask_for_huge_pages, command_says, safe_path

if TYPE_CHECKING:
    import typer

ERROR, VERSION = "latentry/error", 1
_STYLES = {"error": "1;31", "rejected": "31", "warning": "33", "info": "36", "note": "36", "hint": "36"}
_HEAD = re.compile(rf"^({'|'.join(_STYLES)})(?=[:\s])", re.MULTILINE)


@dataclass(slots=True)
class _Call:
    """The state of one run of a command."""

    as_json: bool = False
    color: bool = True
    documented: bool = False  # whether stdout has a JSON document already
    interruption: tuple[str, str] | None = None  # message and hint of Ctrl-C; None: those of all commands


_call = _Call()


def run(app: typer.Typer, name: str, args: Sequence[str] | None = None) -> NoReturn:
    """Runs `app` on `args` (default: the command line's) and exits, with the exit code of `errors.py`."""
    global _call
    _open_closed_streams()
    ask_for_huge_pages()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # any name can be printed
    words = list(sys.argv[1:] if args is None else args)
    options = words[:words.index("--")] if "--" in words else words
    _call = _Call(as_json="--json" in options, color="--no-color" not in options)  # also for errors in options
    try:
        with safe_path(), command_says(lambda: _killed(name)):
            code = app(words, prog_name=name, standalone_mode=False)
    except BaseException as error:
        code = _ended(error, name)
    sys.exit(_interrupted(name) if code == EXIT_INTERRUPTED else code if isinstance(code, int) else 0)


def _open_closed_streams() -> None:
    """Opens stdin, stdout and stderr as nothing where they were closed (`>&-`; pythonw).

    Otherwise the next file that is opened would have the number 1 or 2, and what a library prints would go there.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            _to_nowhere(number)
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w" if number else "r", encoding="utf-8"))  # noqa: PTH123, SIM115


def _ended(error: BaseException, name: str) -> int:
    """Reports what a command raised and returns its exit code; re-raises what is not an `Exception`."""
    import typer  # here: modules that only print need no typer

    pipe = error.__context__ if isinstance(error, SystemExit) else error  # click turns a closed pipe into SystemExit(1)
    if isinstance(pipe, BrokenPipeError):
        _close_stdout()
        return 0
    if isinstance(error, typer.Abort | KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, OSError):
        error = from_system(error, in_cache=bool(error.filename) and in_cache(error.filename),
                            or_else=more_room(error.filename))
    if isinstance(error, Problem):
        say_problem(error)
        _put_errors([_described(error)])
        return error.exit_code
    if hasattr(error, "format_message") and hasattr(error, "show"):  # from click, or typer's own copy of click
        usage = io.StringIO()
        error.show(usage)
        say(usage.getvalue().rstrip())
        command = getattr(getattr(error, "ctx", None), "command_path", name)
        _put_errors([_entry(error.format_message(), f"{command} --help lists the options", EXIT_USAGE, "usage")])
        return EXIT_USAGE
    if not isinstance(error, Exception) and not is_panic(error):
        raise error
    say("".join(traceback.format_exception(error)).rstrip())
    say(f"error: this is a bug in {name}; the lines above show where")
    _put_errors([_entry(f"{type(error).__name__}: {first_line(error)}", "", EXIT_BUG, "bug")])
    return EXIT_BUG


def explain_interruption(message: str, hint: str) -> None:
    """Sets what is said instead of the words for all commands, if this command ends as by Ctrl-C."""
    _call.interruption = (message, hint)


def _killed(name: str) -> None:
    """Says what `_interrupted` does below a bar or table that nobody removes, and shows the cursor, which these hide.
    """
    if "rich.console" in sys.modules and sys.stderr.isatty():
        console = sys.modules["rich.console"].Console(stderr=True)
        console.show_cursor()
        console.print()
    _interrupted(name)


def _interrupted(name: str) -> int:
    message = "interrupted; finished work is kept"
    hint = "run the same command again to continue"
    if name == "train":
        hint = "run the same command again with --resume to continue, or as it is if there was no checkpoint yet"
    message, hint = _call.interruption or (message, hint)
    say(f"{message}. {hint[0].upper()}{hint[1:]}")
    _put_errors([_entry(message, hint, EXIT_INTERRUPTED, "interrupted")])
    return EXIT_INTERRUPTED


def fail(problems: Sequence[Problem]) -> NoReturn:
    """Reports several problems and ends the command with the exit code of the first."""
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
    """With --json, prints a document of the first error and the others, unless stdout has a document already."""
    if not _call.as_json or _call.documented:
        return
    others = {"others": list(errors[1:])} if len(errors) > 1 else {}
    try:
        put_json({"format": ERROR, "version": VERSION, "error": errors[0], **others})
    except BrokenPipeError:
        _close_stdout()


def _close_stdout() -> None:
    _to_nowhere(1)  # for what Python flushes when it exits


def _to_nowhere(descriptor: int) -> None:
    """What is written to the descriptor from now on goes nowhere."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == descriptor:  # the lowest that was closed
        os.set_inheritable(nowhere, True)
    else:
        os.dup2(nowhere, descriptor)
        os.close(nowhere)


class _Lasting:
    """A stream that outlives its reader: what is written after that goes nowhere."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def _drop(self) -> None:
        with suppress(OSError):  # one without a descriptor
            _to_nowhere(self._stream.fileno())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def lasting_stderr() -> Iterator[None]:
    """For work of hours: inside, nothing ends because nobody reads stderr any more (`2>&1 | tee log`, and tee died)."""
    with redirect_stderr(cast(TextIO, _Lasting(sys.stderr))):
        yield


def say(text: str) -> None:
    """Prints a line on stderr."""
    print(_painted(harmless(text), sys.stderr), file=sys.stderr, flush=True)  # noqa: T201


def say_problem(problem: Problem) -> None:
    """Prints `error: …` on stderr and, if there is a hint, `hint: …`."""
    say(f"error: {printable(problem.message)}")  # `printable` keeps each on one line, whatever names it has
    if problem.hint:
        say(f"hint: {printable(problem.hint)}")


def put(text: str) -> None:
    """Prints a line of data on stdout and flushes it, so that a closed pipe raises here."""
    print(_painted(harmless(text), sys.stdout), flush=True)  # noqa: T201


def harmless(text: str) -> str:
    """`text` with control characters escaped, except newlines and tabs."""
    return "\n".join("\t".join(printable(cell) for cell in line.split("\t")) for line in text.split("\n"))


def put_json(document: Mapping[str, Any], *, indent: int | None = 1) -> None:
    """Prints `document` on stdout as JSON, on one line with `indent` None; escapes what would control a terminal."""
    _call.documented = True
    spelled = json.dumps(document, indent=indent, ensure_ascii=True)
    spelled = spelled.replace("\x7f", "\\u007f")  # which `json` does not escape
    print(spelled, flush=True)  # noqa: T201


def screen_width() -> int | None:
    """The columns of the terminal on stdout; None for a file or a pipe, where tables are not folded or shortened."""
    return shutil.get_terminal_size(fallback=(120, 24)).columns if sys.stdout.isatty() else None


def color_allowed() -> bool:
    """Whether terminals may get color: not with --no-color."""
    return _call.color


def _painted(text: str, stream: TextIO) -> str:
    """`text` with the severities at the starts of its lines in color, if `stream` shows color."""
    if not _shows_color(stream):
        return text
    return _HEAD.sub(lambda head: f"\x1b[{_STYLES[head[1]]}m{head[1]}\x1b[0m", text)


def _shows_color(stream: TextIO) -> bool:
    """As rich decides: terminals show color unless NO_COLOR or TERM=dumb is set; with FORCE_COLOR, any stream does."""
    if not _call.color or not (stream.isatty() or os.environ.get("FORCE_COLOR")):
        return False
    from rich.console import Console  # here: a pipe and --help do not need it

    console = Console(file=stream)
    return console.color_system is not None and not console.no_color and not console.legacy_windows
