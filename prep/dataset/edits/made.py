"""Tells captions that a model made from those that a person wrote, by what is known of each edit."""

from __future__ import annotations

from collections.abc import Sequence

from prep.dataset.edits.log import UndoEntry, UndoLog, digest_of
from prep.dataset.edits.places import EditPlace
from prep.fs.blob import read_blob
from prep.sources.item import Item


def caption_entries(entries: Sequence[UndoEntry]) -> dict[str, list[UndoEntry]]:
    """The edits of captions by their place, the newest first, as `entries` are."""
    places: dict[str, list[UndoEntry]] = {}
    for entry in entries:
        if entry.kind == "caption":
            places.setdefault(entry.place, []).append(entry)
    return places


def first_made(entries: Sequence[UndoEntry], now: str) -> UndoEntry | None:
    """The edit by which a model first replaced a person's caption, or none, if what is there `now` (a digest) is a
    model's, too; `None` if it is not. `entries` are those of its place, the newest first."""
    first = None
    for entry in entries:
        if entry.after == now and entry.by:
            first, now = entry, entry.before
        elif entry.after == now or entry.before != now:
            break  # else it was never made: a process was killed
    return first


def digest_at(place: EditPlace, item: Item) -> str:
    """The digest of the file at the place of an item's caption; "" if its caption is elsewhere. Raises `OSError`."""
    if item.caption is None or item.caption.file != str(place.path):
        return ""
    return digest_of(read_blob(item.caption))


def made_by(log: UndoLog, place: EditPlace, item: Item) -> str:
    """The model that made an item's caption; "" for a person's. Raises `OSError`."""
    entries = [entry for entry in log.entries() if (entry.place, entry.kind) == (place.name, "caption")]
    now = digest_at(place, item)
    return "" if first_made(entries, now) is None else next(entry.by for entry in entries if entry.after == now)
