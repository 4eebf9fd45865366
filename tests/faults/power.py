"""What a disk has after the power went: what was synced, and of the rest any part.

The model is that of POSIX and no file system's own: the bytes of a file are on the disk once it was synced, the names
in a directory once that was synced; of everything since, each piece may be there or not, in any combination. Files
that were not synced are torn: whole, cut short, or full of zeros.
"""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

Tree = dict[str, Any]  # name → Tree or bytes


class Disk:
    """Follows the primitives' calls below `home`; `lose` then makes `home` what it is after a power cut."""

    def __init__(self, home: Path, before: str | None = None) -> None:
        self.home = home.resolve()
        self.fresh = 0
        self.ids: dict[int, int] = {}  # inode → our own number, since inodes are used again
        self.names: dict[int, dict[str, int]] = {}  # directory → its names on the disk
        self.bytes: dict[int, bytes] = {}  # file → its bytes on the disk
        if before is None:
            self._all_is_there(self.home)
        else:
            self._as_kept(json.loads(Path(before).read_text()))

    def saw(self, name: str, path: Path) -> None:
        """A primitive was called, and has done its work."""
        if name in ("create", "make_dir"):
            self._begin(path)
        elif name == "sync":
            self.bytes[self._id(path)] = path.read_bytes()
        elif name == "sync_dir":
            self.names[self._id(path)] = {inner.name: self._id(inner) for inner in path.iterdir()}

    def keep(self, file: str) -> None:
        """Writes down what is on the disk, for a process that goes on after this one was killed."""
        document = {"fresh": self.fresh, "ids": list(self.ids.items()), "names": list(self.names.items()),
                    "bytes": [(number, data.hex()) for number, data in self.bytes.items()]}  # fmt: skip
        Path(file).write_text(json.dumps(document))

    def _as_kept(self, document: dict[str, Any]) -> None:
        self.fresh, self.ids = document["fresh"], dict(document["ids"])
        self.names = dict(document["names"])
        self.bytes = {number: bytes.fromhex(data) for number, data in document["bytes"]}

    def lose(self, seed: int | None) -> None:
        """The power goes. Without a seed all is lost that was not synced; with one, a part drawn from it."""
        draw = random.Random(seed) if seed is not None else None
        now: dict[int, Path] = {self._id(path): path for path in (self.home, *self.home.rglob("*"))}
        tree = self._tree(self._id(self.home), now, draw)
        for path in self.home.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        _lay(self.home, tree)

    def _tree(self, number: int, now: dict[int, Path], draw: random.Random | None) -> Tree:
        there = self.names.get(number, {})
        path = now.get(number)
        newer = {} if path is None else {inner.name: self._id(inner) for inner in path.iterdir()}
        names = dict(there)
        for name in sorted({*there, *newer}):
            if there.get(name) != newer.get(name) and draw is not None and draw.random() < 0.5:
                names.pop(name, None)
                if name in newer:
                    names[name] = newer[name]
        return {name: self._thing(inner, now, draw) for name, inner in names.items()}

    def _thing(self, number: int, now: dict[int, Path], draw: random.Random | None) -> Tree | bytes:
        path = now.get(number)
        if number in self.names or (path is not None and path.is_dir()):
            return self._tree(number, now, draw)
        synced = self.bytes.get(number, b"")
        newer = synced if path is None else path.read_bytes()
        if draw is None or newer == synced:
            return synced
        short = newer[: draw.randrange(len(newer) + 1)]
        return draw.choice([synced, newer, short, short + bytes(len(newer) - len(short))])

    def _begin(self, path: Path) -> None:
        self.fresh += 1
        self.ids[path.stat().st_ino] = self.fresh
        if path.is_dir():
            self.names[self.fresh] = {}

    def _id(self, path: Path) -> int:
        inode = path.stat().st_ino
        if inode not in self.ids:  # made by no primitive: a lock, SQLite's file
            self.fresh += 1
            self.ids[inode] = self.fresh
        return self.ids[inode]

    def _all_is_there(self, path: Path) -> None:
        number = self._id(path)
        if path.is_dir():
            self.names[number] = {inner.name: self._id(inner) for inner in path.iterdir()}
            for inner in path.iterdir():
                self._all_is_there(inner)
        else:
            self.bytes[number] = path.read_bytes()


def _lay(path: Path, tree: Tree) -> None:
    for name, value in tree.items():
        if isinstance(value, bytes):
            (path / name).write_bytes(value)
        else:
            (path / name).mkdir()
            _lay(path / name, value)
