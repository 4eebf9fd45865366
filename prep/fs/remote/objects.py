"""Reads, lists and writes objects in stores, whose URLs are as `prep.fs.remote.bucket` has them."""

from __future__ import annotations

import errno
import hashlib
import re
import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prep.formatting import counted, printable
from prep.fs.remote.bucket import ListedUrl, split_url
from prep.fs.remote.errors import Passing, Stopped, StoreError, is_conflict, summary_of
from prep.fs.remote.retry import NEVER, SILENT, Backoff, with_retries
from prep.fs.remote.waiting import NOTICES, apart, body_of

if TYPE_CHECKING:
    from obstore.store import ObjectStore

CHUNK = 1 << 20  # bytes handed out at a time, at least
UPLOAD_PART = 1 << 23
MOST_PARTS = 9_000  # of an upload; S3 takes 10,000
COPIED_BY_STORE = 5_000_000_000  # bytes of an object that S3 copies by one request
LISTED = 1000  # objects in an answer to a list request, as S3 has it
PIECE = 100  # objects that are looked at together: an answer may have few, and be one of very many
FRUITLESS = 10  # pieces in a row without a new one
MOST_LISTED = 10_000_000  # objects below one URL: their names take 4 GB of memory
PART_TRIES = 5  # of a part, before the whole file is sent again
AGAIN = 3  # attempts at a small object that arrives damaged
ENDLESS = "another program, such as rclone, shows whether the store ever ends its list"


def read_object(url: str, most: int, *, stop: threading.Event = NEVER) -> bytes:
    """The bytes of an object. Raises `FileNotFoundError`, `StoreError`, and `OSError` if it has more than `most`."""
    def read(store: ObjectStore, key: str) -> bytes:
        from obstore import get

        answer = get(store, key)
        size = int(answer.meta["size"])
        if size > most:
            raise OSError(errno.EFBIG, f"has {size} bytes, expected at most {most}", url)
        return body_of(answer, url, size)

    return with_retries(url, read, stop, silence=SILENT)


def read_range(url: str, start: int, end: int, *, stop: threading.Event = NEVER) -> bytes:
    """The bytes of an object from `start` to `end`. Raises `FileNotFoundError`, `StoreError`."""
    return b"".join(bytes(part) for part in stream(url, end, start=start, stop=stop))


def read_listed(url: str, most: int, start: int = 0, length: int | None = None, *,
                stop: threading.Event = NEVER) -> tuple[bytes, str]:
    """The bytes of an object, or `length` of them from `start`, and its version as in `ObjectEntry`, by one request.

    `url` is taken as a listing gave it. Bytes of a whole object that are not those of its ETag are asked for again:
    most stores make that of the MD5 of the bytes. Where they do not, the same bytes come twice, and are taken. Raises
    `FileNotFoundError`, `StoreError`, and `OSError` for more than `most` bytes, or for fewer than `length`.
    """
    before, url = "", ListedUrl(url)

    def read(store: ObjectStore, key: str) -> tuple[bytes, str]:
        from obstore import get

        nonlocal before
        answer = get(store, key, options={} if length is None else {"range": (start, start + length)})
        size, version = int(answer.meta["size"]), _version_of(answer.meta)
        wanted = size if length is None else min(length, max(0, size - start))
        if wanted > most:
            raise OSError(errno.EFBIG, f"it has {wanted} bytes, expected at most {most} of an object", url)
        data = body_of(answer, url, wanted)
        named = _MD5.fullmatch(version.partition(" ")[0])
        if length is None and named and split_url(url)[:2] not in _no_md5:
            digest = hashlib.md5(data, usedforsecurity=False).hexdigest()
            if digest not in (named[0], before):
                before = digest
                raise Passing("the answer is not what its ETag names")
            if digest == before != named[0]:
                _no_md5.add(split_url(url)[:2])
        return data, version

    if length == 0:
        return b"", ""
    try:
        return with_retries(url, read, stop, _ranged, silence=SILENT)
    except _NoRanges:
        raise StoreError(f"{url}: the store sends whole objects only, and no ranges of them, which reading a member of "
                         "a tar takes", hint="download the tar first; or unpack it into the store") from None


