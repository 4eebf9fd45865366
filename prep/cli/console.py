"""How both commands talk: data on stdout, everything else on stderr, an exit code for every ending.

Names and captions come from strangers: what a terminal would obey in them is spelled out wherever they are printed.
"""

from __future__ import annotations

import io
import json
import os
import sys
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NoReturn

from prep.errors import EXIT_BUG, EXIT_INTERRUPTED, EXIT_USAGE, Problem, from_system
from prep.formatting import format_bytes, printable
from prep.fs.paths import in_cache
from prep.progress import Total

if TYPE_CHECKING:
    import typer

SLOW = 1.0  # seconds of work from which a progress bar is shown


def run(app: typer.Typer, name: str, args: Sequence[str] | None = None) -> NoReturn:
    """Runs `app` on `args` (default: the command line's) and exits, with the code that errors.py gives the ending."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a name that this terminal cannot spell ends nothing
    try:
        code = app(args, prog_name=name, standalone_mode=False)
    except BaseException as error:
        code = _ended(error, name)
    sys.exit(_interrupted(name) if code == EXIT_INTERRUPTED else code if isinstance(code, int) else 0)


def _ended(error: BaseException, name: str) -> int:
    """The exit code for what a command raised; says what there is to say, and raises what is not an ending."""
    import typer  # here: for those who only want to say something

    usage_error = typer.BadParameter.__mro__[2]  # ClickException, of click or of typer's own copy of it
    assert usage_error.__name__ == "ClickException", usage_error
    pipe = error.__context__ if isinstance(error, SystemExit) else error  # click makes SystemExit(1) of a closed pipe
    if isinstance(pipe, BrokenPipeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what Python flushes at its end
        return 0
    if isinstance(error, typer.Abort | KeyboardInterrupt):
        return EXIT_INTERRUPTED
    if isinstance(error, OSError):
        error = from_system(error, in_cache=bool(error.filename) and in_cache(error.filename))
    if isinstance(error, Problem):
        say_problem(error)
        return error.exit_code
    if isinstance(error, usage_error):
        usage = io.StringIO()
        error.show(usage)  # type: ignore[attr-defined]
        say(usage.getvalue().rstrip())
        return EXIT_USAGE
    if not isinstance(error, Exception):
        raise error
    say("".join(traceback.format_exception(error)).rstrip())
    say(f"error: this is a bug in {name}; the lines above say where")
    return EXIT_BUG


def _interrupted(name: str) -> int:
    again = "with --resume, " if name == "train" else ""
    say(f"interrupted; what is finished is kept, and {again}the same command goes on from there")
    return EXIT_INTERRUPTED


def say(text: str) -> None:
    """A line on stderr."""
    print(harmless(text), file=sys.stderr, flush=True)  # noqa: T201


def say_problem(problem: Problem) -> None:
    """`error: …` and, when there is one, `hint: …` on stderr."""
    say(f"error: {printable(problem.message)}")  # one line each, whatever names are in them
    if problem.hint:
        say(f"hint: {printable(problem.hint)}")


def put(text: str) -> None:
    """A line of data on stdout, at once, so that a reader who went away is noticed here."""
    print(harmless(text), flush=True)  # noqa: T201


def harmless(text: str) -> str:
    """`text` with control characters spelled out, but for newlines and tabs."""
    return "\n".join("\t".join(printable(cell) for cell in line.split("\t")) for line in text.split("\n"))


def put_json(document: Mapping[str, Any]) -> None:
    """`document` on stdout, readable and parseable; characters that a terminal would obey are escaped."""
    spelled = json.dumps(document, indent=1, ensure_ascii=True).replace("\x7f", "\\u007f")  # which json leaves as it is
    print(spelled, flush=True)  # noqa: T201


class Ticker:
    """Progress of one stage: `tick(n)` per finished unit; shows a bar once the work has lasted a second.

    Of the unit "bytes", counts and rate are spelled as sizes.
    """

    def __init__(self, title: str, total: Total, *, unit: str = "", shown: bool = True) -> None:
        self.title, self.unit = title, unit
        self._total = total
        self._shown = shown and sys.stderr.isatty()
        self._begun = time.monotonic()
        self._done = 0
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, count: int = 1) -> None:
        """Counts `count` more units as done."""
        self._done += count
        if not self._shown:
            return
        if self._bar is None and time.monotonic() - self._begun >= SLOW:
            self._start()
        if self._bar is not None:
            rate = self._done / (time.monotonic() - self._begun)
            spelled = format_bytes(int(rate)) if self.unit == "bytes" else f"{rate:.1f} {self.unit}"
            self._bar.update(self._task, completed=self._done, total=self.total, rate=f"{spelled}/s")

    @property
    def total(self) -> int | None:
        """How many units there will be, as far as that is known now."""
        return self._total() if callable(self._total) else self._total

    def _start(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
        from rich.progress import TimeRemainingColumn as Remaining

        of = DownloadColumn(binary_units=True) if self.unit == "bytes" else MofNCompleteColumn()
        text = (TextColumn("{task.description}"), BarColumn(), of, TextColumn("{task.fields[rate]}"))
        columns = (*text, TimeElapsedColumn(), Remaining())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task(self.title, total=self.total, rate="")
        self._bar.start()

    def close(self) -> None:
        """Takes the bar away."""
        if self._bar is not None:
            self._bar.stop()


@contextmanager
def progress(title: str, total: Total, *, unit: str = "", shown: bool = True) -> Iterator[Ticker]:
    """A `Ticker` that is cleared away at the end, whatever happens."""
    ticker = Ticker(title, total, unit=unit, shown=shown)
    try:
        yield ticker
    finally:
        ticker.close()
