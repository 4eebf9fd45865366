"""Saves captions and masks from the pages, and undoes that, while what is on the disk is what the page showed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from threading import Lock

from prep.captions.read import BadCaption, judge_captions, read_caption
from prep.dataset.edits.log import UndoEntry, UndoLog, digest_of
from prep.dataset.edits.made import entries_at, first_made, history
from prep.dataset.edits.places import EditPlace, EditPlaces
from prep.dataset.edits.refused import Refused
from prep.dataset.samples import PlacedItem
from prep.digest import digest_strings
from prep.fs.below import Folder
from prep.fs.blob import Blob, read_blob
from prep.fs.untrusted import NotRegularFile
from prep.geometry import Size
from prep.recipe.schema import Recipe
from prep.sources.item import Item
from prep.view.edit.cost import Cost
from prep.view.edit.refresh import refreshed
from prep.view.source.state import SourceSet

MOST_TEXT = 1 << 16  # bytes of the captions of a picture
MOST_FILE = 1 << 28  # bytes of a caption or a mask on the disk
KINDS = ("caption", "mask")
PATIENCE = 5.0  # seconds for which another editor's save is waited for

MaskMaker = Callable[[bytes, Size], bytes | None]  # an uploaded picture to a mask of this size; None: it is none


@dataclass(frozen=True, kw_only=True, slots=True)
class Editable:
    """A caption or a mask for its page."""

    place: str  # where it is written
    version: str  # of what is there now
    undo: bool  # whether its last edit can be undone
    saved: bool  # whether there is a file already
    exists: bool  # whether the picture has one
    lines: tuple[str, ...]  # captions as they are edited; none if they cannot be read


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """The outcome of a save or an undo."""

    said: str  # for the user
    version: str  # of what is there now
    undo: bool  # whether the last edit of it can be undone


@dataclass(frozen=True, kw_only=True, slots=True)
class Edits:
    """The places and commands for editing a source."""

    places: EditPlaces
    command: str  # that encodes again
    captioning: str = "prep caption SOURCE"  # the command that asks models, but for which
    record: Callable[[], str] = str  # after a save: notes in the recipe where edits are, and says so
    cost: Callable[[], Cost] | None = None  # what that would make; None: no cache or model is known


@dataclass(frozen=True, kw_only=True, slots=True)
class Sent:
    """A caption or mask that a page sends."""

    number: int
    kind: str  # one of KINDS
    sample: str  # the id of the sample that the page showed
    version: str  # of the caption or mask that it showed
    media: str  # type of the body
    body: bytes


class Editor:
    """Edits the pictures of a source. Threads may share one; other processes may edit the same pictures."""

    def __init__(self, source: SourceSet, edits: Edits, make_mask: MaskMaker) -> None:
        self.source, self.edits, self.places = source, edits, edits.places
        self.log = UndoLog(edits.places.undo)
        self.batches: dict[str, tuple[Sent, ...]] = {}  # what was saved at once, and undoing each of it would send
        self._make_mask, self._lock = make_mask, Lock()

    def editable(self, number: int, kind: str, entries: Sequence[UndoEntry] | None = None) -> Editable:
        """The facts that the edit forms of a sample need; `entries` are those of the log, if they are known. Raises
        `Refused` if the sample cannot be edited."""
        item = self.source.state.seats[number].item.item
        place = self.places.of(item, kind)
        with self._lock:
            disk = _on_disk(place)
            undo = self._undoable(place, kind, digest_of(disk), entries) is not None
        return Editable(place=place.name, version=_version(item, kind, disk), undo=undo, saved=disk is not None,
                        exists=disk is not None or _blob_of(item, kind) is not None,
                        lines=_lines_of(item, disk) if kind == "caption" else ())

    def no_masks(self, number: int) -> str:
        """The reason why the mask of a sample is not edited; "" if it is."""
        return no_masks(self.source.state.survey.original, self.source.state.seats[number].item.item.source,
                        sidecars=self.places.folder is None)

    def save(self, sent: Sent) -> Done:
        """Saves captions, one per line, or a mask, a PNG of the picture's shape. Raises `Refused`, `OSError`."""
        data = self._captions(sent) if sent.kind == "caption" else self._mask(sent)
        with self._held(sent) as (seat, place, folder, disk):
            if disk != data:
                self.log.add(place.name, sent.kind, disk, data)
                folder.write(place.file, data)
                self._refresh(seat, sent.kind, place, gone=False)
            undo = disk != data or self._undoable(place, sent.kind, digest_of(data)) is not None
        return Done(said=f"Saved to {place.name}.{self.edits.record()}", version=digest_of(data), undo=undo)

    def undo(self, sent: Sent) -> Done:
        """Restores what the last edit of a caption or mask replaced. As `save`."""
        with self._held(sent) as (seat, place, folder, disk):
            entry = self._undoable(place, sent.kind, digest_of(disk))
            if entry is None:
                raise Refused(409, f"there is no edit of {place.name} that can be undone, or it was changed elsewhere "
                              "since")
            if entry.verdict == "accepted":
                self.log.drop(entry)
                return Done(said=f"{place.name} is as the model wrote it, and not accepted.", version=sent.version,
                            undo=self._undoable(place, sent.kind, digest_of(disk)) is not None)
            before = self.log.content(entry)
            _put(folder, place, before)
            self.log.drop(entry)
            return Done(said=f"{place.name} is as it was before the last save.",
                        version=self._restored(sent, seat, place, before),
                        undo=self._undoable(place, sent.kind, digest_of(before)) is not None)

    def accept(self, sent: Sent) -> Done:
        """Notes that a person accepts what a model made, which counts as a person's from then on. As `save`."""
        with self._held(sent) as (_, place, _, disk):
            self._first_made(place, digest_of(disk))
            self.log.add(place.name, sent.kind, disk, disk, verdict="accepted")
        return Done(said="Accepted: prep caption keeps it.", version=sent.version, undo=True)

    def ask_again(self, sent: Sent) -> Done:
        """Rejects what a model made: restores what was there before any, and `prep caption` asks anew. As `save`."""
        with self._held(sent) as (seat, place, folder, disk):
            before = self.log.content(self._first_made(place, digest_of(disk)))
            if before is None and self.source.state.survey.original.caption_of(
                    seat.item.item.source).missing == "reject":
                raise Refused(400, "without a caption the picture would be left out (--missing-caption reject): start "
                              "with --missing-caption empty")
            self.log.add(place.name, sent.kind, disk, before, verdict="rejected")
            _put(folder, place, before)
            return Done(said=f"Rejected: {place.name} is as before, and prep caption will ask again.",
                        version=self._restored(sent, seat, place, before), undo=True)

    def _first_made(self, place: EditPlace, now: str) -> UndoEntry:
        """As `first_made`. Raises `Refused` if what is there is not a model's."""
        first = first_made(entries_at(self.log, place), now)
        if first is None:
            raise Refused(409, f"{place.name} is not what a model wrote, or is accepted already: load this page again")
        return first

    def _restored(self, sent: Sent, seat: PlacedItem, place: EditPlace, before: bytes | None) -> str:
        """Shows that a place is as it was; the version of what is there now."""
        self._refresh(seat, sent.kind, place, gone=before is None)
        item = seat.item.item
        with suppress(Refused):  # without a caption, the picture may be gone
            item = self._seat(sent.number, sent.sample).item.item
        return _version(item, sent.kind, before)

    def changed(self) -> dict[str, int]:
        """The number of captions and of masks that differ from what they were before all edits."""
        first: dict[tuple[str, str], str] = {}
        last: dict[tuple[str, str], str] = {}
        with self._lock:
            for entry in self.log.entries():  # the newest first
                last.setdefault((entry.kind, entry.place), entry.after)
                first[entry.kind, entry.place] = entry.before
        return {kind: sum(key[0] == kind and first[key] != last[key] for key in last) for kind in KINDS}

    def _captions(self, sent: Sent) -> bytes:
        """The file of captions. Raises `Refused`."""
        data, source = _caption_file(sent), self._seat(sent.number, sent.sample).item.item.source
        if not data and self.source.state.survey.original.caption_of(source).missing == "reject":
            raise Refused(400, "without a caption the picture would be left out (--missing-caption reject): write "
                          "one, or start with --missing-caption empty")
        return data

    def _mask(self, sent: Sent) -> bytes:
        """The file of a mask. Raises `Refused`."""
        size = self._seat(sent.number, sent.sample).item.size
        if why := self.no_masks(sent.number):
            raise Refused(409, why)
        if sent.media != "image/png":
            raise Refused(415, f"a mask is sent as image/png, not as {sent.media or 'nothing'}")
        data = self._make_mask(sent.body, size)
        if data is None:
            raise Refused(400, "the mask is no PNG of the picture's shape")
        return data

    def _seat(self, number: int, sample: str) -> PlacedItem:
        seats = self.source.state.seats
        if number >= len(seats) or seats[number].id != sample:
            raise Refused(409, "this page shows another picture by now: load it again")
        return seats[number]

    @contextmanager
    def _held(self, sent: Sent) -> Iterator[tuple[PlacedItem, EditPlace, Folder, bytes | None]]:
        """The sample, the place of its caption or mask, and what is there, if that is what the page showed; no other
        editor, here or in another process, writes there meanwhile. Raises `Refused`."""
        with self._lock:
            seat = self._seat(sent.number, sent.sample)
            place = self.places.of(seat.item.item, sent.kind)
            _check_version(seat.item.item, sent, _on_disk(place))  # before a directory is made
            try:
                with place.folder.opened(make=True) as folder, folder.locked(PATIENCE):
                    disk = _read(place, folder)
                    _check_version(seat.item.item, sent, disk)
                    yield seat, place, folder, disk
            except NotRegularFile as error:
                raise _linked(place, error) from None
            except TimeoutError as error:
                raise Refused(409, f"{place.name} is not saved: {error.strerror}; try again") from None

    def _undoable(self, place: EditPlace, kind: str, now: str,
                  entries: Sequence[UndoEntry] | None = None) -> UndoEntry | None:
        """The last edit of a place, if its result is still there."""
        entries = self.log.entries() if entries is None else entries
        return next(history([entry for entry in entries if (entry.place, entry.kind) == (place.name, kind)], now), None)

    def _refresh(self, seat: PlacedItem, kind: str, place: EditPlace, *, gone: bool) -> None:
        self.source.show(refreshed(self.source.state.survey, seat.item.item, kind, None if gone else place.path))


