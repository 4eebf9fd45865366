"""The header of a safetensors file: names, dtypes and shapes without the tensors. No torch.

Checks the header against the file's size before anything uses it: it is bounded, names each tensor once, and its
tensors fill the file without a gap, as the format requires (github.com/huggingface/safetensors, "Format").

A file may hold rows of tensors whose other rows are in other files. Its metadata then say at which row each begins, as
torch.distributed.checkpoint's HuggingFaceStorageWriter spells it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any, BinaryIO

from prep.models.weights import HEADER_BYTES, MOST_TENSORS, named_once
from prep.parse import Unparsed, brief, count, expect, list_of

ITEM_BYTES: Mapping[str, int] = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1,
                                 "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
MOST_ITEMS = 1 << 48
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorInfo:
    """One tensor of a file."""

    dtype: str  # in the format's spelling: F32
    shape: tuple[int, ...]
    start: int  # bytes after the header
    end: int


def read_header(handle: BinaryIO, size: int) -> dict[str, TensorInfo]:
    """The tensors of a file of `size` bytes, in the order of their bytes; leaves `handle` at the first tensor's bytes.

    Raises `Unparsed` for anything that the format does not allow, or `OSError`.
    """
    return read_header_and_metadata(handle, size)[0]


def read_header_and_metadata(handle: BinaryIO, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    """The tensors as `read_header` gives them, and the file's metadata; raises as it does."""
    length = int.from_bytes(_exactly(handle, 8), "little")
    if length > min(HEADER_BYTES, size - 8):
        raise Unparsed(f"its header claims {length} bytes, expected at most {min(HEADER_BYTES, max(size - 8, 0))}")
    spelled = _exactly(handle, length)
    try:
        document = json.loads(spelled, object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"its header is not JSON: {str(error)[:80]}") from None
    entries = dict(expect(document, dict, "its header"))
    metadata = expect(entries.pop("__metadata__", {}), dict, "its metadata")
    if len(entries) > MOST_TENSORS:
        raise Unparsed(f"it has {len(entries)} tensors, expected at most {MOST_TENSORS}")
    tensors = {name: _info(value, f"tensor '{name[:80]}'") for name, value in entries.items()}
    at = 0
    ordered = dict(sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)))
    for name, info in ordered.items():
        if info.start != at:
            raise Unparsed(f"tensor '{name[:80]}' begins at byte {info.start}, expected {at}")
        at = info.end
    if 8 + length + at != size:
        raise Unparsed(f"it has {size} bytes, expected {8 + length + at} for its tensors")
    return ordered, {name: value for name, value in metadata.items() if isinstance(value, str)}


def first_rows(tensors: Mapping[str, TensorInfo], metadata: Mapping[str, str]) -> dict[str, int]:
    """The row of the whole tensor with which each tensor of a file begins; 0 in files without `SHARDING`.

    Raises `Unparsed`.
    """
    if SHARDING not in metadata:
        return dict.fromkeys(tensors, 0)
    try:
        table = json.loads(metadata[SHARDING], object_pairs_hook=named_once)
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"its {SHARDING} is not JSON: {str(error)[:80]}") from None
    places = expect(table, dict, SHARDING)
    if places.keys() != tensors.keys():
        raise Unparsed(f"its {SHARDING} and its header name different tensors")
    first = {}
    for name, info in tensors.items():
        where = f"the offsets of tensor '{name[:80]}'"
        offsets = list_of(expect(places[name], dict, where).get(OFFSETS), count, where)
        if len(offsets) != len(info.shape) or any(offsets[1:]):
            raise Unparsed(f"{where} are {brief(offsets)}, expected those of rows of {brief(list(info.shape))}")
        first[name] = offsets[0] if offsets else 0
    return first


def joined(files: Iterable[tuple[Mapping[str, TensorInfo], Mapping[str, int]]]
           ) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each whole tensor in files of these headers and `first_rows`.

    Raises `Unparsed` unless the rows of each tensor follow each other, without a gap or an overlap.
    """
    pieces: dict[str, list[tuple[int, TensorInfo]]] = {}
    for tensors, rows in files:
        for name, info in tensors.items():
            pieces.setdefault(name, []).append((rows[name], info))
    whole = {}
    for name, parts in pieces.items():
        parts.sort(key=lambda part: part[0])
        like, at = parts[0][1], 0
        for row, info in parts:
            if row != at or (info.dtype, info.shape[1:]) != (like.dtype, like.shape[1:]):
                raise Unparsed(f"tensor '{name[:80]}' has {brief(list(info.shape))} {info.dtype} from row {row} on, "
                               f"expected rows like {brief(list(like.shape))} {like.dtype} from row {at} on")
            at += info.shape[0] if info.shape else 1
        whole[name] = (like.dtype, (at, *like.shape[1:]) if like.shape else ())
    return whole


def _info(value: Any, where: str) -> TensorInfo:
    table = expect(value, dict, where)
    dtype, shape, offsets = (table.get(name) for name in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in ITEM_BYTES:
        raise Unparsed(f"{where} has dtype {brief(dtype)}, expected one of: {', '.join(ITEM_BYTES)}")
    sides = tuple(list_of(shape, count, f"the shape of {where}"))
    places = list_of(offsets, count, f"the offsets of {where}")
    items = prod(sides)
    if len(places) != 2 or items > MOST_ITEMS or places[1] - places[0] != items * ITEM_BYTES[dtype]:
        raise Unparsed(f"{where} has data_offsets {brief(offsets)}, expected a range for {brief(list(sides))} {dtype}")
    return TensorInfo(dtype=dtype, shape=sides, start=places[0], end=places[1])


def _exactly(handle: BinaryIO, size: int) -> bytes:
    data = handle.read(size)
    if len(data or b"") != size:
        raise Unparsed(f"it ends within its header, expected {size} more bytes")
    return data
