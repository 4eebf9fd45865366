"""Verifies shards: the digest shows whether a byte changed, checksums show where, and values must be finite."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from prep.arrays import ArraySpec, DType
from prep.cache import damage, shard_format
from prep.cache.damage import Damage, is_lost
from prep.cache.shard_header import Header, check_index, fault, read_array_header, read_document, read_header
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs.pread import READ_AT, SEQUENTIAL, ReadAt, read_rest
from prep.fs.tree import listing_digest, tree
from prep.fs.untrusted import NotRegularFile, entries, open_regular
from prep.parse import Unparsed
from prep.progress import Tick

BLOCK = 1 << 20  # bytes; SHA-256 is equally fast from a quarter to four times that, cold files are slower with less
NOT_THERE = "the shard is missing"
NOT_FINITE = "has values that are not finite (NaN or infinity)"
# By float type: integer type of its bits, mask without the sign, and infinity; masked, only NaNs are larger.
FLOATS: dict[DType, tuple[str, int, int]] = {
    "bfloat16": ("<u2", 0x7FFF, 0x7F80), "float16": ("<u2", 0x7FFF, 0x7C00), "float32": ("<u4", 0x7FFFFFFF, 0x7F800000),
}
NOT_PLACED = "the digest does not match, but every row's checksum does: files were added, removed or replaced"


def verify_shard(cache: Cache, digest: str, *, tick: Tick = lambda _: None, read_at: ReadAt = READ_AT) -> list[Damage]:
    """The damage of a shard; none if its digest matches and its values are finite. The result is recorded in the cache
    if that can be written; see `is_recorded`.

    Reads every byte once, and calls `tick` with the bytes of each block. Checks single rows only if the digest does not
    match or a value is not finite: encoders never store such rows, and training on one would give a loss that is not
    finite. Damage that no checksum locates (a lost file, a header, the keys) counts for the whole shard; damage of a
    shard index loses no row. A shard that the system refuses to read is reported, but not recorded: permissions may be
    the cause.
    """
    try:
        root = cache.shard(digest)
    except CacheError as error:  # its directory was replaced by something else
        return [whole_shard(digest, error.message)]
    try:
        root.lstat()
        arrays = _arrays(root)
        sound = not _is_swollen(root, arrays) and _is_sound(root, digest, arrays, tick, read_at)
        damages = [] if sound else locate(cache, digest, read_at)
    except OSError as error:
        if isinstance(error, FileNotFoundError) and not os.path.lexists(root):
            return [whole_shard(digest, NOT_THERE)]
        if is_transient(error) or isinstance(error,
                                             FileNotFoundError):  # a file removed meanwhile, by gc or a repair
            return [replace(whole_shard(digest, f"cannot be read: {error}"), transient=True)]
        damages = locate(cache, digest, read_at, otherwise=f"cannot be read: {error}")
    with contextlib.suppress(OSError):
        damage.replace(cache, digest, damages)
    return damages


def quick_check(cache: Cache, digest: str) -> list[Damage]:
    """The damage of a shard that its documents, keys, shard indexes and file sizes show; reads no row."""
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
        lost = whole_shard(digest, str(error) if root.is_dir() else NOT_THERE)
        return [replace(lost, transient=is_transient(error) or is_transient(error.__context__))]
    return []


def is_lasting(damage: Damage) -> bool:
    """Whether this is lasting damage of an existing shard, unlike a missing shard or a failed read."""
    return not damage.transient and damage.what != NOT_THERE


def is_recorded(cache: Cache, digest: str, damages: Iterable[Damage]) -> bool:
    """Whether `prep encode` will find this damage of a shard: it is recorded, or the shard is missing."""
    if not any(map(is_lasting, damages)):
        return True
    try:
        return bool(damage.recorded(cache, digest)) or not cache.shard(digest).is_dir()
    except CacheError:  # its directory was replaced by something else
        return True
    except OSError:
        return False


def is_transient(error: BaseException | None) -> bool:
    """Whether a read failed in a way that may pass (lack of permission, for example) and not because data is lost."""
    return isinstance(error, OSError) and not isinstance(error,
                                                         NotRegularFile | FileNotFoundError) and not is_lost(error)


def locate(cache: Cache, digest: str, read_at: ReadAt = READ_AT, *, otherwise: str = NOT_PLACED) -> list[Damage]:
    """Locates the damage of a shard whose digest does not match or whose values are not all finite.

    If no row, index or document is at fault, the whole shard counts as damaged, with `otherwise` as the reason.
    """
    root = cache.shard(digest)
    array, damages = "", []
    try:
        header = read_header(cache, digest)
        for spec in header.arrays:
            array = spec.name
            for row, what in bad_rows(root, header, spec, read_at):
                damages.append(Damage(shard=digest, field=header.field, array=array, row=row, what=what))
            damages += _index_damage(digest, root, header, spec)
    except CacheError as error:
        return [whole_shard(digest, error.message)]
    except OSError as error:
        return [whole_shard(digest, fault(root, digest, array, error).message)]
    return damages or [Damage(shard=digest, field=header.field, array=None, row=None, what=otherwise)]


def _index_damage(digest: str, root: Path, header: Header, spec: ArraySpec) -> list[Damage]:
    """The damage of a shard index; the index follows from N and the shape of a row, so no row is lost."""
    try:
        check_index(root / shard_format.data_path(spec), spec, header.rows)
    except (Unparsed, OSError) as error:
        return [Damage(shard=digest, field=header.field, array=spec.name, row=None, what=str(error))]
    return []


def bad_rows(root: Path, header: Header, spec: ArraySpec, read_at: ReadAt = READ_AT) -> Iterator[tuple[int, str]]:
    """(row, reason) for each row of an array that is unreadable, not finite, or does not match its checksum."""
    return ((row, what) for row, (_, what) in enumerate(read_rows(root, header, spec, read_at)) if what)


def read_rows(
    root: Path, header: Header, spec: ArraySpec, read_at: ReadAt = READ_AT
) -> Iterator[tuple[np.ndarray[Any, np.dtype[np.uint8]], str]]:
    """(bytes, fault) for each row of an array; the next row overwrites the buffer, and "" means no fault.

    Raises `OSError` if the file cannot be opened.
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
                elif not is_finite(row_bytes, spec.dtype):
                    what = NOT_FINITE
            except OSError as error:
                what = f"cannot be read: {error}"
            yield row_bytes, what
    finally:
        os.close(descriptor)


