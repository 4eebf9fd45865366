"""Progress where there is no terminal: lines with rate and time left, and slow phases by name."""

from __future__ import annotations

import threading

import pytest

from prep.cli import ticker
from prep.cli.ticker import Ticker, progress


@pytest.fixture
def clock(monkeypatch):
    """`clock[0]` is the time."""
    now = [0.0]
    monkeypatch.setattr(ticker.time, "monotonic", lambda: now[0])
    return now


def test_a_line_has_the_rate_of_late_and_the_time_left_at_it(clock):
    tick = Ticker("encoding latents", 10_000, unit="rows", shown=False)
    clock[0] = 60.0
    tick(6000)
    assert tick.line() == "encoding latents: 6000 of 10,000 rows (60 %), 100.0 rows/s, 0:00:40 left"
    clock[0] = 120.0
    tick(60)  # the pictures are large now: what was quick before says nothing of these
    assert tick.line() == "encoding latents: 6060 of 10,000 rows (60 %), 1.0 rows/s, 1:05:40 left"


def test_a_line_without_a_total_or_of_bytes(clock):
    tick = Ticker("reading", None, unit="pictures", shown=False)
    clock[0] = 2.0
    tick(1)
    assert tick.line() == "reading: 1 picture, 0.5 pictures/s"
    tick = Ticker("verifying", 1 << 30, unit="bytes", shown=False)
    clock[0] = 4.0
    tick(1 << 29)
    assert tick.line() == "verifying: 512.0 MiB of 1.0 GiB (50 %), 256.0 MiB/s, 0:00:02 left"


@pytest.fixture
def lines(monkeypatch):
    """`lines(count)` waits until that many lines were said, and returns them."""
    said, more = [], threading.Condition()

    def say(text):
        with more:
            said.append(text)
            more.notify_all()

    def wait(count):
        with more:
            assert more.wait_for(lambda: len(said) >= count, timeout=60), said
        return said

    monkeypatch.setattr(ticker, "say", say)
    monkeypatch.setattr(ticker, "FIRST", 0.01)
    monkeypatch.setattr(ticker, "PACE", 0.01)
    monkeypatch.setattr(ticker, "PHASE", 0.01)
    return wait


def test_long_work_says_a_line_every_so_often(lines):
    with progress("reading", 4, unit="pictures") as tick:
        tick(2)
        assert all(line.startswith("reading: 2 of 4 pictures (50 %)") for line in lines(3)[1:])


def test_the_first_line_comes_sooner_than_the_next(lines, monkeypatch):
    monkeypatch.setattr(ticker, "PACE", 600.0)
    with progress("reading", 4, unit="pictures") as tick:
        assert lines(1)[0].startswith("reading: 0 of 4 pictures (0 %)")
        tick(1)
        with progress("reading again", 4, unit="pictures"):
            assert [line.partition(":")[0] for line in lines(2)] == ["reading", "reading again"]


def test_a_slow_phase_is_named_once(lines):
    with progress("hashing the model", None):
        assert lines(1) == ["hashing the model"]
    with progress("reading", 4, unit="pictures"):
        assert lines(2)[:1] == ["hashing the model"]


def test_nothing_is_said_of_what_is_quiet_or_over(lines):
    with progress("quiet", 4, unit="pictures", shown=False), progress("loud", 4, unit="pictures"):
        lines(2)
    with progress("after", 4, unit="pictures"):
        said = lines(6)
    assert not any(line.startswith("quiet") for line in said)
    assert [line.split(":")[0] for line in said] == sorted((line.split(":")[0] for line in said), reverse=True)


def test_encoding_has_a_bar_for_each_field_and_names_what_loads(prep, photos, tiny_model, tmp_path, monkeypatch):
    opened, counts = [], {}

    class Bar:
        def __init__(self, title, total, *, unit="", shown=True):
            self.title = title
            opened.append((title, total() if callable(total) else total, unit))

        def __enter__(self):
            return lambda count: counts.update({self.title: counts.get(self.title, 0) + count})

        def __exit__(self, *_):
            pass

    monkeypatch.setattr("prep.cli.ticker.progress", Bar)
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
                  "--resolution", 96, "--step", 16, "--device", "cpu", "--mask", "sidecar")
    assert result.code == 0, result.err
    bars = {title: total for title, total, unit in opened if unit == "rows"}
    assert list(bars) == ["encoding masks (1 of 3)", "encoding text (2 of 3)", "encoding latents (3 of 3)"]
    assert {title: counts[title] for title in bars} == bars and bars["encoding latents (3 of 3)"] == 8
    size = sum(path.stat().st_size for part in ("vae", "text_encoder") for path in (tiny_model / part).glob("*.saf*"))
    assert counts["hashing the model"] == size
    assert [title for title, _, unit in opened if not unit] == [
        "planning", "counting tokens", "looking up rows",
        "loading the text encoder", "loading the VAE", "writing the manifest"]
