"""Rows straight from the shards' files into buffers of the caller: one `preadv` and one CRC-32C a row, no copies.

Headers and the shard index are checked once, when an array is first opened, against the size of its file; after that a
row's place is a multiplication. Handles stay open, the least recently used closing first; a handle that another
thread is reading from closes when that thread lets go. Nothing is remembered across a fork but the open files.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from prep.cache import layout
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.parse import Unparsed
from prep.records import ArraySpec, RowRef

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
ReadAt = Callable[[int, list[Any], int], int]
Advise = Callable[[int, int, int], None]

OPEN_ARRAYS = 192  # below macOS's limit of 256 files a process
HINT = "prep verify MANIFEST names every damaged row, prep encode repairs them"
INDEX_BLOCK = 1 << 16  # rows of the index checked at a time


def plain_read(descriptor: int, buffers: list[Any], offset: int) -> int:
    """`preadv` for systems without: seek and read under a lock. Returns the bytes read."""
    total = 0
    with _PLAIN_LOCK:
        os.lseek(descriptor, offset, os.SEEK_SET)
        for buffer in buffers:
            part = os.read(descriptor, len(buffer))
            memoryview(buffer)[: len(part)] = part
            total += len(part)
            if len(part) < len(buffer):
                break
    return total


_PLAIN_LOCK = threading.Lock()


def no_advice(descriptor: int, offset: int, length: int) -> None:
    """`fadvise` for systems without."""


def will_need(descriptor: int, offset: int, length: int) -> None:
    """The kernel starts to read these bytes, and does not wait for them."""
    os.posix_fadvise(descriptor, offset, length, os.POSIX_FADV_WILLNEED)


READ_AT: ReadAt = getattr(os, "preadv", plain_read)
ADVISE: Advise = will_need if hasattr(os, "posix_fadvise") else no_advice


class OpenArray:
    """An array whose header and index are sound, and its open file."""

    def __init__(self, path: Path, spec: ArraySpec, rows: int) -> None:
        self.spec = spec
        self.rows = rows
        self.stride = layout.row_stride(spec)
        self.row_bytes = spec.row_bytes
        self.descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


class Reader:
    """Reads rows of a cache's shards; one may be shared by threads.

    Every fault is a `CacheError` that names shard, array and row: missing, damaged, or not what the header says.
    """

    def __init__(
        self, root: Path, *, check: bool = True, open_arrays: int = OPEN_ARRAYS, read_at: ReadAt = READ_AT,
        advise: Advise = ADVISE,
    ) -> None:
        self._cache = Cache(root=root)
        self._check = check
        self._limit = open_arrays
        self._read_at = read_at
        self._advise = advise
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str], OpenArray] = OrderedDict()
        self._sound: dict[tuple[str, str], tuple[ArraySpec, int]] = {}

    def array_info(self, shard: str, array: str) -> tuple[ArraySpec, int]:
        """One row's dtype and shape, and the number of rows."""
        opened = self._array(shard, array)
        return opened.spec, opened.rows

    def read_into(self, out: Bytes | memoryview, shard: str, array: str, row: int) -> None:
        """Fills `out`, exactly one row's bytes, writable and contiguous."""
        target = out if isinstance(out, np.ndarray) else np.frombuffer(out, dtype=np.uint8)
        self._read(self._array(shard, array), target, shard, row)

    def read_batch(self, out: Bytes, array: str, refs: Sequence[RowRef]) -> None:
        """Fills `out`, uint8 [B, row_bytes] with contiguous rows, from B places."""
        if len(out) != len(refs):
            raise ValueError(f"out has {len(out)} rows, expected one for each of {len(refs)} places")
        for target, ref in zip(out, refs, strict=True):
            self._read(self._array(ref.shard, array), target, ref.shard, ref.row)

    def advise(self, array: str, refs: Iterable[RowRef]) -> None:
        """Tells the kernel which rows come soon (measured: 16 to 64 rows ahead is best on a cold cache)."""
        for ref in refs:
            opened = self._array(ref.shard, array)
            self._advise(opened.descriptor, ref.row * opened.stride, opened.stride)

    def keys(self, shard: str) -> Bytes:
        """The rows' keys, uint8 [N, 32], strictly ascending, checksum checked."""
        return read_keys(self._cache, shard)

    def close(self) -> None:
        """Lets go of every file; the next read opens again."""
        with self._lock:
            self._open.clear()
            self._sound.clear()

    def _read(self, opened: OpenArray, target: Bytes, shard: str, row: int) -> None:
        if not 0 <= row < opened.rows:
            raise _fault(shard, opened.spec.name, row, f"there are {opened.rows} rows")
        if target.nbytes != opened.row_bytes:
            raise ValueError(f"out has {target.nbytes} bytes, expected {opened.row_bytes} of '{opened.spec.name}'")
        stored = bytearray(layout.CRC_BYTES)
        try:
            got = self._read_at(opened.descriptor, [target, stored], row * opened.stride)
        except OSError as error:
            raise _fault(shard, opened.spec.name, row, f"cannot be read: {error}") from error
        if got != opened.stride:
            raise _fault(shard, opened.spec.name, row, f"ends after {got} of {opened.stride} bytes")
        if self._check and layout.crc32c(target) != int.from_bytes(stored, "little"):
            raise _fault(shard, opened.spec.name, row, "is damaged: its bytes do not match their checksum")

    def _array(self, shard: str, array: str) -> OpenArray:
        name = (shard, array)
        with self._lock:
            opened = self._open.get(name)
            if opened is not None:
                self._open.move_to_end(name)
                return opened
        opened = self._reopen(name)
        with self._lock:
            self._open[name] = opened
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
        return opened

    def _reopen(self, name: tuple[str, str]) -> OpenArray:
        shard, array = name
        root = self._cache.shard(shard)
        sound = self._sound.get(name)
        try:
            spec, rows = sound or read_header(root, array)
            opened = OpenArray(root / layout.data_path(spec), spec, rows)
            if sound is None:
                check_index(opened, f"array '{array}'")
        except FileNotFoundError as error:
            missing = error.filename if root.exists() else "the shard"
            raise CacheError(f"shard {shard}, array '{array}': {missing} is missing", hint=HINT) from None
        except (OSError, Unparsed) as error:
            raise CacheError(f"shard {shard}, array '{array}': {error}", hint=HINT) from None
        self._sound[name] = (spec, rows)
        return opened


