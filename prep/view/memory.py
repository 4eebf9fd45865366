"""Keeps what was made last in memory, within a bound of bytes; each value is made once, also if many ask at a time."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock, Semaphore

from prep.runtime import usable_cores

MOST_BYTES = 96 << 20


class Memory:
    """Bytes by key, the least recently used dropped first. Threads may share one."""

    def __init__(self, most: int = MOST_BYTES, at_once: int = 0) -> None:
        self._most, self.bytes = most, 0
        self._known: OrderedDict[Hashable, bytes | None] = OrderedDict()
        self._making: dict[Hashable, Lock] = {}
        self._lock = Lock()
        self._room = Semaphore(at_once or usable_cores())  # a large picture takes much memory while it is decoded

    def get(self, key: Hashable, make: Callable[[], bytes | None]) -> bytes | None:
        """The value of `key`, made now if it is not known. What `make` raises is raised here, and not kept."""
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
            making = self._making.setdefault(key, Lock())
        with making:
            with self._lock:
                if key in self._known:
                    return self._known[key]
            try:
                with self._room:
                    value = make()
                self.put(key, value)
            finally:
                with self._lock:
                    self._making.pop(key, None)
        return value

    def put(self, key: Hashable, value: bytes | None) -> None:
        """Keeps a value that was made beside another one."""
        with self._lock:
            if key in self._known:
                self.bytes -= _size(self._known[key])
            self._known[key] = value
            self._known.move_to_end(key)
            self.bytes += _size(value)
            while self.bytes > self._most and len(self._known) > 1:
                self.bytes -= _size(self._known.popitem(last=False)[1])


def _size(value: bytes | None) -> int:
    return 200 + len(value or b"")  # with what Python keeps of an entry