def _caption_file(sent: Sent) -> bytes:
    """The file of captions. Raises `Refused`."""
    if sent.media != "text/plain":
        raise Refused(415, f"captions are sent as text/plain, not as {sent.media or 'nothing'}")
    if len(sent.body) > MOST_TEXT:
        raise Refused(413, f"the captions have {len(sent.body)} bytes, expected at most {MOST_TEXT}")
    try:
        lines = judge_captions(sent.body.decode().splitlines())[0]
    except UnicodeDecodeError:
        raise Refused(400, "the captions are not UTF-8") from None
    except BadCaption as error:
        raise Refused(400, error.detail) from None
    return "".join(f"{line}\n" for line in lines).encode()


def no_masks(recipe: Recipe, source: int, *, sidecars: bool) -> str:
    """The reason why masks of a source are not edited; "" if they are."""
    origin = recipe.mask_of(source)
    if origin in ("none", "alpha"):
        return ("masks are not used (--mask none)" if origin == "none" else
                "masks are the pictures' transparency (--mask alpha), which is not edited here")
    if sidecars and origin not in ("auto", "sidecar"):
        return f"masks come from {origin}, so one beside the picture would not be read: leave --sidecars out"
    return ""


def _on_disk(place: EditPlace) -> bytes | None:
    """The bytes of the file there; `None` if there is none. Raises `Refused`."""
    try:
        with place.folder.opened() as folder:
            return _read(place, folder)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _linked(place, error) from None


