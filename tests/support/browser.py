"""Drives an installed Chromium with playwright, which downloads no browser here, and reaches this machine alone.

`LATENTRY_BROWSER` names the program. Without it, the usual names are tried, and tests are skipped on a machine that has
none. `LATENTRY_SCREENSHOTS` names a directory in which each page that a test looked at is kept as it left it.

Playwright runs in a thread of its own: its event loop stays in that thread, where other tests could start none.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ("--disable-gpu", "--disable-sync", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
PATIENCE = 120  # seconds without an answer, after which the browser hangs
HIGHEST = 8000  # pixels of a screenshot


class Browser:
    """One browser with one tab. Raises playwright's `Error` if it ends or refuses, `TimeoutError` if it hangs."""

    def __init__(self, program: str) -> None:
        self._asked: SimpleQueue[tuple[Future, Callable[[], Any]] | None] = SimpleQueue()
        self._loads, self._requests, self._complaints = 0, list[str](), list[str]()  # since the page was opened
        self._look: tuple[int, int, str] | None = None  # the window's size and scheme
        self._opened = 0  # pages of the running test
        Thread(target=self._work, name="browser", daemon=True).start()  # a daemon, since a browser may hang
        try:
            self._do(self._start, program)
        except BaseException:
            self._asked.put(None)
            raise

    def open(self, page: Path | str, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Shows a file, or an address, in a window of this size. `scheme`: light or dark."""
        self.keep()
        if (look := (width, height, scheme)) != self._look:
            self._do(self._tab.set_viewport_size, {"width": width, "height": height})
            self._do(self._tab.emulate_media, color_scheme=scheme, reduced_motion="reduce")
            self._look = look
        self.forget()
        self._do(self._tab.goto, page if isinstance(page, str) else page.resolve().as_uri())

    def loaded(self) -> None:
        """Waits until a page has been loaded since the last `open`, `press` or `forget`."""
        def wait() -> None:
            while not self._loads:
                self._tab.wait_for_event("load")
        self._do(wait)

    def forget(self) -> None:
        """Forgets what has happened so far."""
        self._loads, self._requests, self._complaints = 0, [], []

    def press(self, key: str) -> None:
        """Presses a key as a user does, and forgets earlier events; a single letter or sign is also typed."""
        self.forget()
        self._do(self._tab.keyboard.press, key)

    def type(self, text: str) -> None:
        """Types a text into the field that has the focus."""
        self._do(self._tab.keyboard.insert_text, text)

    def drag(self, *points: tuple[float, float]) -> None:
        """Moves the pointer through these points of the window, with its button pressed from the first to the last."""
        mouse = self._tab.mouse
        self._do(mouse.move, *points[0])
        self._do(mouse.down)
        for point in points[1:]:
            self._do(mouse.move, *point)
        self._do(mouse.up)

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        size = self.run("({width: document.documentElement.scrollWidth, "
                        "height: document.documentElement.scrollHeight})")
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], HIGHEST)}
        return self._do(self._tab.screenshot, full_page=True, clip=clip)

    def keep(self, *, last: bool = False) -> None:
        """Keeps a screenshot of what the running test sees, if `LATENTRY_SCREENSHOTS` names a directory."""
        if (named := os.environ.get("LATENTRY_SCREENSHOTS")) and self._opened:
            test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
            name = re.sub(r"[^\w.-]+", "-", test.removeprefix("tests/pages/")).strip("-")[:200]
            Path(named).mkdir(parents=True, exist_ok=True)
            (Path(named) / f"{name}-{self._opened}.png").write_bytes(self.screenshot())
        self._opened = 0 if last else self._opened + 1

    def run(self, script: str):
        """The value of a JavaScript expression on the page. The page's own policy does not hold for it."""
        return self._do(self._tab.evaluate, script)

    def requests(self) -> list[str]:
        """The addresses that the page asked for, without those that hold their own data."""
        return [url for url in self._requests if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """What the console says, such as violations of the page's policy; dialogs; and what scripts did not catch."""
        return self._complaints

    def close(self) -> None:
        """Ends the browser. One that hangs ends with this process."""
        try:
            with suppress(TimeoutError):
                self._ask(self._stop).result(10)
        finally:
            self._asked.put(None)

    def _start(self, program: str) -> None:
        from playwright.sync_api import sync_playwright

        self._playwright = sync_playwright().start()
        try:
            # Its sandbox, which playwright leaves off, needs rights that containers lack; the pages are our own.
            browser = self._playwright.chromium.launch(executable_path=program, args=OPTIONS, timeout=1000 * PATIENCE,
                                                       handle_sigint=False, handle_sigterm=False, handle_sighup=False)
            self._tab = browser.new_page()
        except BaseException:
            self._playwright.stop()
            raise
        self._tab.set_default_timeout(1000 * PATIENCE)
        self._tab.on("load", self._count)
        self._tab.on("request", lambda asked: self._requests.append(asked.url))
        self._tab.on("console", lambda said: self._complaints.append(f"{said.type}: {said.text}"))
        self._tab.on("pageerror", lambda error: self._complaints.append(str(error)))
        self._tab.on("dialog", self._refuse)

    def _stop(self) -> None:
        try:
            self._tab.context.browser.close()
        finally:
            self._playwright.stop()

    def _count(self, _: Any) -> None:
        self._loads += 1

    def _refuse(self, dialog: Any) -> None:
        if dialog.type == "beforeunload":
            dialog.accept()
        else:
            self._complaints.append(f"{dialog.type}: {dialog.message}")
            dialog.dismiss()

    def _do(self, what: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """The result of a call in playwright's thread."""
        return self._ask(partial(what, *args, **named)).result(2 * PATIENCE)

    def _ask(self, call: Callable[[], Any]) -> Future:
        answer: Future = Future()
        self._asked.put((answer, call))
        return answer

    def _work(self) -> None:
        while asked := self._asked.get():
            answer, call = asked
            try:
                answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)


def start_browser() -> Browser:
    """A running browser. Skips the test where none is installed; one that `LATENTRY_BROWSER` names must start."""
    error = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").Error
    named = os.environ.get("LATENTRY_BROWSER")
    program = named or next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed, and LATENTRY_BROWSER names none")
    try:
        return Browser(program)
    except error as reason:
        if named:
            raise
        pytest.skip(f"{program} does not start: {reason}")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One browser for all tests of a process."""
    running = start_browser()
    yield running
    running.close()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> None:
    """Keeps what a test saw last, while its servers still run."""
    if running := getattr(item, "funcargs", {}).get("browser"):
        running.keep(last=True)
