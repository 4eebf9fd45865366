"""The objects of a run in a store: sent and fetched with what arrives compared, moved and removed.

What was sent is compared by its ETag, which most stores make of the MD5 of the bytes (of the MD5 of its parts, if it
went in parts). Where that does not match, the object is read back and compared byte for byte by its SHA-256.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import sys
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from prep.cache.remote.quota import NotFetched
from prep.errors import CacheError, PathError
from prep.formatting import counted, format_bytes
from prep.fs import atomic
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import DIRECTORY, mirror
from prep.fs.remote.objects import (
    UPLOAD_PART,
    ObjectEntry,
    copy_object,
    create_object,
    delete_object,
    list_objects,
    read_object,
    replace_object,
    size_in,
    stream,
    upload_file,
    version_of,
)
from prep.fs.untrusted import open_regular, stream_of

TRIES = 3  # uploads of an object that reads back as something else; downloads that do not match
MOST_DOCUMENT = 1 << 22  # bytes
SPARE = 1 << 30  # bytes of the disk that stay free
_BLOCK = 1 << 20
_TAG = re.compile(r"[0-9a-f]{32}(-\d+)?")  # which may be made of MD5: of the bytes, or of the MD5 of their parts


@dataclass(frozen=True, kw_only=True, slots=True)
class Digests:
    """Size and digests of a file's bytes; "" for digests that were not asked for."""

    size: int
    sha256: str
    tag: str  # the ETag that a store would give it

    def named_by(self, version: str) -> bool:
        """Whether an object of this version, as in `ObjectEntry`, has these bytes; False also if that is not known."""
        tag, _, size = version.rpartition(" ")
        return int(size) == self.size and tag == self.tag


def digests_of(path: Path, version: str | None = None, *, sha256: bool = True) -> Digests:
    """Reads a file once: for its SHA-256, and for the ETag to compare with that of `version`, as in `ObjectEntry`.

    Raises `OSError`, and its subclass `NotRegularFile` for links and the like.
    """
    named = _TAG.fullmatch((version or "").rpartition(" ")[0])
    length = UPLOAD_PART if named and named[1] else sys.maxsize  # of a part
    running, size = hashlib.sha256(), 0
    parts: list[hashlib._Hash] = []
    with stream_of(open_regular(path)) as file:
        while block := file.read(_BLOCK):
            if sha256:
                running.update(block)
            if named and size % length == 0:
                parts.append(_md5())
            if named:
                parts[-1].update(block)
            size += len(block)
    tag = "" if named is None else _tag_of([part.digest() for part in parts], in_parts=named[1] is not None)
    return Digests(size=size, sha256=running.hexdigest() if sha256 else "", tag=tag)


def _tag_of(parts: Sequence[bytes], in_parts: bool) -> str:
    """The ETag of bytes sent in parts with these MD5, or whole, as one."""
    if in_parts:
        return f"{_md5(b''.join(parts)).hexdigest()}-{len(parts)}"
    return parts[0].hex() if parts else _md5().hexdigest()


def _md5(data: bytes = b"") -> hashlib._Hash:
    return hashlib.md5(data, usedforsecurity=False)


