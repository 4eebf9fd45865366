"""Fetches the small files of a dataset in an object store: manifest, marker and tables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from prep.cache.publish import publish_parts
from prep.cache.remote.quota import QUOTA, make_dirs
from prep.cache.remote.shards import AGAIN, TRIES, lock_shard
from prep.cache.store import MARKER_BYTES, Cache, cache_at, inside_another
from prep.errors import CacheError
from prep.fs import atomic
from prep.fs.paths import MARKER
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.errors import StoreError, is_refusal
from prep.fs.remote.objects import read_object, size_of, stream
from prep.fs.remote.retry import NEVER
from prep.fs.text import without_mark
from prep.fs.tree import file_digest
from prep.parse import Unparsed, sealed_json

MOST_TABLE = 1 << 35  # bytes of a table; 10^8 samples have 24 GB


def read_sealed(place: Bucket, most: int) -> bytes:
    """The bytes of a sealed document in a store. If its seal is broken, it is read again.

    Raises `FileNotFoundError`, `CacheError`.
    """
    for _ in range(TRIES):
        data = read_object(place.url, most)
        with contextlib.suppress(Unparsed):
            sealed_json(without_mark(data), str(place))
            break
    return data


def check_alone(place: Bucket) -> None:
    """Raises `PathError` for a new cache at a place if a prefix above it is a cache. Raises `StoreError`."""
    if (outer := cache_above(place)) is not None:
        raise inside_another(str(place), str(outer))


def cache_above(place: Bucket, *, stop: threading.Event = NEVER) -> Bucket | None:
    """The cache in which a place lies, as far as `places_above` sees it. Raises `StoreError`."""
    return next(places_above(place, MARKER, stop=stop), None)


def places_above(place: Bucket, name: str, *, stop: threading.Event = NEVER) -> Iterator[Bucket]:
    """The places above one that have an object of this name, the outermost first, as far as the credentials let that
    be seen. Raises `StoreError`.

    They may be for what is below the place alone, and some stores refuse to tell of an object that there is none.
    """
    for above in reversed(place.parents):
        try:
            size_of((above / name).url, stop=stop)
        except FileNotFoundError:
            continue
        except StoreError as error:
            if is_refusal(error):
                continue
            raise
        yield above


def fetch_tables(place: Place, tables: Iterable[str]) -> None:
    """Fetches the marker and tables of a cache in a store that its copy here does not have, and checks their digests.

    Of several processes that lack a table, one fetches it. A cache on this computer is what it is. Raises `CacheError`.
    """
    if not isinstance(place, Bucket):
        return
    cache = cache_at(place)
    if not (cache.root / MARKER).is_file():
        try:
            data = read_sealed(place / MARKER, MARKER_BYTES)
            sealed_json(without_mark(data), MARKER)
        except FileNotFoundError:
            raise CacheError(f"there is no cache in {place}: it has no {MARKER}", hint=AGAIN) from None
        except Unparsed:
            raise CacheError(f"{place / MARKER} is damaged: its seal does not match", hint=AGAIN) from None
        make_dirs(cache.root)
        atomic.write_atomic(cache.root / MARKER, data)
    for digest in tables:
        if not _has_table(cache, digest):
            with lock_shard(digest, NEVER):
                if not _has_table(cache, digest):
                    _fetch_table(cache, digest)


def _has_table(cache: Cache, digest: str) -> bool:
    path = cache.table(digest)
    return path.is_file() and file_digest(path) == digest


def _table_size(url: str) -> int:
    """The size of a table in a store, in bytes. Raises `FileNotFoundError`, `CacheError` for one that is too large."""
    size = size_of(url)
    if size > MOST_TABLE:
        raise CacheError(f"{url} has {size} bytes, expected at most {MOST_TABLE}", hint=AGAIN)
    return size


def _fetch_table(cache: Cache, digest: str) -> None:
    url = cache.object(cache.table(digest))
    for _ in range(TRIES):
        try:
            # To the disk: tables of 10^8 samples do not fit into memory.
            with QUOTA.reserved(size := _table_size(url), NEVER):
                if publish_parts(cache, digest, stream(url, size)):
                    return
        except FileNotFoundError as error:
            if error.filename != url:
                raise
            raise CacheError(f"{url} is missing", hint=AGAIN) from None
    raise CacheError(f"{url} is damaged: its bytes do not match its name", hint=AGAIN)