def version_of(url: str, *, stop: threading.Event = NEVER) -> str:
    """An object's version, as in `ObjectEntry`. `url` as in `read_listed`. Raises `FileNotFoundError`, `StoreError`."""
    def ask(store: ObjectStore, key: str) -> str:
        from obstore import head

        return _version_of(head(store, key))

    return with_retries(ListedUrl(url), ask, stop)


def size_in(version: str) -> int:
    """The size of an object, bytes, in its version."""
    return int(version.rpartition(" ")[2])


_MD5 = re.compile("[0-9a-f]{32}")
_no_md5: set[tuple[str, str]] = set()  # buckets, by scheme and name, whose ETags look like MD5 and are not


def _version_of(meta: Mapping[str, Any]) -> str:
    tag = (meta["e_tag"] or "").removeprefix("W/").strip('"')
    return f"{tag or '@'}{'' if tag else int(meta['last_modified'].timestamp())} {meta['size']}"


def size_of(url: str, *, stop: threading.Event = NEVER) -> int:
    """The size of an object in bytes. Raises `FileNotFoundError`, `StoreError`."""
    def ask(store: ObjectStore, key: str) -> int:
        from obstore import head

        return int(head(store, key)["size"])

    return with_retries(url, ask, stop)


def stream(url: str, end: int, *, start: int = 0, stop: threading.Event = NEVER) -> Iterator[Any]:
    """The bytes of an object from `start` to `end`, in parts; fewer if the object is shorter.

    Where a connection breaks, only the rest is asked for again. Raises `FileNotFoundError`, `StoreError`, `Stopped`.
    """
    at, whole, waits = start, False, Backoff(url, stop)
    while at < end:
        try:
            answer = _asked(url, at, end, whole, stop, None if waits.failed else SILENT)
            waits.begin_attempt()
            size = int(answer.meta["size"])  # of the object
            for part in _parts(answer, url, 0 if whole else at, at, end, stop):
                at += len(part)
                waits.progressed()
                yield part
            if at < min(end, size):
                raise Passing(f"the answer ended after {at} of {min(end, size)} bytes")
            return
        except _NoRanges:
            whole = True
        except Passing as passing:
            waits.wait(str(passing))


class _NoRanges(Exception):
    """The server sends whole objects only (rclone serve s3 does)."""


def _asked(url: str, start: int, end: int, whole: bool, stop: threading.Event, silence: float | None) -> Any:
    """The answer to a request for an object's bytes from `start` to `end`, or for all of it. Raises `_NoRanges`."""
    def ask(store: ObjectStore, key: str) -> Any:
        from obstore import get

        return get(store, key) if whole or start == 0 else get(store, key, options={"range": (start, end)})

    return with_retries(url, ask, stop, _ranged, silence=silence)


def _parts(answer: Any, url: str, at: int, start: int, end: int, stop: threading.Event) -> Iterator[Any]:
    """The bytes from `start` to `end` of an answer that begins with byte `at`. Raises `Passing`, `Stopped`."""
    chunks = iter(answer.stream(min_chunk_size=CHUNK))

    def following() -> Any:
        with NOTICES.of(lambda: f"waiting for {url}: it comes slowly"):
            return next(chunks, None)

    try:
        while (chunk := following()) is not None:
            if stop.is_set():
                raise Stopped
            view = memoryview(chunk)
            first, last = max(start - at, 0), max(end - at, 0)
            at += len(view)
            if len(part := view[first:last]):
                yield part
            if at >= end:
                return
    except (Stopped, GeneratorExit):
        raise
    except Exception as error:  # obstore's own classes
        raise Passing(summary_of(error)) from None


def _ranged(error: Exception) -> None:
    if "non-partial response" in str(error):
        raise _NoRanges


@dataclass(frozen=True, kw_only=True, slots=True)
class ObjectEntry:
    """What a list of objects says of one."""

    size: int  # bytes
    written: float  # seconds since 1970
    version: str  # another one after each change: ETag and size; of a store without ETags, @, the time, and size


