"""Keeps what each edit replaced, so that it can be undone, also after a restart.

    NUMBER.before   the previous bytes; missing if there was no file
    NUMBER.json     which file was written, and the digests of its bytes before and after; of a caption that a model
                    made, which model, and a digest of all that decided it; of a person's verdict on one, what it is

Both are written before the file itself, the document last. A process that is killed in between leaves an entry whose
edit was never made, which the digests show. Paths are never read from an entry: it is found by the name of a place that
was computed from a picture.

Documents of a verdict have version 2, all others version 1. An accepted caption stays as it is, so its entry keeps no
bytes; a rejected one became what it was before the model.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from prep.dataset.edits.refused import Refused
from prep.digest import digest_bytes
from prep.fs.below import Below, Folder
from prep.parse import Unparsed, expect, known_keys

FORMAT = "latentry/edit"
MOST_BYTES = 1 << 28  # of what can be undone
MOST_DOCUMENT = 1 << 16
_Stamp = tuple[int, int, int]  # of a document: when it was written, its size, its inode
AT_REST = 2 * 10**9  # ns after which a change of a directory cannot have the time of the one before
TEXTS, MADE = ("place", "kind", "before", "after"), ("by", "how", "verdict")  # MADE: only of what a model made
Verdict = Literal["", "accepted", "rejected"]
_NAME = re.compile(r"([0-9]{8})\.json")


@dataclass(frozen=True, kw_only=True, slots=True)
class UndoEntry:
    """One edit."""

    number: int
    place: str  # name of the place
    kind: str  # caption or mask
    before: str  # SHA-256 of the file's bytes; "": there was no file
    after: str
    by: str = ""  # the model that made it; "": a person
    how: str = ""  # digest of what it was made by: model, prompts, picture
    verdict: str = ""  # a person's, on what a model made; one of `Verdict`


class UndoLog:
    """The edits in a directory, which is made with the first one. One thread at a time."""

    def __init__(self, root: Below) -> None:
        self.root = root
        self._last = (0, 0)  # the number that was given last, and when the directory changed by that
        self._known: tuple[int, list[UndoEntry]] | None = None  # when the directory last changed, and the entries then
        self._parsed: dict[int, tuple[_Stamp, UndoEntry]] = {}  # documents at rest: there may be a hundred thousand

    def entries(self) -> list[UndoEntry]:
        """All edits that were not undone, the newest first. A damaged entry is left out."""
        begun = time.time_ns()
        try:
            with self.root.opened() as folder:
                changed = folder.status().st_mtime_ns
                if self._known is not None and self._known[0] == changed:
                    return self._known[1]
                numbers = sorted(_numbers(folder), reverse=True)
                entries = [entry for entry in (self._read(folder, number, begun) for number in numbers)
                           if entry is not None]
        except OSError:
            return []
        self._known = (changed, entries) if begun - changed > AT_REST else None
        return entries

    def _read(self, folder: Folder, number: int, now: int) -> UndoEntry | None:
        """The entry of a number; a document that was read at rest is read again only if its stamp has changed."""
        try:
            status = folder.status(_document(number))
        except OSError:
            return None
        stamp = status.st_mtime_ns, status.st_size, status.st_ino
        if (parsed := self._parsed.get(number)) is not None and parsed[0] == stamp:
            return parsed[1]
        entry = _read(folder, number)
        if entry is not None and now - status.st_mtime_ns > AT_REST:
            self._parsed[number] = stamp, entry
        return entry

    def add(self, place: str, kind: str, before: bytes | None, after: bytes | None, *, by: str = "", how: str = "",
            verdict: Verdict = "") -> UndoEntry:
        """Notes an edit that is about to be made, or a verdict. Raises `OSError`."""
        with self.root.opened(make=True) as folder:
            number, changed = self._last
            if folder.status().st_mtime_ns != changed:  # else all names were read: there may be a hundred thousand
                number = max(_numbers(folder), default=0)
            while True:
                number += 1
                entry = UndoEntry(number=number, place=place, kind=kind, before=digest_of(before),
                                  after=digest_of(after), by=by, how=how, verdict=verdict)
                if before is not None and verdict != "accepted" and not folder.create(_content(number), before):
                    continue
                document = json.dumps({"format": FORMAT, "version": 2 if verdict else 1, **_spelled(entry)}).encode()
                if folder.create(_document(number), document):  # else another process has this number
                    self._known, self._last = None, (number, folder.status().st_mtime_ns)
                    return entry

    def content(self, entry: UndoEntry) -> bytes | None:
        """The bytes before an edit; `None` if there was no file. Raises `Refused` if they are lost."""
        if not entry.before:
            return None
        try:
            with self.root.opened() as folder:
                data = folder.read(_content(entry.number), MOST_BYTES)
        except OSError as error:
            raise Refused(409, f"what the edit replaced cannot be read: {error}") from None
        if digest_bytes(data) != entry.before:
            raise Refused(409, "what the edit replaced is damaged, so it cannot be undone")
        return data

    def drop(self, entry: UndoEntry) -> None:
        """Forgets an edit. Raises `OSError`."""
        self._known = None
        self._parsed.pop(entry.number, None)
        with self.root.opened() as folder:
            folder.remove(_document(entry.number))
            folder.remove(_content(entry.number))


def _numbers(folder: Folder) -> Iterator[int]:
    return (int(match[1]) for name in folder.names() if (match := _NAME.fullmatch(name)))


def _read(folder: Folder, number: int) -> UndoEntry | None:
    try:
        table = expect(json.loads(folder.read(_document(number), MOST_DOCUMENT)), dict, "an edit")
        known_keys(table, ("format", "version", "number", *TEXTS, *MADE), "an edit")
        texts = {name: expect(table.get(name, "" if name in MADE else None), str, name) for name in (*TEXTS, *MADE)}
    except (OSError, ValueError, RecursionError, Unparsed):
        return None
    known = table.get("format") == FORMAT and table.get("version") == (2 if texts["verdict"] else 1)
    return UndoEntry(number=number, **texts) if known and texts["verdict"] in get_args(Verdict) else None


def _spelled(entry: UndoEntry) -> dict[str, object]:
    """The entry without what a person's has not."""
    return {name: value for name, value in asdict(entry).items() if value or name not in MADE}


def _document(number: int) -> str:
    return f"{number:08}.json"


def _content(number: int) -> str:
    return f"{number:08}.before"


def digest_of(data: bytes | None) -> str:
    """The SHA-256 of a file's bytes; "" for no file."""
    return "" if data is None else digest_bytes(data)
