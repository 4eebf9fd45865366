"""Tells captions that a model made from those that a person wrote, by what is known of each edit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from prep.dataset.edits.log import UndoEntry, UndoLog, digest_of
from prep.dataset.edits.places import EditPlace
from prep.fs.blob import read_blob
from prep.sources.item import Item

LOOK, ACCEPTED, CHANGED, AGAIN = "look", "accepted", "changed", "again"


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """What a model and a person did to a caption."""

    state: str  # LOOK: nobody has judged it; ACCEPTED; CHANGED by a person; AGAIN: rejected, and not yet made anew
    by: str  # the model
    model: UndoEntry | None  # the edit that replaced the model's words; `None`: they are what is there now
    earlier: UndoEntry | None  # the edit by which a model replaced what was there before any; `None`: not to compare


def caption_entries(entries: Sequence[UndoEntry]) -> dict[str, list[UndoEntry]]:
    """The edits of captions by their place, the newest first, as `entries` are."""
    places: dict[str, list[UndoEntry]] = {}
    for entry in entries:
        if entry.kind == "caption":
            places.setdefault(entry.place, []).append(entry)
    return places


def history(entries: Sequence[UndoEntry], now: str) -> Iterator[UndoEntry]:
    """Yields the edits that led to what is there `now` (a digest), the newest first. `entries` are those of its place;
    those that were never made, because a process was killed, are left out."""
    for entry in entries:
        if entry.after == now:
            yield entry
            now = entry.before
        elif entry.before != now:
            return


def first_made(entries: Sequence[UndoEntry], now: str) -> UndoEntry | None:
    """The edit by which a model first replaced a person's caption, or none, if what is there `now` (a digest) is a
    model's, too, and no person accepted it; `None` if it is not. `entries` are those of its place, the newest first."""
    return next(reversed(list(takewhile(lambda entry: entry.by, history(entries, now)))), None)


def rejections(entries: Sequence[UndoEntry], now: str) -> int:
    """How often a person rejected what models made at a place. As `first_made`."""
    return sum(entry.verdict == "rejected" for entry in history(entries, now))


def is_rejected(entries: Sequence[UndoEntry], now: str) -> bool:
    """Whether a person rejected what a model made, and nothing was written since. As `first_made`."""
    return next((entry.verdict for entry in history(entries, now)), "") == "rejected"


def origin_of(entries: Sequence[UndoEntry], now: str) -> Origin | None:
    """What a model and a person did to a caption; `None` for one in which no model has a part. As `first_made`."""
    done = list(history(entries, now))
    at = next((at for at, entry in enumerate(done) if entry.by or entry.verdict == "rejected"), None)
    if at is None:
        return None
    if done[at].verdict == "rejected":  # what a person wrote since has nothing of it
        by = next((entry.by for entry in done[at + 1:] if entry.by), "")
        return None if at else Origin(state=AGAIN, by=by, model=done[0], earlier=None)
    earlier = first_made(done[at:], done[at].after)
    if all(entry.verdict == "accepted" for entry in done[:at]):
        return Origin(state=ACCEPTED if at else LOOK, by=done[at].by, model=None, earlier=earlier)
    since = next(entry for entry in reversed(done[:at]) if not entry.verdict)
    return Origin(state=CHANGED, by=done[at].by, model=since, earlier=earlier)


def digest_at(place: EditPlace, item: Item) -> str:
    """The digest of the file at the place of an item's caption; "" if its caption is elsewhere. Raises `OSError`."""
    if item.caption is None or item.caption.file != str(place.path):
        return ""
    return digest_of(read_blob(item.caption))


def entries_at(log: UndoLog, place: EditPlace) -> list[UndoEntry]:
    """The edits of the caption at a place, the newest first."""
    return [entry for entry in log.entries() if (entry.place, entry.kind) == (place.name, "caption")]
