"""What a shard says of itself, believed only after it was checked against the sizes of its files.

Nothing is allocated that a file of that size could not hold.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from prep.cache import layout
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.parse import Unparsed
from prep.records import ArraySpec

HINT = "prep verify MANIFEST names every damaged row; prep encode, as it was first run, makes them again"


def read_document(path: Path) -> bytes:
    """A `zarr.json`, refused when it is larger than any of ours. Raises `Unparsed`, `OSError`."""
    with path.open("rb") as handle:
        data = handle.read(layout.MAX_DOCUMENT + 1)
    if len(data) > layout.MAX_DOCUMENT:
        raise Unparsed(f"{path.name} has more than {layout.MAX_DOCUMENT} bytes, expected a document of ours")
    return data


def read_array_header(root: Path, array: str) -> tuple[ArraySpec, int]:
    """One row's dtype and shape, and N, of an array whose data file has the size that they ask for.

    Raises `Unparsed`, `OSError`.
    """
    spec, rows = layout.parse_array(read_document(root / array / "zarr.json"), array, f"{array}/zarr.json")
    key = array == layout.KEY
    wanted = rows * layout.KEY_BYTES + layout.CRC_BYTES if key else layout.data_bytes(spec, rows)
    size = (root / layout.data_path(spec)).stat().st_size
    if size != wanted:
        raise Unparsed(f"{layout.data_path(spec)} has {size} bytes, expected {wanted} for {rows} rows")
    return spec, rows


def check_index(path: Path, spec: ArraySpec, rows: int) -> None:
    """Raises `Unparsed` unless the shard index is that of N rows, one after another. Raises `OSError`."""
    with path.open("rb") as handle:
        handle.seek(rows * layout.row_stride(spec))
        if handle.read() != layout.index(spec, rows):
            raise Unparsed(f"{layout.data_path(spec)} has a damaged shard index")


def read_keys(cache: Cache, shard: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A shard's keys, uint8 [N, 32], sorted, checksum checked. Raises `CacheError`."""
    root = cache.shard(shard)
    try:
        _, rows = read_array_header(root, layout.KEY)
        data = (root / layout.KEY_PATH).read_bytes()
    except (OSError, Unparsed) as error:
        raise fault(root, shard, layout.KEY, error) from None
    body = data[: -layout.CRC_BYTES]
    if layout.crc_bytes(body) != data[-layout.CRC_BYTES :]:
        raise CacheError(f"shard {shard}, array 'key': its bytes do not match their checksum", hint=HINT)
    return np.frombuffer(body, dtype=np.uint8).reshape(rows, layout.KEY_BYTES)


def fault(root: Path, shard: str, array: str, error: Exception) -> CacheError:
    """What a user is told when an array cannot be opened."""
    what = str(error)
    if not root.is_dir():
        what = "the shard is missing"
    elif isinstance(error, FileNotFoundError):
        what = f"{Path(error.filename).name} is missing"
    return CacheError(f"shard {shard}, array '{array}': {what}", hint=HINT)
