"""Where no browser is, tests of pages are skipped and say why; one that was named must work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from browser import NAMES, start_browser
from PIL import Image


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """A machine with playwright and the programs of a directory alone."""
    pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    monkeypatch.delenv("LATENTRY_BROWSER", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for what playwright leaves of a browser that does not start
    return tmp_path


def stub(path):
    """A program that ends at once, like the placeholder of a package that is not installed."""
    path.write_text("#!/bin/sh\nexit 1\n")
    path.chmod(0o755)
    return path


def test_without_a_browser(bare):
    with pytest.raises(pytest.skip.Exception, match=r"no browser: none of chromium, .* is installed"):
        start_browser()


def test_without_playwright(bare, monkeypatch):
    monkeypatch.setenv("LATENTRY_BROWSER", str(bare / "mine"))
    monkeypatch.setitem(sys.modules, "playwright.sync_api", None)
    with pytest.raises(pytest.skip.Exception, match="playwright is not installed"):
        start_browser()


def test_with_one_that_does_not_start(bare):
    program = stub(bare / NAMES[1])
    before = len(list(Path("/dev/fd").iterdir()))
    with pytest.raises(pytest.skip.Exception, match=f"{program} does not start: BrowserType.launch: "):
        start_browser()
    assert len(list(Path("/dev/fd").iterdir())) <= before  # fewer, if garbage of other tests was collected


def test_one_that_was_named_must_start(bare, monkeypatch):
    from playwright.sync_api import Error

    for name, said in ((stub(bare / "mine"), "has been closed"), (bare / "gone", "doesn't exist")):
        monkeypatch.setenv("LATENTRY_BROWSER", str(name))
        with pytest.raises(Error, match=said):
            start_browser()


def test_screenshots_are_kept_of_each_page_that_a_test_looks_at(browser, tmp_path, monkeypatch):
    kept = tmp_path / "kept"
    for number in (1, 2):
        (tmp_path / f"{number}.html").write_text(f"<body style='height: {number}500px; "
                                                 f"background: rgb(0, {number}, 0)'>")
    browser.open(tmp_path / "1.html")
    browser.keep(last=True)
    assert not kept.exists(), "nobody asked for any"
    monkeypatch.setenv("LATENTRY_SCREENSHOTS", str(kept))
    browser.open(tmp_path / "1.html", width=390)
    browser.open(tmp_path / "2.html", width=500)
    browser.keep(last=True)
    found = [Image.open(path) for path in sorted(kept.iterdir())]
    assert [one.size for one in found] == [(390, 1516), (500, 2516)]
    assert [one.getpixel((9, 1200))[:3] for one in found] == [(0, 1, 0), (0, 2, 0)]
    assert {path.name[:-5] for path in kept.iterdir()} == {
        "test_browser.py-test_screenshots_are_kept_of_each_page_that_a_test_looks_at-"}
