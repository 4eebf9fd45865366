"""A service for tests of worker pools: its one task counts, or does what no task should."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

from prep.workers.service import Service, Task


def work(asked: tuple[str, int]) -> Iterator[int]:
    what, count = asked
    if what == "hang":
        while True:
            pass
    if what == "crash":
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "leave":
        os._exit(3)
    if what == "eat":
        eaten = []
        while True:
            eaten.append(bytearray(64 << 20))
    if what == "bug":
        raise ZeroDivisionError
    if what == "other type":
        yield "no number"  # type: ignore[misc]
    while what == "for ever":
        yield 1
    if what == "print":
        os.system("echo to stdout; echo to stderr >&2")
        print("and so")
        yield 7
    yield from range(count)


DO = Task(name="do", question=tuple[str, int], part=int, work=work)
SERVICE = Service(module="odd_service", tasks=(DO,))