def _prefix_of(url: str) -> str:
    """What the keys of the objects below a URL begin with: it ends with a slash, or is empty for a whole bucket."""
    return "/".join((*split_url(url)[2:], "")).lstrip("/")


def list_objects(url: str, *, stop: threading.Event = NEVER) -> dict[str, ObjectEntry]:
    """The objects below a URL, by their names relative to it, sorted. Raises `StoreError`.

    Without objects KEY/ of no bytes, which some programs make for the directory KEY. obstore names them KEY: so they
    are told by what else begins with KEY/, and one for a directory with nothing in it is listed as an empty object.
    """
    prefix, waits = _prefix_of(url), Backoff(url, stop)
    objects: dict[str, ObjectEntry] = {}

    def ask(store: ObjectStore, _: str) -> None:
        from obstore import list as list_pages

        after, fruitless = prefix + max(objects) if objects else None, 0
        for page in apart(list_pages(store, prefix or None, offset=after, chunk_size=PIECE), waits.longest, stop):
            known, before = 0, len(objects)
            for entry in page:
                name, size = entry["path"].removeprefix(prefix), int(entry["size"])
                known += name in objects
                # The second: of the file KEY and the directory KEY/, the file.
                if (entry["path"] == name and prefix) or (not size and name in objects):
                    continue
                objects[name] = ObjectEntry(size=size, written=entry["last_modified"].timestamp(),
                                            version=_version_of(entry))
            fruitless = fruitless + 1 if len(objects) == before else 0
            # Of KEY and KEY/, one is known: half of them.
            _check_end(url, len(objects), fruitless > FRUITLESS or known > max(PIECE // 10, len(page) // 2))
            waits.progressed()  # of millions of objects, more than one page may fail once

    def check_key(error: Exception) -> None:
        if named := _NO_PATH.search(str(error)):
            raise StoreError(f"{url} has an object with the key {printable(named[1])[:200]}, which is no path: it has "
                             "//, a part . or .., or a control character",
                             hint="rename or delete that object, or name a prefix without it") from None

    with NOTICES.of(lambda: f"listing {url}: {counted(len(objects), 'object')} so far"):
        with_retries(url, ask, stop, check_key, waits=waits)
    names = sorted(objects)
    return {name: objects[name] for name in names if objects[name].size or not _is_above(name, names)}


def _check_end(url: str, count: int, again: bool) -> None:
    """Raises `StoreError` for a list of `count` objects so far that has no end; `again`: it repeats itself."""
    if again:
        raise StoreError(f"{url}: the store's list goes on without anything new, after {counted(count, 'object')}",
                         hint=ENDLESS)
    if count > MOST_LISTED:
        raise StoreError(f"{url} has more than {MOST_LISTED:,} objects, as far as the store lists them",
                         hint=f"name prefixes with fewer objects each, as several sources; {ENDLESS}")


def _is_above(name: str, names: Sequence[str]) -> bool:
    """Whether one of `names`, which are sorted, begins with the directory `name`."""
    place = bisect_left(names, f"{name}/")
    return place < len(names) and names[place].startswith(f"{name}/")


def list_folder(url: str, *, stop: threading.Event = NEVER) -> dict[str, int]:
    """The sizes of the objects directly below a URL, by their names, sorted: none that has another / in its name.

    Raises `StoreError`.
    """
    prefix, waits = _prefix_of(url), Backoff(url, stop)

    def ask(store: ObjectStore, _: str) -> dict[str, int]:
        from obstore import list_with_delimiter

        answers = apart((list_with_delimiter(store, prefix or None) for _ in range(1)), waits.longest, stop)
        objects = next(answers)["objects"]
        return {entry["path"].removeprefix(prefix): int(entry["size"]) for entry in objects
                if entry["path"].startswith(prefix)}  # all but an object of no bytes for the directory itself

    with NOTICES.of(lambda: f"listing {url}"):
        return dict(sorted(with_retries(url, ask, stop, waits=waits).items()))


_NO_PATH = re.compile(r'invalid path: (?:Error parsing )?Path "(.*?)"(?: contained|: )', re.DOTALL)


def delete_object(url: str, *, stop: threading.Event = NEVER) -> None:
    """Removes an object, if there is one. Raises `StoreError`."""
    def ask(store: ObjectStore, key: str) -> None:
        from obstore import delete

        with suppress(FileNotFoundError):  # S3 does not mind, others do
            delete(store, key)

    with_retries(url, ask, stop)


def copy_object(url: str, target: str, *, stop: threading.Event = NEVER) -> None:
    """Copies an object to another key of its bucket: in the store, or, if it is too large for that, by way of this
    computer. Raises `FileNotFoundError`, `StoreError`."""
    def ask(store: ObjectStore, key: str) -> None:
        from obstore import copy, head, open_writer

        to, size = split_url(target)[2], int(head(store, key)["size"])
        if size <= COPIED_BY_STORE:
            copy(store, key, to)
            return
        writer = open_writer(store, to, buffer_size=_part_of(size), max_concurrency=4)
        for part in stream(url, size, stop=stop):
            writer.write(part)
        with _lost_completion():
            writer.close()  # not after a failure: it would publish what there is

    with_retries(url, ask, stop, retries=PART_TRIES)


def create_object(url: str, data: bytes, *, stop: threading.Event = NEVER) -> bool:
    """Creates an object, on the condition that there is none; returns False, and writes nothing, if there is one.

    If the answer to a write is lost, the next attempt finds the object: it counts as created if its bytes are these.
    Raises `StoreError`.
    """
    tries = 0

    def write(store: ObjectStore, key: str) -> bool:
        from obstore import put
        from obstore.exceptions import AlreadyExistsError

        nonlocal tries
        tries += 1
        try:
            put(store, key, data, mode="create", use_multipart=False)
        except AlreadyExistsError as error:
            if is_conflict(error):  # obstore does not tell them apart
                tries -= 1  # it has written nothing
                raise
            return False
        return True

    created = with_retries(url, write, stop)
    return created or (tries > 1 and read_range(url, 0, len(data) + 1, stop=stop) == data)


def create_checked(url: str, data: bytes, most: int, *, stop: threading.Event = NEVER) -> bytes:
    """As `create_object`, and returns what is there then: `data`, or up to `most` bytes that were there before.

    What arrives damaged is written again: not every store compares the digest that a request is signed with. Raises
    `StoreError`.
    """
    created = create_object(url, data, stop=stop)
    for _ in range(AGAIN):
        stored = read_object(url, most, stop=stop)
        if stored == data or not created:
            return stored
        replace_object(url, data, stop=stop)
    return read_object(url, most, stop=stop)


def replace_object(url: str, data: bytes, *, stop: threading.Event = NEVER) -> None:
    """Writes an object, whether or not there is one. Raises `StoreError`."""
    def write(store: ObjectStore, key: str) -> None:
        from obstore import put

        put(store, key, data, use_multipart=False)

    with_retries(url, write, stop)


def upload_file(url: str, path: Path, *, stop: threading.Event = NEVER) -> None:
    """Writes a file as an object, in parts if it is large; others see all of it or nothing. Raises `StoreError`.

    Whoever must be sure reads it back.
    """
    def write(store: ObjectStore, key: str) -> None:
        from obstore import put

        with _lost_completion():
            put(store, key, path, chunk_size=_part_of(path.stat().st_size), max_concurrency=4)

    with_retries(url, write, stop, retries=PART_TRIES)


@contextmanager
def _lost_completion() -> Iterator[None]:
    """Passes over the answer that there is no such upload: that to its completion was lost, and the object is there."""
    try:
        yield
    except FileNotFoundError as error:
        if "NoSuchUpload" not in str(error):
            raise


def _part_of(size: int) -> int:
    """The bytes of a part, when so many are uploaded."""
    return max(UPLOAD_PART, -(-size // MOST_PARTS))
