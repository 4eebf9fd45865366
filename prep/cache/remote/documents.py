"""Fetches the small files of a dataset in an object store: manifest, marker and tables."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

from prep.cache.remote.quota import QUOTA, make_dirs
from prep.cache.remote.shards import AGAIN, TRIES, lock_shard
from prep.cache.store import MARKER_BYTES, Cache, inside_another, publish_parts
from prep.errors import CacheError
from prep.fs import atomic
from prep.fs.mirror import split_url, url_of
from prep.fs.paths import MARKER
from prep.fs.remote.errors import StoreError, is_refusal
from prep.fs.remote.objects import read_object, size_of, stream
from prep.fs.remote.retry import NEVER
from prep.fs.text import without_mark
from prep.fs.tree import file_digest
from prep.parse import Unparsed, sealed_json

MOST_TABLE = 1 << 35  # bytes of a table; 10^8 samples have 24 GB


def fetch_small(path: Path, most: int) -> bytes:
    """The bytes of a sealed document, whose copy `path` becomes. If its seal is broken in the store, there is no copy.

    Raises `FileNotFoundError`, `CacheError`.
    """
    url = url_of(path)
    assert url is not None, "only copies are fetched"
    for _ in range(TRIES):
        data = read_object(url, most)
        with contextlib.suppress(Unparsed):
            sealed_json(without_mark(data), url)
            if not path.is_file() or path.read_bytes() != data:
                make_dirs(path.parent)
                atomic.write_atomic(path, data)
            return data
    return data


def check_alone(url: str) -> None:
    """Raises `PathError` for a new cache at a URL if a prefix above it is a cache. Raises `StoreError`."""
    if (outer := cache_above(url)) is not None:
        raise inside_another(url, outer)


def cache_above(url: str, *, stop: threading.Event = NEVER) -> str | None:
    """The URL of the cache in which a place lies, as far as `places_above` sees it. Raises `StoreError`."""
    return next(places_above(url, MARKER, stop=stop), None)


def places_above(url: str, name: str, *, stop: threading.Event = NEVER) -> Iterator[str]:
    """The URLs above `url` that have an object of this name, the outermost first, as far as the credentials let that
    be seen. Raises `StoreError`.

    They may be for what is below the place alone, and some stores refuse to tell of an object that there is none.
    """
    key = split_url(url)[2]
    parts, bucket = key.split("/"), url.removesuffix(key)
    for count in range(len(parts)):
        above = bucket + "/".join(parts[:count])
        try:
            size_of(f"{above.rstrip('/')}/{name}", stop=stop)
        except FileNotFoundError:
            continue
        except StoreError as error:
            if is_refusal(error):
                continue
            raise
        yield above.rstrip("/")


def fetch_tables(root: Path, tables: Iterable[str]) -> None:
    """Fetches a cache's marker and tables that its copy at `root` does not have, and checks their digests.

    Of several processes that lack a table, one fetches it. Raises `CacheError`.
    """
    if not (root / MARKER).is_file():
        try:
            fetch_small(root / MARKER, MARKER_BYTES)
        except FileNotFoundError:
            raise CacheError(f"there is no cache in {url_of(root)}: it has no {MARKER}", hint=AGAIN) from None
        if not (root / MARKER).is_file():
            raise CacheError(f"{url_of(root / MARKER)} is damaged: its seal does not match", hint=AGAIN)
    cache = Cache(root=root)
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
    url = f"{url_of(cache.root)}/{cache.table(digest).relative_to(cache.root).as_posix()}"
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
