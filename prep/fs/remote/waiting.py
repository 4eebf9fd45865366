"""Waits for stores that answer without an end, or hardly: what takes long is announced, what never comes is given up.

obstore waits in code that nothing interrupts. Its own limits are of a connection without a byte; here are those of an
answer that moves, and brings nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from queue import Empty, Full, Queue
from typing import Any, TypeVar

from prep.formatting import counted
from prep.fs.remote.errors import Passing, Stopped

T = TypeVar("T")
LONG = 10.0  # seconds after which an answer under way is announced, or may be given up
AGAIN = 60.0  # seconds between two notices of one answer
LOOK = 0.2  # seconds between two looks at what is under way
WIDE = 1 << 16  # bytes of an answer that is read as it comes; a longer one, in parts of a quarter
SLOWEST = 100  # bytes a second; a slower answer counts as none
_log = logging.getLogger("latentry.remote")  # a notice is a line on stderr


def apart(items: Iterable[T], seconds: float, stop: threading.Event) -> Iterator[T]:
    """The items of an iterator that may wait for ever: a thread of its own waits for them, and is left behind then.

    Raises `Passing` if none comes for so many `seconds`, `Stopped`, and what the iterator raises.
    """
    results: Queue[tuple[bool, Any]] = Queue(2)
    abandoned = threading.Event()

    def put(*item: Any) -> None:
        while not abandoned.is_set():
            try:
                results.put(item, timeout=LOOK)
                return
            except Full:
                continue

    def fetch() -> None:
        try:
            for value in items:
                put(True, value)
                if abandoned.is_set():
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)

    threading.Thread(target=fetch, name="store", daemon=True).start()
    try:
        while True:
            going, item = _next(results, seconds, stop)
            if going:
                yield item
            elif item is None:
                return
            else:
                raise item
    finally:
        abandoned.set()


def _next(results: Queue[tuple[bool, Any]], seconds: float, stop: threading.Event) -> tuple[bool, Any]:
    until = time.monotonic() + seconds
    while True:
        try:
            return results.get(timeout=LOOK)
        except Empty:
            if stop.is_set():
                raise Stopped from None
            if time.monotonic() > until:
                raise Passing(f"nothing new came for {seconds:.0f} seconds") from None


class Notices:
    """What is under way, by number: since when, what is said of it, and when that is to be said next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count()
        self._open: dict[int, list[Any]] = {}
        self._watch: threading.Thread | None = None

    @contextmanager
    def of(self, text: Callable[[], str]) -> Iterator[None]:
        """Says `text`, and for how long by now, if the block takes long."""
        now = time.monotonic()
        with self._lock:
            number = next(self._numbers)
            self._open[number] = [now, text, now + LONG]
            if self._watch is None:
                self._watch = threading.Thread(target=self._run, name="notices", daemon=True)
                self._watch.start()
        try:
            yield
        finally:
            with self._lock:
                del self._open[number]

    def _run(self) -> None:
        while True:
            time.sleep(LOOK)
            now = time.monotonic()
            with self._lock:
                due = [entry for entry in self._open.values() if entry[2] <= now]
                for entry in self._open.values():  # one line for all that are under way
                    if due:
                        entry[2] = now + AGAIN
            for since, text, _ in due[:1]:
                others = f"; and {len(due) - 1} more" if len(due) > 1 else ""
                _log.warning("%s; %.0f seconds so far%s", text(), now - since, others)


NOTICES = Notices()


def body_of(answer: Any, url: str, size: int) -> bytes:
    """The body of an answer that should have `size` bytes, or its beginning, if it has more.

    Raises `Passing` if it is shorter, or hardly moves.
    """
    data, begun = bytearray(), time.monotonic()
    with NOTICES.of(lambda: f"waiting for {url}: {len(data)} of {counted(size, 'byte')} have come"):
        for part in answer.stream(min_chunk_size=1 if size < WIDE else WIDE >> 2):
            data += part
            if len(data) > size:
                raise Passing(f"the answer has more than the {size} bytes that it announced")
            taken = time.monotonic() - begun
            if taken > LONG and len(data) < SLOWEST * taken:
                raise Passing(f"the answer came too slowly: {len(data)} bytes in {taken:.0f} seconds")
    if len(data) != size:
        raise Passing(f"the answer ended after {len(data)} of {size} bytes")
    return bytes(data)
