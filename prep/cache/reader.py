"""Reads rows from shard files directly into the caller's buffers: one `preadv` and one CRC-32C per row, no copies.

Headers and the shard index are checked once against the size of the file, when an array is first opened; after that, a
row's offset is a multiplication. Files stay open, and the least recently used is closed first; a file that another
thread is reading is closed when that thread has finished.

Measured on a 2-core EPYC (tests/benchmarks/bench_read.py; RESULTS.md has what was tried), SDXL rows, warm, CPU seconds
per GB: 0.071, of which the kernel's copy takes 0.050, the checksum 0.017 and Python 0.004; memcpy takes 0.046.

Rows are returned as stored, little-endian, which is the byte order of every machine that torch is built for.
"""

from __future__ import annotations

import copy
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.damage import Damage, as_recorded, is_lost
from prep.cache.records import RowRef
from prep.cache.remote.headers import ensure_headers
from prep.cache.remote.quota import NotFetched
from prep.cache.remote.shards import Fetcher
from prep.cache.shard_header import HINT, check_index, fault, read_array_header, read_keys
from prep.cache.store import Cache
from prep.errors import OUT_OF_FILES, CacheError
from prep.fs.pread import ADVISE, READ_AT, Advise, ReadAt, most_open, read_rest
from prep.fs.remote.copies import LIMIT
from prep.fs.remote.retry import NEVER
from prep.fs.untrusted import open_regular
from prep.parse import Unparsed

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
NOT_MATCHING = "is damaged: its bytes do not match their checksum"
JOBS = 8  # arrays opened at a time, where the time goes into waiting for the disk
AT_ONCE, HEAD_START = 0.0005, 16  # seconds for an array whose pages are in memory; how many more are waited for
TOGETHER = 8  # arrays that a thread opens before it reports: handing one over costs a third of opening it
OPENINGS = 10  # attempts at a shard that other processes remove, to make room, before it is open


class OpenArray:
    """An array whose header and index are intact, and its open file."""

    def __init__(self, path: str, spec: ArraySpec, rows: int) -> None:
        self.spec = spec
        self.rows = rows
        self.stride = shard_format.row_stride(spec)
        self.row_bytes = spec.row_bytes
        self.descriptor = open_regular(path)

    def __del__(self) -> None:
        descriptor = getattr(self, "descriptor", None)
        if descriptor is not None:
            os.close(descriptor)


class RowTargets:
    """A batch's buffer, uint8 [B, row_bytes] with contiguous rows, split once into one memoryview per row."""

    row_bytes: int | None  # None: rows of several sizes

    def __init__(self, out: Bytes) -> None:
        if out.dtype != np.uint8 or out.ndim != 2 or out.strides[1] != 1:
            raise ValueError(f"out is {out.dtype} {list(out.shape)}, expected uint8 [B, row_bytes], rows contiguous")
        self.row_bytes = out.shape[1]
        self.rows: list[memoryview] = [row.data for row in out]

    def only(self, places: Iterable[int]) -> RowTargets:
        """Some of the rows."""
        some = copy.copy(self)
        some.rows = [self.rows[place] for place in places]
        return some

    def cut(self, sizes: Sequence[int]) -> RowTargets:
        """The same rows, each cut to its first so many bytes: for shards whose rows differ in size."""
        some = copy.copy(self)
        some.rows = [row[:size] for row, size in zip(self.rows, sizes, strict=True)]
        some.row_bytes = None
        return some

    def check(self, spec: ArraySpec, wanted: Sequence[tuple[memoryview, int]]) -> None:
        """Raises `ValueError` unless the rows `wanted` of one array have its rows' size."""
        size = self.row_bytes
        if size is None and any(len(target) != spec.row_bytes for target, _ in wanted):
            size = next(len(target) for target, _ in wanted if len(target) != spec.row_bytes)
        if size is not None and size != spec.row_bytes:
            raise ValueError(f"out has rows of {size} bytes, array '{spec.name}' has {spec.row_bytes}")


