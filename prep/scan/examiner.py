"""Examines the pictures of a scan in worker processes with limits: of this computer, or of one node of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Protocol, TypeVar

from prep.findings import finding
from prep.fs.blob import Blob, fetched_all
from prep.parse import Unparsed
from prep.scan.examine import Examined
from prep.scan.protocol import BlobMessage, ItemMessage, PictureMessage
from prep.scan.worker import EXAMINE
from prep.sources.item import Item
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import Limits, Task

T = TypeVar("T")

BATCH = 8  # items per request: the exchange costs a twentieth of decoding a picture
FETCHERS = 8  # requests at a time, of each thread
SINGLE = 4  # items per worker that are sent singly at first, so that all workers have something to do


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """The result for an item."""

    examined: Examined
    lived: bool = True  # whether a worker answered
    read: Item | None = None  # the item with the versions of its objects that were read; None: it is in files


class Examiner(Protocol):
    """What examines pictures. Threads share it."""

    @property
    def calls(self) -> int:
        """How many calls at a time it is worth to make."""

    def examine(self, items: Sequence[Item]) -> list[Looked]:
        """The results for items, in their order. Raises `StoreError`."""

    def again(self, task: Task[PictureMessage, T], picture: Blob, file: str | None) -> T | None:
        """A picture decoded again, with the digest `file`; `None` if that fails. Raises `StoreError`."""

    def close(self) -> None:
        """Ends what is under way."""


def group_of(examiner: Examiner, sent: int) -> int:
    """How many items a call should have, after so many were sent."""
    return 1 if sent <= SINGLE * examiner.calls else BATCH


class LocalExaminer:
    """Asks a pool of processes of this computer."""

    def __init__(self, workers: WorkerPool, limits: Limits, jobs: int) -> None:
        self._workers, self._limits, self.calls = workers, limits, jobs

    def examine(self, items: Sequence[Item]) -> list[Looked]:
        """As `Examiner.examine`; if the worker is lost, each item is sent alone, to find the one responsible."""
        held = _fetched(items, self._workers.closed)
        try:
            question = tuple(ItemMessage.of(one) for one in held)
            found = [one.examined() for one in self._workers.ask(EXAMINE, question, self._limits)]
            if len(found) != len(items):
                raise Unparsed(f"an answer has {len(found)} items, expected {len(items)}")
            return [Looked(examined=examined, read=None if one is item else _without_bytes(one))
                    for item, one, examined in zip(items, held, found, strict=True)]
        except WorkerLost as lost:
            code, detail = _as_finding(lost, self._limits)
        except Unparsed as error:
            code, detail = "decoder-crashed", f"the decoder gave an invalid answer: {error}"
        if len(items) > 1:
            return [looked for one in items for looked in self.examine([one])]
        return [not_examined(items[0], code, detail)]

    def again(self, task: Task[PictureMessage, T], picture: Blob, file: str | None) -> T | None:
        """As `Examiner.again`."""
        try:
            question = PictureMessage(BlobMessage.of(picture, stop=self._workers.closed), file)
            return next(iter(self._workers.ask(task, question, self._limits)), None)
        except WorkerLost:
            return None

    def close(self) -> None:
        """Ends all workers."""
        self._workers.close()


def not_examined(item: Item, code: str, detail: str) -> Looked:
    """The result for an item whose worker was lost."""
    said = finding(item.label, code, detail)
    return Looked(examined=Examined(findings=(said,), identity=None, thumb=None, captions=()), lived=False)


def _fetched(items: Sequence[Item], stop: Event) -> list[Item]:
    """The items, with the bytes of what they have in stores. Raises `StoreError`, `Stopped`."""
    found = fetched_all((blob for item in items for blob in item.blobs), FETCHERS, stop=stop)
    return [item.with_blobs(found) for item in items] if found else list(items)


def _without_bytes(item: Item) -> Item:
    return item.with_blobs({blob: replace(blob, data=None) for blob in item.blobs})


def _as_finding(lost: WorkerLost, limits: Limits) -> tuple[str, str]:
    """(code, detail) of the finding on a picture that cost a worker."""
    return {"slow": ("decoder-hung", f"was not decoded within {limits.seconds:g} seconds"),
            "memory": ("too-large", "takes more memory than there is"),
            "closed": ("decoder-crashed", "the scan ended before it was decoded"),
            "crash": ("decoder-crashed", f"the decoder ended {lost.detail}")}[lost.cause]