def _read(place: EditPlace, folder: Folder) -> bytes | None:
    """As `_on_disk`, of an open directory. Raises `OSError`, too."""
    try:
        return folder.read(place.file, MOST_FILE)
    except FileNotFoundError:
        return None


def _put(folder: Folder, place: EditPlace, data: bytes | None) -> None:
    """Writes a file, or removes it. Raises `OSError`."""
    if data is None:
        folder.remove(place.file)
    else:
        folder.write(place.file, data)


def _linked(place: EditPlace, error: OSError) -> Refused:
    if isinstance(error, NotRegularFile):
        return Refused(409, f"{place.name} is not edited: {error}")
    return Refused(409, f"{place.name} cannot be read: {error.strerror or error}")


def _check_version(item: Item, sent: Sent, disk: bytes | None) -> None:
    if _version(item, sent.kind, disk) != sent.version:
        raise Refused(409, f"the {sent.kind} was changed elsewhere since this page was loaded: load it again, and "
                      "edit what is there now")


def _blob_of(item: Item, kind: str) -> Blob | None:
    return item.caption if kind == "caption" else item.mask


def _version(item: Item, kind: str, disk: bytes | None) -> str:
    """A digest of what the picture's caption or mask is now; "" if it has none."""
    if disk is not None:
        return digest_of(disk)
    blob = _blob_of(item, kind)
    if blob is None:
        return digest_strings(item.captions) if kind == "caption" and item.captions else ""
    try:
        return digest_of(read_blob(blob))
    except OSError:
        return ""


def _lines_of(item: Item, disk: bytes | None) -> tuple[str, ...]:
    try:
        if disk is not None:
            return read_caption(disk)
        return item.captions if item.caption is None else read_caption(read_blob(item.caption), item.caption_format)
    except (OSError, BadCaption):
        return ()