class Reader:
    """Reads rows of a cache's shards. Threads may share a reader.

    Every fault raises a `CacheError` that names shard, array and row: missing, damaged, or in conflict with the header.
    Damage is also recorded in the cache, so that `encode` repairs it; if the cache cannot be written, the error is an
    `UnrecordedDamage`. Shards of a cache in an object store are fetched when they are first read, and fetched again if
    their copies are damaged.
    """

    def __init__(
        self, cache: Cache, *, check: bool = True, open_arrays: int | None = None, read_at: ReadAt = READ_AT,
        advise: Advise = ADVISE,
    ) -> None:
        self._cache = cache
        self.fetcher = Fetcher(cache)
        self._check = check
        self._limit = most_open() if open_arrays is None else open_arrays
        self._read_at: Callable[..., int] = read_at  # called with a tuple, which is faster to make than a list
        self._advise = advise
        self._lock = threading.Lock()
        self._open: OrderedDict[tuple[str, str], OpenArray] = OrderedDict()
        self._sound: dict[tuple[str, str], tuple[ArraySpec, int]] = {}
        self._stop = NEVER

    def until(self, stop: threading.Event) -> Reader:
        """The same reader and files; what it fetches ends with `Stopped` once `stop` is set."""
        same = copy.copy(self)
        same._stop = stop
        return same

    def array_info(self, shard: str, array: str) -> tuple[ArraySpec, int]:
        """The dtype and shape of a row, and the number of rows. No shard is fetched for that if its header is here."""
        if (info := self.fetcher.described(shard, array)) is not None:
            return info
        opened = self._array(shard, array)
        return opened.spec, opened.rows

    def open_all(self, places: Iterable[tuple[str, str]], jobs: int = JOBS) -> list[tuple[ArraySpec, int]]:
        """Opens and checks the arrays of (shard, array) pairs; returns their `array_info` in order.

        From the first that the disk makes wait on, `jobs` at a time; before, one by one, since threads that never wait
        take each other's turns: three times the CPU time. Of several faults, the first in that order is raised, and
        all are recorded.
        """
        pending, outcomes = deque(places), list[tuple[ArraySpec, int] | CacheError]()
        begun = time.perf_counter()
        while pending and time.perf_counter() - begun < (len(outcomes) + HEAD_START) * AT_ONCE:
            outcomes.append(self._tried(pending.popleft()))
        if pending:
            rest = list(pending)
            groups = [rest[at : at + TOGETHER] for at in range(0, len(rest), TOGETHER)]
            with ThreadPoolExecutor(jobs, "open") as pool:
                outcomes += chain.from_iterable(pool.map(self._tried_all, groups))
        infos = []
        for outcome in outcomes:
            if isinstance(outcome, CacheError):
                raise outcome
            infos.append(outcome)
        return infos

    def _tried_all(self, places: Sequence[tuple[str, str]]) -> list[tuple[ArraySpec, int] | CacheError]:
        return [self._tried(place) for place in places]

    def _tried(self, place: tuple[str, str]) -> tuple[ArraySpec, int] | CacheError:
        try:
            return self.array_info(*place)
        except CacheError as error:
            return error

    def read_into(self, out: Bytes | memoryview, shard: str, array: str, row: int) -> None:
        """Reads one row into `out`, which has exactly the row's bytes and is writable and contiguous."""
        target = out if isinstance(out, np.ndarray) else np.frombuffer(out, dtype=np.uint8)
        self.read_batch(target.reshape(1, -1), array, [RowRef(shard=shard, row=row)])

    def read_batch(self, out: Bytes | RowTargets, array: str, refs: Sequence[RowRef]) -> None:
        """Reads B rows into `out`: uint8 [B, row_bytes] with contiguous rows, or `RowTargets` of such a buffer."""
        targets = out if isinstance(out, RowTargets) else RowTargets(out)
        if len(targets.rows) != len(refs):
            raise ValueError(f"out has {len(targets.rows)} rows, expected one for each of {len(refs)} places")
        by_shard: dict[str, list[tuple[memoryview, int]]] = {}
        for target, ref in zip(targets.rows, refs, strict=True):
            if ref.shard in by_shard:
                by_shard[ref.shard].append((target, ref.row))
            else:
                by_shard[ref.shard] = [(target, ref.row)]
        for shard, wanted in by_shard.items():
            try:
                self._read_rows(targets, array, shard, wanted)
            except CacheError:
                if not self.fetcher.is_damaged(shard):
                    raise
                self._drop({shard})
                self._read_rows(targets, array, shard, wanted)

    def _read_rows(self, targets: RowTargets, array: str, shard: str, wanted: Sequence[tuple[memoryview, int]]) -> None:
        opened = self._array(shard, array)
        targets.check(opened.spec, wanted)
        self._read(opened, shard, wanted)

    def _read(self, opened: OpenArray, shard: str, wanted: Iterable[tuple[memoryview, int]]) -> None:
        """Reads rows of one array into one buffer each. Python takes a tenth of the time, so names are local."""
        read_at, check, crc32c, checksum = self._read_at, self._check, shard_format.crc32c, memoryview(bytearray(4))
        descriptor, rows, stride, stored = opened.descriptor, opened.rows, opened.stride, checksum.cast("I")
        for target, row in wanted:
            if not 0 <= row < rows:
                raise _row_fault(shard, opened.spec.name, row, f"there are {rows} rows")
            try:
                got = read_at(descriptor, (target, checksum), row * stride)
                if got != stride:
                    got = read_rest(read_at, descriptor, (target, checksum), row * stride, got)
            except OSError as error:
                what = f"cannot be read: {error}"
                raise self._damaged(shard, opened.spec.name, row, what, remember=is_lost(error)) from error
            if got != stride:
                raise self._damaged(shard, opened.spec.name, row, f"ends after {got} of {stride} bytes")
            if check and crc32c(target) != stored[0]:
                raise self._damaged(shard, opened.spec.name, row, NOT_MATCHING)

    def advise(self, array: str, refs: Iterable[RowRef]) -> None:
        """Makes the kernel read rows ahead (measured: 16 to 64 rows ahead is best on a cold cache)."""
        known: dict[str, OpenArray] = {}
        for ref in refs:
            opened = known.get(ref.shard) or known.setdefault(ref.shard, self._array(ref.shard, array))
            self._advise(opened.descriptor, ref.row * opened.stride, opened.stride)

    def keys(self, shard: str) -> Bytes:
        """The keys of a shard's rows, uint8 [N, 32], sorted; checks their checksum."""
        ensure_headers(self._cache, [shard])
        return read_keys(self._cache, shard)

    def close(self) -> None:
        """Closes all files; the next read opens and checks them again."""
        with self._lock:
            self._open.clear()
            self._sound.clear()

    def close_removed(self) -> None:
        """Closes the files of shards that were removed to make room for others: open files keep their space."""
        with self._lock:
            shards = {shard for shard, _ in self._open}
        self._drop({shard for shard in shards if not self._cache.shard(shard).is_dir()})

    def _drop(self, shards: set[str]) -> None:
        with self._lock:
            for name in [name for name in self._sound if name[0] in shards]:
                del self._sound[name]
                self._open.pop(name, None)

    def _array(self, shard: str, array: str) -> OpenArray:
        name = (shard, array)
        with self._lock:
            opened = self._open.get(name)
            if opened is not None:
                self._open.move_to_end(name)
                return opened
        opened = self._reopen(shard, array)
        with self._lock:
            self._sound[name] = (opened.spec, opened.rows)
            self._open[name] = opened
            while len(self._open) > self._limit:
                self._open.popitem(last=False)
        return opened

    def _reopen(self, shard: str, array: str) -> OpenArray:
        if not shard_format.NAME.fullmatch(array):
            raise CacheError(f"array is {array!r}, expected lower-case letters, digits and underscores")
        root = self._cache.shard_path(shard)
        try:
            return self._fetched(root, shard, array)
        except (OSError, Unparsed) as error:
            problem = fault(root, shard, array, error)
            if isinstance(error, Unparsed) or is_lost(error):
                damage = Damage(shard=shard, field=None, array=None, row=None, what=str(error))
                problem = as_recorded(self._cache, problem, damage)
            raise problem from None

    def _fetched(self, root: str, shard: str, array: str) -> OpenArray:
        """An array, fetched if need be: until it is open, another process may remove the copy to make room."""
        for retries in range(OPENINGS - 1, -1, -1):
            if self.fetcher.ensure(shard, stop=self._stop):
                self.close_removed()
            try:
                return self._opened_by_force(root, shard, array)
            except FileNotFoundError:
                if self._cache.store is None or (not retries and Path(root).is_dir()):
                    raise
        raise NotFetched(f"the copy of shard {shard} was removed {OPENINGS} times before it was read: other processes "
                         "need the room", hint=f"allow copies more room with {LIMIT}=200GB, or free some space; then "
                         "run the same command again")

    def _opened_by_force(self, root: str, shard: str, array: str) -> OpenArray:
        """As `_opened_anew`, closing other files if there are too many."""
        try:
            return self._opened_anew(root, shard, array)
        except OSError as error:
            if error.errno not in OUT_OF_FILES:
                raise
            self._close_all()
            return self._opened_anew(root, shard, array)

    def _opened_anew(self, root: str, shard: str, array: str) -> OpenArray:
        sound = self._sound.get((shard, array))
        spec, rows = sound or read_array_header(root, array)
        path = f"{root}{os.sep}{shard_format.data_path(spec)}"
        if sound is None:
            check_index(path, spec, rows)
        return OpenArray(path, spec, rows)

    def _close_all(self) -> None:
        """Closes every file that no thread is reading, and lowers the limit: other code needs files, too."""
        with self._lock:
            self._limit = max(1, len(self._open) // 2)
            self._open.clear()

    def _damaged(self, shard: str, array: str, row: int, what: str, *, remember: bool = True) -> CacheError:
        problem = _row_fault(shard, array, row, what)
        if not remember:
            return problem
        damage = Damage(shard=shard, field=None, array=array, row=row, what=what)
        return as_recorded(self._cache, problem, damage)


def _row_fault(shard: str, array: str, row: int, what: str) -> CacheError:
    return CacheError(f"shard {shard}, array '{array}', row {row}: {what}", hint=HINT)
