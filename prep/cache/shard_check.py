"""Is every byte of a shard still what it was? The digest says yes or no; the checksums then say where."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prep.arrays import ArraySpec
from prep.cache import damage, shard_format
from prep.cache.damage import Damage, is_lost
from prep.cache.shard_header import Header, check_index, fault, read_array_header, read_document, read_header
from prep.cache.store import Cache
from prep.digest import digest_parts
from prep.errors import CacheError
from prep.fs.pread import READ_AT, SEQUENTIAL, ReadAt, read_rest
from prep.fs.tree import listing_digest, tree
from prep.fs.untrusted import NotRegularFile, entries, open_regular
from prep.parse import Unparsed
from prep.progress import Tick

BLOCK = 1 << 20  # bytes; SHA-256 is as fast with a quarter or four times that, cold files are slower with less
NOT_THERE = "the shard is missing"
NOT_PLACED = "the digest does not fit, and every row's checksum does: files were added, removed or replaced"


def verify_shard(cache: Cache, digest: str, *, tick: Tick = lambda _: None, read_at: ReadAt = READ_AT) -> list[Damage]:
    """What is damaged in a shard; nothing when its digest fits. The cache remembers either, where it is writable: see
    `is_recorded`.

    Every byte is read once, and `tick` called with the bytes of each block; rows are looked at one by one only where
    the digest does not fit. Damage that no checksum places (a lost file, a header, the keys) counts against the whole
    shard; that of a shard index against no row. What the system does not let us read is told, and not remembered: it
    may be a matter of rights.
    """
    try:
        root = cache.shard(digest)
    except CacheError as error:  # something else is in the place of its directory
        return [whole_shard(digest, error.message)]
    try:
        root.lstat()
        sound = not _is_swollen(root) and _tree_digest(root, tick, read_at) == digest
        found = [] if sound else locate(cache, digest, read_at)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(root):
            return [whole_shard(digest, NOT_THERE)]
        if is_transient(error) or isinstance(error,
                                             FileNotFoundError):  # a file that goes while we look: gc, or a repair
            return [replace(whole_shard(digest, f"cannot be read: {error}"), transient=True)]
        found = locate(cache, digest, read_at, otherwise=f"cannot be read: {error}")
    with contextlib.suppress(OSError):
        damage.replace(cache, digest, found)
    return found


def quick_check(cache: Cache, digest: str) -> list[Damage]:
    """What is damaged in a shard as far as its documents, keys, shard indexes and sizes say; no row is read."""
    try:
        root = cache.shard(digest)
    except CacheError as error:
        return [whole_shard(digest, error.message)]
    try:
        header = read_header(cache, digest)
        for spec in header.arrays:
            read_array_header(root, spec.name)
            check_index(root / shard_format.data_path(spec), spec, header.rows)
    except (CacheError, OSError, Unparsed) as error:
        found = whole_shard(digest, str(error) if root.is_dir() else NOT_THERE)
        return [replace(found, transient=is_transient(error) or is_transient(error.__context__))]
    return []


def is_lasting(damage: Damage) -> bool:
    """Whether damage of a shard that is there will be there the next time, too."""
    return not damage.transient and damage.what != NOT_THERE


def is_recorded(cache: Cache, digest: str, found: Iterable[Damage]) -> bool:
    """Whether `prep encode` sees this damage of a shard: it is recorded, or no shard is there."""
    if not any(map(is_lasting, found)):
        return True
    try:
        return bool(damage.recorded(cache, digest)) or not cache.shard(digest).is_dir()
    except CacheError:  # something else is in the place of its directory
        return True
    except OSError:
        return False


def is_transient(error: BaseException | None) -> bool:
    """Whether the system did not let us read, and did not say that there is nothing sound to be read."""
    return isinstance(error, OSError) and not isinstance(error,
                                                         NotRegularFile | FileNotFoundError) and not is_lost(error)


def locate(cache: Cache, digest: str, read_at: ReadAt = READ_AT, *, otherwise: str = NOT_PLACED) -> list[Damage]:
    """Where a shard is damaged whose digest does not fit; `otherwise` is said of the whole when no place is found."""
    root = cache.shard(digest)
    array, found = "", []
    try:
        header = read_header(cache, digest)
        for spec in header.arrays:
            array = spec.name
            for row, what in bad_rows(root, header, spec, read_at):
                found.append(Damage(shard=digest, field=header.field, array=array, row=row, what=what))
            found += _index_damage(digest, root, header, spec)
    except CacheError as error:
        return [whole_shard(digest, error.message)]
    except OSError as error:
        return [whole_shard(digest, fault(root, digest, array, error).message)]
    return found or [Damage(shard=digest, field=header.field, array=None, row=None, what=otherwise)]


def _index_damage(digest: str, root: Path, header: Header, spec: ArraySpec) -> list[Damage]:
    """Whether a shard index is damaged; it says nothing that N and the shape of a row do not, so no row is lost."""
    try:
        check_index(root / shard_format.data_path(spec), spec, header.rows)
    except (Unparsed, OSError) as error:
        return [Damage(shard=digest, field=header.field, array=spec.name, row=None, what=str(error))]
    return []


def bad_rows(root: Path, header: Header, spec: ArraySpec, read_at: ReadAt = READ_AT) -> Iterator[tuple[int, str]]:
    """The rows of an array that cannot be read or do not match their checksums, and what is wrong with each."""
    return ((row, what) for row, (_, what) in enumerate(read_rows(root, header, spec, read_at)) if what)


def read_rows(
    root: Path, header: Header, spec: ArraySpec, read_at: ReadAt = READ_AT
) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.uint8]], str]]:
    """Each row of an array in a buffer that the next row overwrites, and what is wrong with it, or "".

    Raises `OSError` when its file cannot be opened.
    """
    descriptor = open_regular(root / shard_format.data_path(spec))
    stride = shard_format.row_stride(spec)
    row_bytes, stored = np.empty(spec.row_bytes, np.uint8), np.empty(1, "<u4")
    buffers = [row_bytes.data, stored.view(np.uint8).data]
    try:
        for row in range(header.rows):
            what = ""
            try:
                got = read_rest(read_at, descriptor, buffers, row * stride, 0)
                if got != stride:
                    what = f"ends after {got} of {stride} bytes"
                elif shard_format.crc32c(row_bytes) != stored[0]:
                    what = "is damaged: its bytes do not match their checksum"
            except OSError as error:
                what = f"cannot be read: {error}"
            yield row_bytes, what
    finally:
        os.close(descriptor)


def whole_shard(digest: str, what: str) -> Damage:
    """Damage of a whole shard."""
    return Damage(shard=digest, field=None, array=None, row=None, what=what)


def _is_swollen(root: Path) -> bool:
    """Whether a file is larger than its documents say, and would be read to an end that may never come."""
    most: dict[str, int] = {}
    with contextlib.suppress(Unparsed):
        for entry in entries(root):
            if entry.is_dir(follow_symlinks=False):
                where = root / entry.name / "zarr.json"
                spec, rows = shard_format.parse_array(read_document(where), entry.name, where.name)
                key = entry.name == shard_format.KEY
                keys = rows * shard_format.KEY_BYTES + shard_format.CRC_BYTES
                size = keys if key else shard_format.data_bytes(spec, rows)
                most[shard_format.data_path(spec)] = size
    return any(size > most.get(name, shard_format.MAX_DOCUMENT) for name, size in tree(root))


def _tree_digest(root: Path, tick: Tick, read_at: ReadAt) -> str:
    """`layout.tree_digest` of large files: in blocks that stay in the CPU's cache, the disk reading ahead."""
    return listing_digest([{"path": name, "size": size, "sha256": _file_digest(root / name, size, tick, read_at)}
                           for name, size in tree(root)])


def _file_digest(path: Path, size: int, tick: Tick, read_at: ReadAt) -> str:
    descriptor = open_regular(path)
    try:
        SEQUENTIAL(descriptor)
        return digest_parts(_blocks(descriptor, min(size + 1, BLOCK), tick, read_at))
    finally:
        os.close(descriptor)


def _blocks(descriptor: int, block: int, tick: Tick, read_at: ReadAt) -> Iterator[Any]:
    """The bytes of a file, each block in the same buffer; a short read is no end, only an empty one."""
    buffer = memoryview(bytearray(block))
    at = 0
    while got := read_at(descriptor, [buffer], at):
        yield buffer[:got]
        at += got
        tick(got)
