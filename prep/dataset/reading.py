"""Reads facts of files; those that native code must parse, in worker processes: a file that crashes one is a finding.

Pillow reads the headers of JPEG, PNG, GIF and BMP in Python. Those of other formats, color profiles, and what is
decoded for its transparency or mask are the work of C libraries. A data set of plain files starts no worker.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prep.dataset.facts import READERS
from prep.digest import digest_bytes
from prep.findings import CODES
from prep.fs.memo import Fact
from prep.geometry import ONE
from prep.images.decode import quiet_pillow
from prep.images.formats.parts import BadPicture, NoDecoder
from prep.images.formats.sniff import sniff
from prep.images.header import MAX_PIXELS
from prep.parse import Unparsed, expect, list_of, within
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import DECODING, Service, Task

LIMITS = DECODING
MOST_SENT = 200 << 20  # bytes; larger files, such as TIFF of 16 bits, are read here
PARSED = {"JPEG", "PNG", "GIF", "BMP"}  # by Python
_PROFILES = (b"ICC_PROFILE\0", b"iCCP")  # of JPEG and PNG


class NotRead(Exception):
    """A fact could not be read, for a reason that may be gone in the next run: nothing is remembered."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code  # one of prep.findings.CODES
        self.detail = detail


@dataclass(frozen=True, slots=True)
class FactQuestion:
    """The bytes of a file, and the kind of fact to read."""

    kind: str
    data: bytes


@dataclass(frozen=True, slots=True)
class FactAnswer:
    """The fact as JSON, or the finding if this installation cannot read the format."""

    fact: str = ""
    code: str = ""  # "": there is a fact
    detail: str = ""


def needs_worker(kind: str, data: bytes) -> bool:
    """Whether native code parses these bytes for a fact of this kind."""
    if len(data) > MOST_SENT:
        return False
    if kind in ("mask", "picture-alpha", "fault", "mask-mean", "alpha-mean"):  # decoded
        return True
    if kind not in ("picture", "mask-size"):
        return False
    try:
        return sniff(data) not in PARSED or any(mark in data for mark in _PROFILES)
    except BadPicture:
        return False  # no decoder sees it


class FactReader:
    """Reads facts, with workers for what needs them, which `close` ends."""

    def __init__(self) -> None:
        self._pool = WorkerPool(SERVICE)

    def read(self, kind: str, data: bytes) -> Fact:
        """The fact of this kind. Raises `NotRead`."""
        if not needs_worker(kind, data):
            return READERS[kind](data)
        try:
            (answer,) = self._pool.ask(READ, FactQuestion(kind, data), LIMITS)
            if not answer.code:
                return checked(answer.fact, data)
            raise NotRead(known_code(answer.code, "code"), answer.detail)
        except WorkerLost as lost:
            raise NotRead(*lost.finding(LIMITS)) from None
        except (Unparsed, ValueError) as error:
            raise NotRead("decoder-crashed", f"got an invalid answer from its decoder: {error}") from None

    @property
    def closed(self) -> threading.Event:
        """Set by `close`."""
        return self._pool.closed

    def close(self) -> None:
        """Ends the workers; callers that wait for an answer get `NotRead`."""
        self._pool.close()


def checked(spelled: str, data: bytes) -> Fact:
    """A fact from a worker, which the file may have taken over: it can lie of its own file, but not of its digest.

    Raises `Unparsed`.
    """
    try:
        document = expect(json.loads(spelled), dict, "the fact")
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"the fact is not JSON: {error}") from None
    if unknown := sorted(document.keys() - _CHECKS.keys()):
        raise Unparsed(f"the fact has {unknown[0][:80]!r}")
    fact = {name: _CHECKS[name](value, name) for name, value in document.items()}
    return {**fact, "digest": digest_bytes(data)} if "digest" in fact else fact


def known_code(value: Any, where: str) -> str:
    """A code of findings. Raises `Unparsed`."""
    if value not in CODES:
        raise Unparsed(f"{where} is {str(value)[:80]!r}, expected that of a finding")
    return str(value)


def _side(value: Any, where: str) -> int:
    within(side := expect(value, int, where), 1, MAX_PIXELS, where)
    return side


def _size(value: Any, where: str) -> list[int] | None:
    return None if value is None else _two(list_of(value, _side, where), where)


def _focus(value: Any, where: str) -> list[int] | None:
    return None if value is None else _two(list_of(value, _share, where), where)


def _share(value: Any, where: str) -> int:
    within(share := expect(value, int, where), 0, ONE, where)
    return share


def _mean(value: Any, where: str) -> float | None:
    if value is None:
        return None
    within(mean := float(expect(value, float, where)), 0, 1, where)
    return mean


def _two(values: list[Any], where: str) -> list[Any]:
    if len(values) != 2:
        raise Unparsed(f"{where} has {len(values)} numbers, expected 2")
    return values


def _text(value: Any, where: str) -> str:
    return expect(value, str, where)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "digest": _text, "width": _side, "height": _side, "alpha": lambda value, where: expect(value, bool, where),
    "code": known_code, "detail": _text, "size": _size, "focus": _focus,
    "mean": _mean, "cut": lambda value, where: expect(value, bool, where),
}


def _read(question: FactQuestion) -> Iterator[FactAnswer]:
    try:
        yield FactAnswer(fact=json.dumps(READERS[question.kind](question.data)))
    except NoDecoder as error:
        yield FactAnswer(code=error.code, detail=error.detail)


READ = Task(name="read", question=FactQuestion, part=FactAnswer, work=_read)
SERVICE = Service(module=__name__, tasks=(READ,), prepare=quiet_pillow)
