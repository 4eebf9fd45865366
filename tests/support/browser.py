"""Drives an installed Chromium over a pipe with the DevTools protocol: no port, no network, no library.

`LATENTRY_BROWSER` names the program. Without it, the usual names are tried, and tests are skipped on a machine that has
none.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
OPTIONS = ("--headless", "--remote-debugging-pipe", "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
           "--disable-background-networking", "--disable-component-update", "--disable-default-apps", "--disable-sync",
           "--no-sandbox",  # the pages are our own, and containers lack the rights that it needs
           "--disable-extensions", "--hide-scrollbars", "--mute-audio",
           "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1")
PATIENCE = 120  # seconds without an answer, after which the browser hangs


class Lost(Exception):
    """The browser ended, hangs, or refused a command."""


class Browser:
    """One browser with one tab."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.TemporaryDirectory(prefix="latentry-browser-", ignore_cleanup_errors=True)
        self._next, self._rest = 0, b""
        self.events: list[dict] = []  # since the page was opened
        self._session = ""
        try:
            self._pid, self._write, self._read = _start(program, self._profile.name)
        except OSError:
            self._profile.cleanup()
            raise
        try:
            target = self._call("Target.createTarget", url="about:blank")["targetId"]
            self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Network", "Log", "Runtime"):
                self._call(f"{domain}.enable")
        except Lost:
            self.close()
            raise

    def open(self, page: Path | str, *, width: int = 1200, height: int = 900, scheme: str = "light") -> None:
        """Shows a file, or an address, in a window of this size. `scheme`: light or dark."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme},
                                                           {"name": "prefers-reduced-motion", "value": "reduce"}])
        self.events.clear()
        self._call("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        self.loaded()

    def loaded(self) -> None:
        """Waits until a page has been loaded since the last `open` or `press`."""
        while not any(one["method"] == "Page.loadEventFired" for one in self.events):
            self._message()

    def press(self, key: str) -> None:
        """Presses a key as a user does, and forgets earlier events; a single letter or sign is also typed."""
        self.events.clear()
        typed = {"text": key} if len(key) == 1 else {"text": "\r"} if key == "Enter" else {}
        code = {"Enter": 13, "Escape": 27, "ArrowLeft": 37, "ArrowRight": 39, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            self._call("Input.dispatchKeyEvent", type=kind, key=key, windowsVirtualKeyCode=code,
                       **(typed if kind == "keyDown" else {}))

    def screenshot(self) -> bytes:
        """The whole page as a PNG."""
        size = self._call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": min(size["height"], 8000), "scale": 1}
        return base64.b64decode(self._call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)["data"])

    def run(self, script: str):
        """The value of a JavaScript expression on the page. The page's own policy does not hold for it."""
        answer = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise Lost(json.dumps(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def requests(self) -> list[str]:
        """The addresses that the page asked for, without those that hold their own data."""
        urls = [one["params"]["request"]["url"] for one in self.events if one["method"] == "Network.requestWillBeSent"]
        return [url for url in urls if not url.startswith("data:")]

    def complaints(self) -> list[str]:
        """What the console says, such as violations of the page's policy."""
        said = [one["params"]["entry"]["text"] for one in self.events if one["method"] == "Log.entryAdded"]
        return said + [str(one["params"]) for one in self.events
                       if one["method"] in ("Runtime.consoleAPICalled", "Page.javascriptDialogOpening")]

    def close(self) -> None:
        """Ends the browser."""
        for end in (self._write, self._read):
            os.close(end)
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)
        self._profile.cleanup()

    def _call(self, method: str, **params) -> dict:
        self._next += 1
        message = {"id": self._next, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = json.dumps(message).encode() + b"\0"
        try:
            while data:
                data = data[os.write(self._write, data):]
        except BrokenPipeError as error:
            raise Lost("the browser has ended") from error
        while (answer := self._message()).get("id") != self._next:
            pass
        if "error" in answer:
            raise Lost(f"{method}: {answer['error']}")
        return answer["result"]

    def _message(self) -> dict:
        """The next message; events are kept."""
        until = time.monotonic() + PATIENCE
        while b"\0" not in self._rest:
            if not select.select([self._read], [], [], max(0, until - time.monotonic()))[0]:
                raise Lost(f"the browser has not answered for {PATIENCE} s")
            data = os.read(self._read, 1 << 20)
            if not data:
                raise Lost("the browser has ended")
            self._rest += data
        first, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(first)
        if "method" in message:
            self.events.append(message)
        return message


def _start(program: str, profile: str) -> tuple[int, int, int]:
    """(process, where to write, where to read): Chromium reads from its file 3 and writes to its file 4."""
    import fcntl  # not on Windows

    pipes = [os.pipe(), os.pipe()]
    (theirs_in, ours_out), (ours_in, theirs_out) = pipes
    high = [fcntl.fcntl(one, fcntl.F_DUPFD_CLOEXEC, 10) for one in (theirs_in, theirs_out)]  # apart from 3 and 4
    nothing = [(os.POSIX_SPAWN_OPEN, number, os.devnull, os.O_RDWR, 0) for number in (0, 1, 2)]
    files = [(os.POSIX_SPAWN_DUP2, high[0], 3), (os.POSIX_SPAWN_DUP2, high[1], 4)]
    try:
        arguments = [program, *OPTIONS, f"--user-data-dir={profile}", "about:blank"]
        pid = os.posix_spawn(program, arguments, os.environ, file_actions=[*nothing, *files], setpgroup=0)
    except OSError:
        os.close(ours_out)
        os.close(ours_in)
        raise
    finally:
        for one in (theirs_in, theirs_out, *high):
            os.close(one)
    return pid, ours_out, ours_in


def start_browser() -> Browser:
    """A running browser. Skips the test where none is installed; one that `LATENTRY_BROWSER` names must start."""
    if os.name == "nt":
        pytest.skip("pipes to a browser need POSIX")
    named = os.environ.get("LATENTRY_BROWSER")
    program = named or next((found for name in NAMES if (found := shutil.which(name))), None)
    if program is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is installed, and LATENTRY_BROWSER names none")
    try:
        return Browser(program)
    except (Lost, OSError) as error:
        if named:
            raise
        pytest.skip(f"{program} does not start: {error}")


@pytest.fixture(scope="session")
def browser():
    """One browser for all tests of a process."""
    running = start_browser()
    yield running
    running.close()
