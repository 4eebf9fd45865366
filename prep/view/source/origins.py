"""Knows of all samples at once which captions models made, and what people did to them; reads again what has changed.

A file is read once for each caption that a model made: the first time, 10,000 take about a second.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from threading import Lock
from typing import NamedTuple

import numpy as np

from prep.cache.ledger.columns import Column
from prep.captions.read import BadCaption, read_caption
from prep.dataset.edits.apply import CAPTION_END
from prep.dataset.edits.log import UndoEntry, UndoLog
from prep.dataset.edits.made import ACCEPTED, AGAIN, CHANGED, LOOK, Origin, caption_entries, digest_at, origin_of
from prep.dataset.edits.places import EditPlaces
from prep.dataset.edits.refused import Refused
from prep.dataset.ingest import KnownItem
from prep.errors import PathError, Problem
from prep.fs.blob import read_blob
from prep.manifest.select import MADE
from prep.sources.item import Item
from prep.sources.tree import stem_of
from prep.view.source.state import SourceSet, SourceState

MOST_TEXT = 1 << 20  # bytes of a caption that is compared
STATES = {LOOK: "to look at", ACCEPTED: "accepted", CHANGED: "changed by a person", AGAIN: "rejected: asked again"}
Version = tuple[str, tuple[str, ...]]  # who wrote it, and the captions


class _Seen(NamedTuple):
    """What was found at a place, and what it was found from."""

    edits: Sequence[UndoEntry]
    known: Sequence[KnownItem]  # those whose caption is there
    numbers: list[int]  # of their samples
    made: Origin | None


class Origins:
    """The origins of a source's captions. Threads may share one."""

    def __init__(self, source: SourceSet, places: EditPlaces, log: UndoLog) -> None:
        self._source, self._places, self._log, self._lock = source, places, log, Lock()
        self._ids: Column = np.empty((0, 32), np.uint8)  # of the samples that what follows is about
        self._ending: dict[str, list[int]] = {}  # samples by the last name of the pictures, without its extension
        self._names: dict[int, str] = {}  # of the places of samples, as far as they were needed
        self._seen: dict[str, _Seen] = {}
        self._column: Column = np.empty(0, np.uint8)

    def of(self, numbers: Iterable[int]) -> dict[int, Origin]:
        """The origins of a few samples' captions, but for those in which no model has a part."""
        places, seats = caption_entries(self._log.entries()), self._source.state.seats
        found: dict[int, Origin] = {}
        for number in numbers:
            item = seats[number].item.item
            with suppress(Refused, PathError, OSError):
                place = self._places.of(item, "caption")
                origin = origin_of(places.get(place.name, ()), digest_at(place, item))
                if origin is not None:
                    found[number] = origin
        return found

    def versions(self, number: int, origin: Origin) -> tuple[Version, ...]:
        """What the model and the person wrote, side by side; () if there is nothing to compare with."""
        item = self._source.state.seats[number].item.item
        now = _read(item)
        if origin.model is not None:
            return ("model", self._before(origin.model)), ("now" if origin.state == AGAIN else "a person", now)
        if origin.earlier is None:
            return ()
        earlier = self._before(origin.earlier) if origin.earlier.before else self._beside(item)
        return (("model", now), ("before", earlier)) if earlier else ()

    def column(self) -> Column:
        """For each sample 1 + the place of its caption's state in `MADE`, 0 if no model has a part in it: uint8 [N].
        The same array as before if none has changed."""
        state = self._source.state
        places = {name: edits for name, edits in caption_entries(self._log.entries()).items()
                  if any(entry.by for entry in edits)}
        with self._lock:
            self._prepare(state)
            self._seen = {name: self._look(name, edits, state) for name, edits in places.items()}
            column = np.zeros(len(state.seats), np.uint8)
            for seen in self._seen.values():
                if seen.made is not None:
                    column[seen.numbers] = 1 + MADE.index(seen.made.state)
            if not np.array_equal(column, self._column):
                self._column = column
            return self._column

    def rejected_of(self) -> str:
        """The model of which most captions are rejected; "" if none is. As `column` found them last."""
        with self._lock:
            models = Counter(seen.made.by for seen in self._seen.values()
                             if seen.made is not None and seen.made.state == AGAIN)
        return max(models, key=models.__getitem__, default="")

    def _prepare(self, state: SourceState) -> None:
        """Forgets what is about other samples."""
        ids = state.tables.samples.ids
        if np.array_equal(ids, self._ids):
            return
        self._ids, self._names, self._seen, self._ending = ids, {}, {}, {}
        for number, seat in enumerate(state.seats):
            self._ending.setdefault(stem_of(seat.item.item.name.rpartition("/")[2]), []).append(number)

    def _look(self, name: str, edits: Sequence[UndoEntry], state: SourceState) -> _Seen:
        """What is at a place now."""
        seen = self._seen.get(name)
        numbers = self._numbers(name, state) if seen is None else seen.numbers
        known = [state.seats[number].item for number in numbers]
        if seen is not None and seen.edits == edits and all(map(operator.is_, seen.known, known)):
            return seen
        origin = None
        if known:
            with suppress(Refused, PathError, OSError):
                item = known[0].item
                origin = origin_of(edits, digest_at(self._places.of(item, "caption"), item))
        return _Seen(edits, known, numbers, origin)

    def _numbers(self, name: str, state: SourceState) -> list[int]:
        """The samples of a place."""
        numbers = self._ending.get(name.rpartition("/")[2].removesuffix(CAPTION_END), [])
        for number in numbers:
            if number not in self._names:
                with suppress(Refused, PathError):
                    self._names[number] = self._places.of(state.seats[number].item.item, "caption").name
        return [number for number in numbers if self._names.get(number) == name]

    def _before(self, entry: UndoEntry) -> tuple[str, ...]:
        """The captions that an edit replaced; () if there was no file, or it is lost."""
        with suppress(Refused, BadCaption):
            return read_caption(self._log.content(entry) or b"")
        return ()

    def _beside(self, item: Item) -> tuple[str, ...]:
        """The captions beside a picture, which those in a directory of edits replace; () if there are none."""
        if self._places.folder is None:
            return ()
        with suppress(Refused, Problem, BadCaption, OSError):
            place = EditPlaces(recipe=self._places.recipe, folder=None).of(item, "caption")
            with place.folder.opened() as folder:
                return read_caption(folder.read(place.file, MOST_TEXT))
        return ()


def _read(item: Item) -> tuple[str, ...]:
    with suppress(BadCaption, OSError):
        return item.captions if item.caption is None else read_caption(read_blob(item.caption), item.caption_format)
    return ()