def whole_shard(digest: str, what: str) -> Damage:
    """The damage record for a whole shard."""
    return Damage(shard=digest, field=None, array=None, row=None, what=what)


def is_finite(row_bytes: np.ndarray[Any, np.dtype[np.uint8]], dtype: DType) -> bool:
    """Whether the bytes of rows, uint8 [..., row_bytes], hold neither NaN nor infinity. (24 GB/s; SHA-256: 1.8.)"""
    if dtype not in FLOATS:
        return True
    kind, mask, infinity = FLOATS[dtype]
    bits = row_bytes.view(kind)
    return not bits.size or int((bits & bits.dtype.type(mask)).max()) < infinity


def _arrays(root: Path) -> dict[str, tuple[ArraySpec, int]]:
    """The dtype and shape of each array and N, by data file, from the documents; those that can be parsed."""
    arrays: dict[str, tuple[ArraySpec, int]] = {}
    with contextlib.suppress(Unparsed):
        for entry in entries(root):
            if entry.is_dir(follow_symlinks=False):
                spec, rows = shard_format.parse_array(read_document(entry.path), entry.name, "zarr.json")
                arrays[shard_format.data_path(spec)] = spec, rows
    return arrays


def _is_swollen(root: Path, arrays: Mapping[str, tuple[ArraySpec, int]]) -> bool:
    """Whether a file is larger than its documents say; reading it might never end."""
    most = {name: rows * shard_format.KEY_BYTES + shard_format.CRC_BYTES if spec.name == shard_format.KEY
            else shard_format.data_bytes(spec, rows) for name, (spec, rows) in arrays.items()}
    return any(size > most.get(name, shard_format.MAX_DOCUMENT) for name, size in tree(root))


def _is_sound(root: Path, digest: str, arrays: Mapping[str, tuple[ArraySpec, int]], tick: Tick,
              read_at: ReadAt) -> bool:
    """Whether a shard's digest matches and its values are finite; reads its files in blocks, with read-ahead."""
    listing, finite = [], True
    for name, size in tree(root):
        values = _Values(*arrays[name]) if name in arrays and arrays[name][0].dtype in FLOATS else None
        sha256 = _file_digest(root / name, size, values, tick, read_at)
        listing.append({"path": name, "size": size, "sha256": sha256})
        finite = finite and (values is None or values.finite)
    return finite and listing_digest(listing) == digest


class _Values:
    """Checks that the rows of an array are finite, in blocks of its file that hold whole rows."""

    def __init__(self, spec: ArraySpec, rows: int) -> None:
        self.spec, self.remaining, self.finite = spec, rows, True
        self.stride = shard_format.row_stride(spec)
        self.block = self.stride * max(1, BLOCK // self.stride)  # bytes

    def look(self, block: memoryview) -> None:
        """Checks the next block of the file."""
        whole = min(self.remaining, len(block) // self.stride)
        self.remaining -= whole
        if self.finite:
            rows = np.frombuffer(block[: whole * self.stride], np.uint8).reshape(whole, self.stride)
            self.finite = is_finite(rows[:, : self.spec.row_bytes], self.spec.dtype)


def _file_digest(path: Path, size: int, values: _Values | None, tick: Tick, read_at: ReadAt) -> str:
    """SHA-256 of a file; passes its blocks to `values`, too."""
    running = hashlib.sha256()
    descriptor = open_regular(path)
    try:
        SEQUENTIAL(descriptor)
        for block in _blocks(descriptor, min(size + 1, BLOCK if values is None else values.block), tick, read_at):
            running.update(block)
            if values is not None:
                values.look(block)
    finally:
        os.close(descriptor)
    return running.hexdigest()


def _blocks(descriptor: int, block: int, tick: Tick, read_at: ReadAt) -> Iterator[memoryview]:
    """The blocks of a file, all in one buffer and full except the last; only an empty read ends the file."""
    buffer = memoryview(bytearray(block))
    at = 0
    while got := read_at(descriptor, [buffer], at):
        got = read_rest(read_at, descriptor, [buffer], at, got)
        yield buffer[:got]
        at += got
        tick(got)
