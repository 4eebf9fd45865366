"""A bar gets its total when that is known, and only a bar that is shown makes anybody count."""

from __future__ import annotations

import io
import threading
from contextlib import contextmanager

import pytest

from prep.cli import ticker
from prep.cli.main import app
from prep.progress import BackgroundTotal, DeferredTotal


class Terminal(io.StringIO):
    def isatty(self):
        return True


def terminal(monkeypatch):
    """A terminal on stderr, and bars that are shown at once. (No fixture: pytest has its own stderr in each phase.)"""
    monkeypatch.setattr("sys.stderr", Terminal())
    monkeypatch.setattr(ticker, "SLOW", 0)
    monkeypatch.setenv("TERM", "xterm")


def test_a_total_that_comes_late(monkeypatch):
    terminal(monkeypatch)
    total = DeferredTotal()
    with ticker.progress("reading", total, unit="pictures") as tick:
        tick(1)
        assert tick._bar.tasks[0].total is None
        total.count = 7
        tick(1)
        assert (tick._bar.tasks[0].total, tick._bar.tasks[0].completed) == (7, 2)


def test_counting_begins_with_the_bar(monkeypatch):
    terminal(monkeypatch)
    counted, gate = [], threading.Event()

    def count():
        gate.wait(30)
        counted.append(1)
        return 5

    total = BackgroundTotal(count)
    with ticker.progress("scanning", total, unit="pictures", shown=False) as tick:
        tick(1)
        assert total._thread is None
    with ticker.progress("scanning", total, unit="pictures") as tick:
        tick(1)
        assert tick._bar.tasks[0].total is None
        gate.set()
        total._thread.join()
        tick(1)
        assert tick._bar.tasks[0].total == 5 and counted == [1]


def test_what_goes_wrong_in_counting_is_not_told_twice():
    total = BackgroundTotal(lambda: 1 // 0)
    total()
    total._thread.join()
    assert total() is None


@pytest.mark.parametrize(("command", "title"), [(["scan"], "scanning"), (["bucket", "--resolution", "64"], "reading")])
def test_commands_say_how_many(photos, monkeypatch, command, title):
    totals = {}

    @contextmanager
    def progress(name, total, *, unit="", shown=True):
        yield lambda count: None
        totals[name] = total

    monkeypatch.setattr(ticker, "progress", progress)
    app([*command, str(photos), "--quiet"], standalone_mode=False)
    total = totals[title]
    total()
    if isinstance(total, BackgroundTotal):
        total._thread.join()
    assert total() == 8
