"""Examines the pictures of a scan in worker processes with limits: of this computer, or of one node of a cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Event
from typing import Any

from prep.findings import finding
from prep.fs.blob import Blob, fetched_all
from prep.parse import Unparsed
from prep.scan.examine import Examined
from prep.scan.protocol import BlobMessage, DecodeRequest, ItemMessage
from prep.scan.worker import EXAMINE, SERVICE
from prep.sources.item import Item
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import Limits

FETCHERS = 8  # requests at a time, of each thread


@dataclass(frozen=True, kw_only=True, slots=True)
class Looked:
    """The result for an item."""

    examined: Examined
    lived: bool = True  # whether a worker answered
    read: Item | None = None  # the item with the versions of its objects that were read; None: it is in files


class Examiner:
    """Asks a pool of processes. Any number of threads use it."""

    def __init__(self, workers: WorkerPool, limits: Limits) -> None:
        self._workers, self._limits = workers, limits

    def examine(self, items: Sequence[Item]) -> list[Looked]:
        """The results for items, in their order; if a worker is lost, each item is sent alone, to find the one
        responsible. Raises `StoreError`."""
        whole = _fetched(items, self._workers.closed)
        try:
            question = tuple(ItemMessage.of(item) for item in whole)
            answers = [message.examined() for message in self._workers.ask(EXAMINE, question, self._limits)]
            if len(answers) != len(items):
                raise Unparsed(f"an answer has {len(answers)} items, expected {len(items)}")
            return [Looked(examined=examined, read=None if read is item else _without_bytes(read))
                    for item, read, examined in zip(items, whole, answers, strict=True)]
        except WorkerLost as lost:
            code, detail = _as_finding(lost, self._limits)
        except Unparsed as error:
            code, detail = "decoder-crashed", f"the decoder gave an invalid answer: {error}"
        if len(items) > 1:
            return [looked for item in items for looked in self.examine([item])]
        return [not_examined(items[0], code, detail)]

    def decode_again(self, task: str, picture: Blob, file: str | None) -> Any:
        """What a task of `SERVICE` makes of a picture with the digest `file`; `None` if that fails. Raises
        `StoreError`."""
        (named,) = (each for each in SERVICE.tasks if each.name == task)
        try:
            question = DecodeRequest(BlobMessage.of(picture, stop=self._workers.closed), file)
            return next(iter(self._workers.ask(named, question, self._limits)), None)
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
    whole = fetched_all((blob for item in items for blob in item.blobs), FETCHERS, stop=stop)
    return [item.with_blobs(whole) for item in items] if whole else list(items)


def _without_bytes(item: Item) -> Item:
    return item.with_blobs({blob: replace(blob, data=None) for blob in item.blobs})


def _as_finding(lost: WorkerLost, limits: Limits) -> tuple[str, str]:
    """(code, detail) of the finding on a picture that cost a worker."""
    return {"slow": ("decoder-hung", f"was not decoded within {limits.seconds:g} seconds"),
            "memory": ("too-large", "takes more memory than there is"),
            "closed": ("decoder-crashed", "the scan ended before it was decoded"),
            "crash": ("decoder-crashed", f"the decoder ended {lost.detail}")}[lost.cause]
