"""Is every byte of a shard still what it was? The digest says yes or no; the checksums then say where."""

from __future__ import annotations

import contextlib

import numpy as np

from prep.cache import damage, layout
from prep.cache.damage import Damage
from prep.cache.header import read_document
from prep.cache.reader import Reader
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.parse import Unparsed


def verify_shard(cache: Cache, digest: str) -> list[Damage]:
    """What is damaged in a shard; nothing when its digest fits. The cache remembers either, where it is writable.

    Damage that no checksum places (a lost file, a header, the keys) counts against the whole shard. What the system
    does not let us read is told, and not remembered: it may be a matter of rights.
    """
    root = cache.shard(digest)
    if not root.is_dir():
        return [Damage(shard=digest, field=None, array=None, row=None, what="the shard is missing")]
    try:
        found = [] if layout.tree_digest(root) == digest else _locate(cache, digest)
    except OSError as error:
        return [Damage(shard=digest, field=None, array=None, row=None, what=f"cannot be read: {error}")]
    with contextlib.suppress(OSError):
        damage.forget(cache, digest)
        damage.record(cache, found)
    return found


def _locate(cache: Cache, digest: str) -> list[Damage]:
    root = cache.shard(digest)
    field = None
    try:
        field = layout.parse_group(read_document(root / "zarr.json"), "zarr.json")
        reader = Reader(cache.root)
        rows = len(reader.keys(digest))
        names = sorted(path.name for path in root.iterdir() if path.is_dir() and path.name != layout.KEY)
        found = [bad for name in names for bad in _damaged_rows(reader, digest, field, name, rows)]
    except (CacheError, Unparsed, FileNotFoundError) as error:
        return [Damage(shard=digest, field=field, array=None, row=None, what=str(error))]
    what = "the digest does not fit, and every row's checksum does: files were added, removed or replaced"
    return found or [Damage(shard=digest, field=field, array=None, row=None, what=what)]


def _damaged_rows(reader: Reader, digest: str, field: str, name: str, rows: int) -> list[Damage]:
    spec, own_rows = reader.array_info(digest, name)
    if own_rows != rows:
        raise CacheError(f"shard {digest}, array '{name}': {own_rows} rows, expected {rows} as there are keys")
    row_bytes = np.empty(spec.row_bytes, dtype=np.uint8)
    found = []
    for row in range(rows):
        try:
            reader.read_into(row_bytes, digest, name, row)
        except CacheError as error:
            found.append(Damage(shard=digest, field=field, array=name, row=row, what=error.message))
    return found
