"""Reads the documents and keys of a shard, and checks them against its file sizes before allocating anything."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.store import Cache
from prep.errors import MORE_FILES, OUT_OF_FILES, CacheError
from prep.fs.untrusted import check_dir, entries, open_regular, read_regular, size_regular, stream_of
from prep.parse import Unparsed

HINT = "prep verify MANIFEST names every damaged row; to repair, run prep encode again as it was first run"


@dataclass(frozen=True, kw_only=True, slots=True)
class Header:
    """The field, arrays and keys of a shard."""

    field: str
    rows: int
    arrays: tuple[ArraySpec, ...]  # sorted by name
    keys: np.ndarray[Any, np.dtype[np.uint8]]  # [rows, 32]


def read_header(cache: Cache, shard: str) -> Header:
    """The header of a shard whose documents agree; does not read the arrays' data. Raises `CacheError`."""
    keys = read_keys(cache, shard)
    field, rows, arrays = read_documents(cache, shard)
    return Header(field=field, rows=rows, arrays=arrays, keys=keys)


def read_documents(cache: Cache, shard: str) -> tuple[str, int, tuple[ArraySpec, ...]]:
    """The field, number of rows and arrays of a shard, as its documents say. Raises `CacheError`."""
    root, array = cache.header_path(shard), ""
    arrays, counts = list[ArraySpec](), dict[str, int]()
    try:
        field = shard_format.parse_group(read_document(root), "zarr.json")
        for array in [entry.name for entry in entries(Path(root)) if entry.is_dir(follow_symlinks=False)]:
            shard_format.checked_name(array, "a directory")
            document = read_document(f"{root}{os.sep}{array}")
            spec, counts[array] = shard_format.parse_array(document, array, f"{array}/zarr.json")
            if array != shard_format.KEY:
                arrays.append(spec)
        rows = counts.get(shard_format.KEY, 0)
        for array, count in counts.items():  # noqa: B007  # the error names it
            if count != rows:
                raise Unparsed(f"{count} rows, expected {rows}, one per key")
    except (OSError, Unparsed) as error:
        raise fault(root, shard, array, error) from None
    return field, rows, tuple(arrays)


def read_document(folder: Path | str) -> bytes:
    """The bytes of the `zarr.json` in a directory.

    Raises `OSError`, and `Unparsed` if it is larger than any that Latentry writes.
    """
    check_dir(folder)
    path = f"{folder}{os.sep}zarr.json"  # here and below a string: a Path costs as much as a read
    if size_regular(path) > shard_format.MAX_DOCUMENT:
        raise Unparsed(f"zarr.json has more than {shard_format.MAX_DOCUMENT} bytes, expected a document of a shard")
    return read_regular(path, shard_format.MAX_DOCUMENT)


def read_array_header(root: Path | str, array: str) -> tuple[ArraySpec, int]:
    """The dtype and shape of a row, and N, of an array; checks the size of its data file against them.

    Raises `Unparsed`, `OSError`.
    """
    spec, rows = shard_format.parse_array(read_document(f"{root}{os.sep}{array}"), array, f"{array}/zarr.json")
    key = array == shard_format.KEY
    wanted = rows * shard_format.KEY_BYTES + shard_format.CRC_BYTES if key else shard_format.data_bytes(spec, rows)
    size = size_regular(f"{root}{os.sep}{shard_format.data_path(spec)}")
    if size != wanted:
        raise Unparsed(f"{shard_format.data_path(spec)} has {size} bytes, expected {wanted} for {rows} rows")
    return spec, rows


def check_index(path: Path | str, spec: ArraySpec, rows: int) -> None:
    """Raises `Unparsed` unless the shard index is that of N consecutive rows; raises `OSError`."""
    with stream_of(open_regular(path)) as handle:
        handle.seek(rows * shard_format.row_stride(spec))
        if not all(handle.read(len(part)) == part for part in shard_format.index_parts(spec, rows)) or handle.read(1):
            raise Unparsed(f"{shard_format.data_path(spec)} has a damaged shard index")


def read_keys(cache: Cache, shard: str) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A shard's keys, uint8 [N, 32], sorted, checksum checked. Raises `CacheError`."""
    root = cache.header_path(shard)
    try:
        _, rows = read_array_header(root, shard_format.KEY)
        most = rows * shard_format.KEY_BYTES + shard_format.CRC_BYTES
        data = read_regular(f"{root}{os.sep}{shard_format.KEY_PATH}", most)
    except (OSError, Unparsed) as error:
        raise fault(root, shard, shard_format.KEY, error) from None
    body = data[: -shard_format.CRC_BYTES]
    if shard_format.crc_bytes(body) != data[-shard_format.CRC_BYTES :]:
        raise CacheError(f"shard {shard}, array 'key': its bytes do not match their checksum", hint=HINT)
    keys = np.frombuffer(body, dtype="S32")
    if not (keys[:-1] < keys[1:]).all():
        raise CacheError(f"shard {shard}, array 'key': its keys are not in ascending order, each once", hint=HINT)
    return np.frombuffer(body, dtype=np.uint8).reshape(rows, shard_format.KEY_BYTES)


def fault(root: Path | str, shard: str, array: str, error: Exception) -> CacheError:
    """The error for an array that cannot be opened, or for the shard itself if `array` is empty."""
    what = str(error)
    if not Path(root).is_dir():
        what = "the shard is missing"
    elif isinstance(error, FileNotFoundError):
        what = f"{Path(error.filename).name} is missing"
    named = f"shard {shard}, array '{array}'" if array else f"shard {shard}"
    out_of_files = isinstance(error, OSError) and error.errno in OUT_OF_FILES
    return CacheError(f"{named}: {what}", hint=MORE_FILES if out_of_files else HINT)
