"""Writes a shard row by row: staged in tmp/, digested while written, synced, renamed to the digest of its bytes.

Costs one pass of SHA-256 (in its own thread) and CRC-32C over the rows, and no memory beyond the keys and at most
`BLOCKS` blocks per array. The index and the documents need N, so they are written last.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.records import Shard
from prep.cache.remote.unsent import publish_shard
from prep.cache.store import Cache
from prep.fs import atomic
from prep.fs.remote.retry import NEVER
from prep.fs.tree import listing_digest
from prep.parse import digest_of

# Files grow by whole, aligned blocks: the page cache then holds them in large pieces, from which rows are read a third
# faster than from pieces of a row's size (measured, ext4, 1 MiB: 25 GB/s; 64 KiB or one row: 19).
BLOCK_BYTES = 1 << 20
BLOCKS = 32  # written but not yet digested
SYNC_BLOCKS = 32  # blocks between syncs, which overlap with digesting: together they take as long as SHA-256


class ShardWriter:
    """Writes rows of one field and one shape as a shard; as a context manager, removes the staged files on failure."""

    def __init__(self, cache: Cache, field: str, arrays: Sequence[ArraySpec]) -> None:
        self.cache = cache
        self.field = shard_format.checked_name(field, "field")
        self.arrays = tuple(_checked_spec(spec) for spec in arrays)
        if len({spec.name for spec in self.arrays}) != len(arrays) or not arrays:
            raise ValueError(f"arrays are {[spec.name for spec in arrays]}, expected at least one, each name once")
        self._keys = bytearray()
        self._staged = cache.unsent.stage()
        self._files: dict[str, _Growing] = {}
        for spec in self.arrays:
            self._grow(shard_format.data_path(spec))

    @property
    def rows(self) -> int:
        """Rows added so far."""
        return len(self._keys) // shard_format.KEY_BYTES

    def add(self, key: str, values: Mapping[str, Any]) -> None:
        """Appends one row, in the order of keys. Values are arrays of the spec's dtype and shape, or as many bytes.

        bfloat16 is passed as a uint16 view. Raises `ValueError` for anything else, before writing anything.
        """
        name = bytes.fromhex(digest_of(key, "key"))
        if name <= bytes(self._keys[-shard_format.KEY_BYTES :]):
            last = self._keys[-shard_format.KEY_BYTES :].hex()
            raise ValueError(f"key {key} comes after {last}, expected sorted keys")
        if set(values) != {spec.name for spec in self.arrays}:
            raise ValueError(f"row has {sorted(values)}, expected {sorted(spec.name for spec in self.arrays)}")
        rows = [(spec, _row(spec, values[spec.name])) for spec in self.arrays]
        for spec, row in rows:
            growing = self._files[shard_format.data_path(spec)]
            growing.append(row)
            growing.append(shard_format.crc_bytes(row))
        self._keys += name

    def finish(self, *, stop: threading.Event = NEVER) -> Shard:
        """Completes and publishes the shard: synced and read-only. Raises `ValueError` for no rows or too many.

        Of a cache in a store it waits for other processes that work on the same shard; raises `Stopped` if `stop` is
        set.
        """
        rows = self.rows
        if not 1 <= rows <= shard_format.MAX_ROWS:
            raise ValueError(f"shard has {rows} rows, expected 1 to {shard_format.MAX_ROWS}")
        listing = [self._end_array(spec) for spec in self.arrays]
        keys = bytes(self._keys)
        listing.append(self._write(shard_format.KEY_PATH, keys + shard_format.crc_bytes(keys)))
        listing.append(self._write(f"{shard_format.KEY}/zarr.json", shard_format.key_document(rows)))
        for spec in self.arrays:
            listing.append(self._write(f"{spec.name}/zarr.json", shard_format.array_document(spec, rows)))
        listing.append(self._write("zarr.json", shard_format.group_document(self.field)))
        arrays = (*(spec.name for spec in self.arrays), shard_format.KEY)
        for folder in (*(self._staged / name for name in arrays), self._staged):
            atomic.sync_dir(folder)
        digest = listing_digest(listing)
        publish_shard(self.cache, self._staged, digest, stop=stop)
        return Shard(digest=digest, rows=rows, bytes=sum(int(entry["size"]) for entry in listing))

    def abort(self) -> None:
        """Removes the staged files; harmless after `finish`."""
        for growing in self._files.values():
            with contextlib.suppress(OSError):  # a full disk, again
                growing.close()
        with contextlib.suppress(OSError):  # leaves a leftover in tmp/
            atomic.remove_tree(self._staged)

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _end_array(self, spec: ArraySpec) -> dict[str, Any]:
        growing = self._files[shard_format.data_path(spec)]
        growing.append(shard_format.index(spec, self.rows))
        return growing.end()

    def _write(self, path: str, data: bytes) -> dict[str, Any]:
        growing = self._grow(path)
        growing.append(data)
        return growing.end()

    def _grow(self, path: str) -> _Growing:
        self._files[path] = _Growing(self.cache, self._staged, path)
        return self._files[path]


class _Growing:
    """A staged file with its size and SHA-256. A second thread digests its blocks while this one writes and syncs."""

    def __init__(self, cache: Cache, root: Path, path: str) -> None:
        self.path = path
        self.full = root / path
        if not self.full.parent.is_dir():
            atomic.make_dir(self.full.parent, mode=cache.dir_mode)
        self.handle: BinaryIO = atomic.create(self.full, mode=cache.file_mode)
        self.size = 0
        self.running = hashlib.sha256()
        self._block, self._filled = _new_block(), 0
        self._digesting: deque[tuple[Future[None], memoryview]] = deque()  # in file order
        self._thread: ThreadPoolExecutor | None = None  # None for a file below one block

    def append(self, data: atomic.Buffer) -> None:
        """Appends a copy of the bytes, so that the caller may change them at once."""
        rest = memoryview(data)
        self.size += len(rest)
        while len(rest):
            part = min(len(rest), BLOCK_BYTES - self._filled)
            self._block[self._filled : self._filled + part] = rest[:part]
            self._filled += part
            rest = rest[part:]
            if self._filled == BLOCK_BYTES:
                self._put_block()

    def end(self) -> dict[str, Any]:
        """Completes and syncs the file; returns its entry in the listing."""
        rest = self._block[: self._filled]
        atomic.write(self.handle, rest)
        atomic.sync(self.handle)
        while self._digesting:
            self._digested()
        self.running.update(rest)
        self.close()
        atomic.protect(self.full)
        return {"path": self.path, "size": self.size, "sha256": self.running.hexdigest()}

    def close(self) -> None:
        """Closes the file and ends the thread, finished or not."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self.handle.close()

    def _put_block(self) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, "digest")
        self._digesting.append((self._thread.submit(self.running.update, self._block), self._block))
        atomic.write(self.handle, self._block)
        if not self.size // BLOCK_BYTES % SYNC_BLOCKS:
            atomic.sync(self.handle)
        self._block = _new_block() if len(self._digesting) < BLOCKS else self._digested()
        self._filled = 0

    def _digested(self) -> memoryview:
        """Waits until the oldest block is digested, and returns its buffer."""
        future, block = self._digesting.popleft()
        future.result()
        return block


