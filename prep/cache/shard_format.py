"""Defines the bytes of a shard: Zarr v3 documents, the shard index, rows with their checksums, and the tree's digest.

    zarr.json                 group; attributes {"latentry": {"format": "latentry/shard", "version": 1, "field": …}}
    key/zarr.json  key/c.0.0  uint8 [N, 32]: one plain chunk of `bytes` + `crc32c`
    NAME/zarr.json            [N, …]: `sharding_indexed`, inner chunk = one row, its codecs `bytes` (little) + `crc32c`
    NAME/c.0.0…               N times (row, crc32c of it), N times (offset, length) as uint64, crc32c of those

All bytes follow from (field, dtype, shape of a row, N, rows): two correct writers make the same bytes. The chunk key
separator is ".", so that an array is two files in one directory instead of one directory per dimension. Everything is
little-endian. The tests compare with `zarr-python` and `tensorstore`; nothing here imports them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from awscrt import checksums

from prep.arrays import ITEM_BYTES, ArraySpec, DType
from prep.digest import canonical
from prep.parse import Unparsed, brief, expect, list_of, one_of

CRC_BYTES = 4
INDEX_PART = 1 << 16  # entries made or compared at a time
ENTRY_BYTES = 16  # (offset, length) of a row in the index, uint64 each
KEY_BYTES = 32
KEY = "key"
MAX_ROWS = 1 << 24  # limits the index of a hostile header; 256 MiB of the smallest rows, masks of 16 bytes, are 2^24
MAX_ROW_BYTES = (1 << 31) - (1 << 12)  # the most that Linux reads in one call
MAX_DOCUMENT = 1 << 16
NAME = re.compile(r"[a-z][a-z0-9_]{0,63}")
NUMPY: dict[DType, np.dtype[Any]] = {  # bfloat16 is stored as its bits; NumPy has no such type
    "bfloat16": np.dtype("<u2"), "float16": np.dtype("<f2"), "float32": np.dtype("<f4"), "uint8": np.dtype("u1"),
}


# CRC-32C of contiguous bytes, without a copy. awscrt uses AVX-512 if the CPU has it: 66 GB/s for rows of SDXL;
# google-crc32c reaches 31, at which the checksum would cost as much as copying the row.
crc32c: Callable[[np.ndarray[Any, Any] | memoryview | bytes], int] = checksums.crc32c


def crc_bytes(data: np.ndarray[Any, Any] | bytes) -> bytes:
    """CRC-32C as the codec `crc32c` stores it: four bytes, little-endian."""
    return crc32c(data).to_bytes(CRC_BYTES, "little")


def row_stride(spec: ArraySpec) -> int:
    """Bytes from one row to the next in a shard's file."""
    return spec.row_bytes + CRC_BYTES


def data_bytes(spec: ArraySpec, rows: int) -> int:
    """Size of an array's data file."""
    return rows * (row_stride(spec) + ENTRY_BYTES) + CRC_BYTES


def index(spec: ArraySpec, rows: int) -> bytes:
    """The shard index with its checksum, as at the end of the data file."""
    return b"".join(index_parts(spec, rows))


def index_parts(spec: ArraySpec, rows: int) -> Iterator[bytes]:
    """The shard index in parts of at most 1 MiB, then its checksum."""
    stride, checksum = row_stride(spec), 0
    for start in range(0, rows, INDEX_PART):
        numbers = np.arange(start, min(start + INDEX_PART, rows), dtype=np.uint64)
        entries = np.empty((len(numbers), 2), dtype="<u8")
        entries[:, 0] = numbers * np.uint64(stride)
        entries[:, 1] = stride
        part = entries.tobytes()
        checksum = checksums.crc32c(part, checksum)
        yield part
    yield checksum.to_bytes(CRC_BYTES, "little")


def data_path(spec: ArraySpec) -> str:
    """POSIX path of an array's data file in its shard."""
    return f"{spec.name}/c" + ".0" * (1 + len(spec.shape))


KEY_PATH = f"{KEY}/c.0.0"


def group_document(field: str) -> bytes:
    """`zarr.json` of the shard."""
    attributes = {"latentry": {"format": "latentry/shard", "version": 1, "field": field}}
    return canonical({"zarr_format": 3, "node_type": "group", "attributes": attributes})


def array_document(spec: ArraySpec, rows: int) -> bytes:
    """`zarr.json` of a data array."""
    sharding = {
        "name": "sharding_indexed",
        "configuration": {
            "chunk_shape": [1, *spec.shape],
            "codecs": [_bytes_codec(spec.dtype), {"name": "crc32c"}],
            "index_codecs": [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}],
            "index_location": "end",
        },
    }
    return _document(spec.dtype, [rows, *spec.shape], [sharding])


def key_document(rows: int) -> bytes:
    """`zarr.json` of the array of keys."""
    return _document("uint8", [rows, KEY_BYTES], [_bytes_codec("uint8"), {"name": "crc32c"}])


def parse_group(data: bytes, where: str) -> str:
    """The field that a shard's `zarr.json` names. Raises `Unparsed`."""
    document = _json(data, where)
    try:
        field = document["attributes"]["latentry"]["field"]
    except (KeyError, TypeError):
        raise Unparsed(f"{where} has no latentry attributes, expected a latentry/shard group") from None
    checked_name(field, where)
    if group_document(field) != data:
        raise Unparsed(f"{where} is not the document that latentry writes for field '{field}'")
    return str(field)


@lru_cache(maxsize=1 << 10)  # many shards have the same document, byte for byte
def parse_array(data: bytes, name: str, where: str) -> tuple[ArraySpec, int]:
    """The dtype and shape of a row, and N, from an array's `zarr.json`. Raises `Unparsed`."""
    document = _json(data, where)
    dtype: Any = one_of(document.get("data_type"), ITEM_BYTES, f"data_type of {where}")
    sides = list_of(document.get("shape"), lambda side, place: expect(side, int, place), f"shape of {where}")
    if not 1 <= len(sides) <= 8 or min(sides) < 1 or sides[0] > MAX_ROWS:
        raise Unparsed(f"shape of {where} is {sides}, expected 1 to {MAX_ROWS} rows of 0 to 7 dimensions")
    spec = ArraySpec(name=name, dtype=dtype, shape=tuple(sides[1:]))
    if spec.row_bytes > MAX_ROW_BYTES:
        raise Unparsed(f"shape of {where} is {sides}, expected rows of at most {MAX_ROW_BYTES} bytes")
    expected = key_document(sides[0]) if name == KEY else array_document(spec, sides[0])
    if expected != data:
        raise Unparsed(f"{where} is not the document that latentry writes for a {dtype} array of shape {sides}")
    return spec, sides[0]


def checked_name(name: Any, where: str) -> str:
    """`name`, if it is valid for a field or an array: lower-case letters, digits, underscores. Raises `Unparsed`."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise Unparsed(f"name in {where} is {brief(name)}, expected lower-case letters, digits and underscores")
    return name


def _bytes_codec(dtype: DType) -> dict[str, Any]:
    if ITEM_BYTES[dtype] == 1:
        return {"name": "bytes"}
    return {"name": "bytes", "configuration": {"endian": "little"}}


def _document(dtype: DType, shape: list[int], codecs: list[dict[str, Any]]) -> bytes:
    return canonical({
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": dtype,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": shape}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": 0,
        "codecs": codecs,
        "attributes": {},
        "storage_transformers": [],
    })


def _json(data: bytes, where: str) -> dict[str, Any]:
    try:
        parsed = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"{where} is not JSON: {error}") from None
    return expect(parsed, dict, where)