def read_header(root: Path, array: str) -> tuple[ArraySpec, int]:
    """What an array's `zarr.json` says, one row's dtype and shape and N. Raises `Unparsed`, `OSError`."""
    layout.checked_name(array, "array")
    return layout.parse_array(read_document(root / array / "zarr.json"), array, f"{array}/zarr.json")


def read_document(path: Path) -> bytes:
    """A `zarr.json`, refused when it is larger than any of ours. Raises `Unparsed`, `OSError`."""
    with path.open("rb") as handle:
        data = handle.read(layout.MAX_DOCUMENT + 1)
    if len(data) > layout.MAX_DOCUMENT:
        raise Unparsed(f"{path.name} has more than {layout.MAX_DOCUMENT} bytes")
    return data


def check_index(opened: OpenArray, where: str) -> None:
    """Raises `Unparsed` unless file size and shard index are those of N rows, one after another."""
    size = os.fstat(opened.descriptor).st_size
    wanted = layout.data_bytes(opened.spec, opened.rows)
    if size != wanted:
        raise Unparsed(f"{where} has {size} bytes, expected {wanted} for {opened.rows} rows")
    offset = opened.rows * opened.stride
    expected = layout.index(opened.spec, opened.rows)
    step = INDEX_BLOCK * layout.ENTRY_BYTES
    for start in range(0, len(expected), step):
        block = bytearray(min(step, len(expected) - start))
        READ_AT(opened.descriptor, [block], offset + start)
        if block != expected[start : start + step]:
            raise Unparsed(f"{where} has a damaged shard index")


def read_keys(cache: Cache, shard: str) -> Bytes:
    """A shard's keys, uint8 [N, 32], strictly ascending, checksum checked. Raises `CacheError`."""
    root = cache.shard(shard)
    try:
        _, rows = read_header(root, layout.KEY)
        body = rows * layout.KEY_BYTES
        with (root / layout.KEY_PATH).open("rb") as handle:
            data = handle.read(body + layout.CRC_BYTES + 1)
    except FileNotFoundError as error:
        missing = error.filename if root.exists() else "the shard"
        raise CacheError(f"shard {shard}, array 'key': {missing} is missing", hint=HINT) from None
    except (OSError, Unparsed) as error:
        raise CacheError(f"shard {shard}, array 'key': {error}", hint=HINT) from None
    if len(data) != body + layout.CRC_BYTES or layout.crc_bytes(data[:body]) != data[body:]:
        raise CacheError(f"shard {shard}, array 'key': its bytes do not match their size and checksum", hint=HINT)
    return np.frombuffer(data, dtype=np.uint8, count=body).reshape(rows, layout.KEY_BYTES)


def _fault(shard: str, array: str, row: int, what: str) -> CacheError:
    return CacheError(f"shard {shard}, array '{array}', row {row}: {what}", hint=HINT)
