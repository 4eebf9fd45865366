"""Opens caches to encode into them: directories, and caches in object stores, which are made when they are missing."""

from __future__ import annotations

from prep.cache.remote.documents import check_alone
from prep.cache.remote.quota import make_dirs
from prep.cache.store import MARKER_BYTES, Cache, cache_at, check_can_create, new_marker, open_cache
from prep.errors import CacheError, PathError
from prep.fs import atomic
from prep.fs.paths import MARKER
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import create_checked, list_objects, read_object


def open_to_encode(path: Place, *, create: bool) -> Cache:
    """Opens the cache at `path` for encoding.

    Raises as `open_cache` does, and `StoreError`.
    """
    if not isinstance(path, Bucket):
        return open_cache(path, create=create)
    url = str(path)
    marker = _marker(path)
    if marker is None:
        if not create:
            raise CacheError(f"there is no cache in {url}: it has no {MARKER}",
                             hint="prep encode SOURCE --cache URL creates one")
        marker = create_checked(f"{url}/{MARKER}", new_marker(), MARKER_BYTES)
    cache = cache_at(path)
    make_dirs(cache.unsent.root)
    if not (cache.root / MARKER).is_file() or (cache.root / MARKER).read_bytes() != marker:
        atomic.write_atomic(cache.root / MARKER, marker)
    open_cache(cache.root, create=False)  # checks the marker
    return cache


def check_can_encode_to(path: Place) -> None:
    """Raises `PathError` unless `path` is a cache or can become one: missing, empty, or an unused prefix of a store, in
    no other cache."""
    if isinstance(path, Bucket):
        if _marker(path) is None:
            check_alone(path)
    else:
        check_can_create(path)


def is_cache(path: Place) -> bool:
    """Whether there is a cache at `path`, a directory or a URL. Raises `PathError`, `StoreError`."""
    return _marker(path) is not None if isinstance(path, Bucket) else (path / MARKER).exists()


def _marker(path: Bucket) -> bytes | None:
    """The marker of the cache at a URL; `None` if nothing is there. Raises `PathError` if something else is."""
    url = str(path)
    if not path.key:
        raise PathError(f"{url} is a whole bucket, expected a place in it for the cache",
                        hint=f"name one, like {url}/cache")
    try:
        return read_object(f"{url}/{MARKER}", MARKER_BYTES)
    except FileNotFoundError:
        objects = list_objects(url)
    if MARKER in objects:  # another machine was quicker
        return read_object(f"{url}/{MARKER}", MARKER_BYTES)
    if objects:
        raise PathError(f"{url} is not empty and not a cache: it has no {MARKER}",
                        hint="name a prefix without objects with --cache")
    return None
