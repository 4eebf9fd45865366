"""Where no browser is, tests of pages are skipped and say why; one that was named must work."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import NAMES, Lost, start_browser


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with these programs alone."""
    monkeypatch.delenv("LATENTRY_BROWSER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def stub(path):
    """A program that ends at once, like the placeholder of a package that is not installed."""
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


def test_without_a_browser(bare):
    with pytest.raises(pytest.skip.Exception, match=r"no browser: none of chromium, .* is installed"):
        start_browser()


def test_with_one_that_does_not_start(bare):
    program = stub(bare / NAMES[1])
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(pytest.skip.Exception, match=f"{program} does not start: the browser has ended"):
        start_browser()
    assert len(list(Path("/dev/fd").iterdir())) <= before  # fewer, if garbage of other tests was collected


def test_one_that_was_named_must_start(bare, monkeypatch):
    monkeypatch.setenv("LATENTRY_BROWSER", str(stub(bare / "mine")))
    with pytest.raises(Lost):
        start_browser()
    monkeypatch.setenv("LATENTRY_BROWSER", str(bare / "gone"))
    with pytest.raises(FileNotFoundError):
        start_browser()
