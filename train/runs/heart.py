"""The heartbeat of a training process, and what others ask of it, by a file or by a signal.

It is a thread beside the steps, so a step costs the same.
The thread also beats while the model is loaded, and while samples are validated and drawn. Only the first of several
ranks has one. What it cannot write, on a full disk, is written with a later beat: it never ends a run.
"""

from __future__ import annotations

import math
import os
import platform
import secrets
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType, TracebackType
from typing import Self

from prep.errors import first_line
from prep.fs.atomic import write_passing
from prep.runs.heartbeat import KINDS, NAME, Heartbeat, Kind, boot_id, own_start
from prep.runs.requests import forget_requests, is_asked
from train.runs.log import Log

BEAT = 2.0  # seconds between heartbeats
LOOK = 0.25  # seconds between looks for a request
STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
# Seconds in which a signal repeats itself: schedulers send it to each process and to their group, and torchrun passes
# on what it gets.
AGAIN = 2.0


class Requests:
    """Requests to a training process, as events that its loop looks at between steps."""

    def __init__(self) -> None:
        self.events: dict[Kind, threading.Event] = {kind: threading.Event() for kind in KINDS}

    @property
    def stop(self) -> threading.Event:
        """To stop after the step."""
        return self.events["stop"]

    @property
    def sample(self) -> threading.Event:
        """To draw sample pictures after the step."""
        return self.events["sample"]


class Heart(Requests):
    """The thread, as a context manager: it beats in the run's directory inside, and looks for requests there."""

    def __init__(self, run: Path, log: Log) -> None:
        super().__init__()
        self._run, self._log = run, log
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._who = Heartbeat(token=secrets.token_hex(16), pid=os.getpid(), host=platform.node(), boot=boot_id(),
                              start=own_start(), time=0.0, phase="", since=0.0, step=0, stepped=0.0)

    def __enter__(self) -> Self:
        forget_requests(self._run)
        self._beat()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._over.set()
        self._thread.join()
        forget_requests(self._run)
        if error is None or self._log.last.get("event") == "stopped":
            with suppress(OSError):
                (self._run / NAME).unlink(missing_ok=True)
        else:
            self._beat("interrupted" if isinstance(error, KeyboardInterrupt) else first_line(error))

    def _work(self) -> None:
        due = time.monotonic() + BEAT
        while not self._over.wait(LOOK):
            taken = [kind for kind in KINDS if is_asked(self._run, kind, self._who.token)]
            for kind in taken:
                self.events[kind].set()
            if taken or time.monotonic() >= due:
                due = time.monotonic() + BEAT
                self._beat()

    def _beat(self, ended: str | None = None) -> None:
        (phase, since), (step, stepped) = self._log.doing, self._log.stepped
        requests = tuple(kind for kind, event in self.events.items() if event.is_set())
        beat = replace(self._who, time=time.time(), phase=phase, since=since, step=step, stepped=stepped,
                       asked=requests, ended=ended)
        with suppress(OSError):
            write_passing(self._run / NAME, beat.spell())


@contextmanager
def set_by_signals(stop: threading.Event) -> Iterator[None]:
    """The first Ctrl-C, or signal by which clusters ask for a stop, sets the event. A later Ctrl-C raises
    `KeyboardInterrupt` at once, unless it repeats the first within `AGAIN` seconds."""
    signaled = math.inf
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal signaled
        if number == signal.SIGINT and time.monotonic() - signaled >= AGAIN:
            raise KeyboardInterrupt
        signaled = min(signaled, time.monotonic())
        stop.set()

    heeded = [number for number in STOPPING
              if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, ask) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