def _new_block() -> memoryview:
    return np.empty(BLOCK_BYTES, np.uint8).data  # takes no memory until it is filled


def _checked_spec(spec: ArraySpec) -> ArraySpec:
    shard_format.checked_name(spec.name, "arrays")
    if spec.name == shard_format.KEY or min(spec.shape, default=1) < 1 or spec.row_bytes > shard_format.MAX_ROW_BYTES:
        raise ValueError(f"array is {spec}, expected a name that is not 'key', sides of 1 or more, a row below 2 GiB")
    return spec


def _row(spec: ArraySpec, value: Any) -> np.ndarray[Any, Any]:
    """The row as uint8 [row_bytes]; not copied if it is contiguous."""
    if isinstance(value, np.ndarray):
        wanted = shard_format.NUMPY[spec.dtype]
        if value.dtype != wanted or value.shape != spec.shape:
            raise ValueError(
                f"array '{spec.name}' is {value.dtype} {list(value.shape)}, expected {wanted} {list(spec.shape)}"
            )
        return np.ascontiguousarray(value).reshape(-1).view(np.uint8)
    row = np.frombuffer(value, dtype=np.uint8)
    if len(row) != spec.row_bytes:
        raise ValueError(f"array '{spec.name}' has {len(row)} bytes, expected {spec.row_bytes}")
    return row