class Objects:
    """The objects below the place of a run, by their names relative to it. Each method raises `StoreError`, and
    `Stopped` once `stop` is set."""

    def __init__(self, place: Bucket) -> None:
        if not place.key:
            raise PathError(f"{place} is a bucket, expected a place in it for the run",
                            hint=f"name one, like {place}/runs/first")
        self.place, self.stop = place, threading.Event()

    def _place(self, name: str) -> str:
        return (self.place / name).url

    def list(self) -> dict[str, ObjectEntry]:
        """All objects."""
        return list_objects(self.place.url, stop=self.stop)

    def read(self, name: str) -> bytes | None:
        """The bytes of a document; `None` if it does not exist."""
        try:
            return read_object(self._place(name), MOST_DOCUMENT, stop=self.stop)
        except FileNotFoundError:
            return None

    def create(self, name: str, data: bytes) -> bool:
        """Creates an object unless it exists, which the store decides; returns whether it did."""
        return create_object(self._place(name), data, stop=self.stop)

    def put(self, name: str, data: bytes) -> None:
        """Writes a small object, whether or not there is one."""
        replace_object(self._place(name), data, stop=self.stop)

    def send(self, name: str, path: Path, sha256: str | None = None, listed: ObjectEntry | None = None) -> None:
        """Uploads a file, unless what is `listed` has its bytes, and compares what arrived.

        `sha256`: what the file must have; raises `CacheError` if it has not, or if something else arrives.
        """
        url, version = self._place(name), None if listed is None else listed.version
        for _ in range(TRIES + 1):
            digests = digests_of(path, version)
            if sha256 not in (None, digests.sha256):
                raise CacheError(f"{path} is damaged: its bytes do not match its digest, so it is not uploaded",
                                 hint="continue from another checkpoint, with --resume --from")
            if version is not None and (digests.named_by(version) or self._reads(url, version, digests)):
                return
            upload_file(url, path, stop=self.stop)
            version = self._version(url)
        raise CacheError(f"{url} does not read back as it was written, after {counted(TRIES, 'upload')}",
                         hint="check the network and the store, then run the same command again")

    def _version(self, url: str) -> str | None:
        try:
            return version_of(url, stop=self.stop)
        except FileNotFoundError:
            return None

    def _reads(self, url: str, version: str, wanted: Digests) -> bool:
        """Whether an object reads back as these bytes."""
        if size_in(version) != wanted.size:
            return False
        running = hashlib.sha256()
        try:
            for part in stream(url, wanted.size, stop=self.stop):
                running.update(part)
        except FileNotFoundError:
            return False
        return running.hexdigest() == wanted.sha256

    def fetch(self, name: str, path: Path, listed: ObjectEntry, sha256: str | None = None) -> None:
        """Downloads an object to `path`, as `fetch_object`."""
        fetch_object(self._place(name), path, listed, sha256, stop=self.stop)

    def move(self, folder: str, target: str, names: Iterable[str], last: str) -> None:
        """Copies the objects `names` below `folder` to below `target`, the one called `last` at the end; then removes
        them, that one first."""
        others = [name for name in names if name != last]
        for name in (*others, last):
            copy_object(self._place(f"{folder}/{name}"), self._place(f"{target}/{name}"), stop=self.stop)
        self.remove(f"{folder}/{name}" for name in (last, *others))

    def copy(self, name: str, target: str) -> ObjectEntry:
        """Copies an object to another name; what the store then says of that."""
        copy_object(self._place(name), self._place(target), stop=self.stop)
        version = version_of(self._place(target), stop=self.stop)
        return ObjectEntry(size=size_in(version), written=0.0, version=version)

    def rename(self, name: str, target: str) -> None:
        """Copies an object to another name, then removes it."""
        copy_object(self._place(name), self._place(target), stop=self.stop)
        self.remove([name])

    def remove(self, names: Iterable[str]) -> None:
        """Removes objects, in this order."""
        for name in names:
            delete_object(self._place(name), stop=self.stop)


def fetch_object(url: str, path: Path, listed: ObjectEntry, sha256: str | None = None, *,
                 stop: threading.Event) -> None:
    """Downloads an object to `path`, whole or not at all, and compares it with `sha256`, else with its ETag.

    Bytes that its ETag does not name are taken if they come twice: not all ETags are made of bytes. Raises
    `CacheError` for other bytes than `sha256` says, `NotFetched` if the disk has no room, `FileNotFoundError`,
    `StoreError`, `Stopped`.
    """
    before = ""
    atomic.make_dirs(path.parent)
    _check_room(url, listed.size, path.parent)
    with atomic.staged(path) as staged:
        for _ in range(TRIES):
            with atomic.create(staged) as file:
                for part in stream(url, listed.size, stop=stop):
                    atomic.write(file, part)
                atomic.sync(file)
            digests = digests_of(staged, listed.version if sha256 is None else None)
            right = digests.named_by(listed.version) or digests.sha256 == before if sha256 is None else (
                digests.sha256 == sha256)
            if right:
                atomic.rename(staged, path)
                return
            before = digests.sha256
            atomic.remove(staged)
    raise CacheError(f"{url} is damaged: its bytes do not match its digest (downloaded {TRIES} times)",
                     hint="continue from another checkpoint, with --resume --from")


def _check_room(url: str, size: int, folder: Path) -> None:
    """Raises `NotFetched` if the disk of `folder` has no room for `size` bytes, so that no store fills it."""
    free = max(shutil.disk_usage(folder).free - SPARE, 0)
    if size > free:
        raise NotFetched(f"{url} has {format_bytes(size)}, but {mirror()} has room for {format_bytes(free)}",
                         hint=f"free some space, or name a directory on another disk with {DIRECTORY}=DIR; then run "
                         "the same command again")


def differs(path: Path, listed: ObjectEntry) -> bool:
    """Whether a file is missing or may have other bytes than an object."""
    try:
        if path.stat().st_size != listed.size:
            return True
        return not digests_of(path, listed.version, sha256=False).named_by(listed.version)
    except OSError:
        return True


def snapshot(path: Path) -> Path:
    """A copy of a file that grows, beside it: its caller removes it."""
    staged = atomic.temporary_name(path)
    shutil.copyfile(path, staged, follow_symlinks=False)
    return staged
