"""A disk that stops at one of its changes, as when a process dies: every later change raises, too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from prep.cache import shard_check as verify
from prep.cache.ledger.ledger import is_finished
from prep.cache.store import Cache
from prep.fs import atomic


class Crashed(BaseException):
    """The process is dead."""


class Disk:
    """Counts the changes of the disk and stops at one of them; torn writes leave half of their bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = 1 << 30
        self.seen: list[tuple[str, str]] = []
        for name in atomic.PRIMITIVES:
            monkeypatch.setattr(atomic, name, self._wrapped(name, getattr(atomic, name)))

    def _wrapped(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def step(first: Any, *rest: Any, **options: Any) -> Any:
            if self.left == 0:
                if name == "write":
                    first.write(bytes(rest[0])[: len(bytes(rest[0])) // 2])
                    first.flush()
                self.left = -1
            if self.left < 0:
                raise Crashed
            self.left -= 1
            self.seen.append((name, str(first if isinstance(first, Path) else first.name)))
            return plain(first, *rest, **options)

        return step


def state(root: Path) -> dict[str, bytes]:
    """Every file but staging's leftovers."""
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and path.relative_to(root).parts[0] != "tmp"
    }


def sound(cache: Cache) -> None:
    """Whatever has a name is whole, at any time."""
    for digest in cache.shards():
        assert verify.verify_shard(cache, digest) == []
    for task in cache.names("commits"):
        assert is_finished(cache, task)
