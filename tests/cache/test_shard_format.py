"""The bytes of a shard, refereed by zarr-python's own metadata classes, and every way a header can lie."""

from __future__ import annotations

import json
from typing import Any

import google_crc32c
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.storage import MemoryStore

from prep.arrays import ITEM_BYTES, ArraySpec
from prep.cache import shard_format
from prep.cache.zarr_view import BFloat16, register
from prep.fs.tree import listing_digest
from prep.parse import Unparsed

ZARR_DTYPE: dict[str, Any] = {"bfloat16": BFloat16(), "float16": "float16", "float32": "float32", "uint8": "uint8"}
specs = st.builds(
    lambda dtype, shape: ArraySpec(name="a", dtype=dtype, shape=tuple(shape)),
    st.sampled_from(sorted(ITEM_BYTES)), st.lists(st.integers(1, 9), max_size=4),
)


@given(st.binary(max_size=5000))
def test_crc32c_is_that_of_another_implementation(data: bytes) -> None:
    assert shard_format.crc32c(data) == google_crc32c.value(data)
    assert shard_format.crc32c(np.frombuffer(data, np.uint8)) == google_crc32c.value(data)


def test_crc32c_is_castagnolis() -> None:
    """RFC 3720, B.4: 32 zeros, and the usual check string."""
    assert shard_format.crc32c(b"123456789") == 0xE3069283
    assert shard_format.crc_bytes(np.zeros(32, np.uint8)) == bytes.fromhex("aa36918a")


def ours_to_zarr(data: bytes) -> dict[str, Any]:
    """Our document, read and written by zarr-python."""
    return json.loads(json.dumps(ArrayV3Metadata.from_dict(json.loads(data)).to_dict()))


@settings(max_examples=40, deadline=None)
@given(spec=specs, rows=st.integers(1, 1000))
def test_array_documents_are_what_zarr_writes(spec: ArraySpec, rows: int) -> None:
    register()
    store = MemoryStore()
    zarr.create_array(
        store, shape=(rows, *spec.shape), shards=(rows, *spec.shape), chunks=(1, *spec.shape),
        dtype=ZARR_DTYPE[spec.dtype], serializer=BytesCodec(endian=None if spec.dtype == "uint8" else "little"),
        compressors=[Crc32cCodec()], fill_value=0, chunk_key_encoding={"name": "default", "separator": "."},
    )
    theirs = json.loads(store._store_dict["zarr.json"].to_bytes())
    assert ours_to_zarr(shard_format.array_document(spec, rows)) == theirs
    assert json.loads(shard_format.array_document(spec, rows)) == theirs  # 0 == 0.0: only that is spelled otherwise


def test_key_and_group_documents_are_what_zarr_writes() -> None:
    store = MemoryStore()
    attributes = {"latentry": {"format": "latentry/shard", "version": 1, "field": "mask"}}
    group = zarr.create_group(store, attributes=attributes)
    group.create_array(
        "key", shape=(9, 32), chunks=(9, 32), dtype="uint8", compressors=[Crc32cCodec()],
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    assert json.loads(shard_format.group_document("mask")) == json.loads(store._store_dict["zarr.json"].to_bytes())
    assert json.loads(shard_format.key_document(9)) == json.loads(store._store_dict["key/zarr.json"].to_bytes())


@given(spec=specs, rows=st.integers(1, shard_format.MAX_ROWS))
def test_documents_say_what_went_in(spec: ArraySpec, rows: int) -> None:
    assert shard_format.parse_array(shard_format.array_document(spec, rows), "a", "x") == (spec, rows)


def test_group_documents_say_their_field() -> None:
    assert shard_format.parse_group(shard_format.group_document("text"), "zarr.json") == "text"


DOCUMENT = shard_format.array_document(ArraySpec(name="a", dtype="float16", shape=(4, 2)), 3)


def changed(**changes: Any) -> bytes:
    return json.dumps({**json.loads(DOCUMENT), **changes}).encode()


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "x is not JSON"),
        (b"\xff\xfe", "x is not JSON"),
        (b"[" * 60_000, "x is not JSON"),
        (b"[]", "x is .*, expected a table"),
        (changed(data_type="int64"), "data_type of x is 'int64', expected one of"),
        (changed(data_type=None), "data_type of x is None, expected one of"),
        (changed(data_type=["uint8"]), "data_type of x is .'uint8'., expected one of"),
        (changed(shape=7), "shape of x is 7, expected a list"),
        (changed(shape=[3, 4.0, 2]), "shape of x.1. is 4.0, expected a whole number"),
        (changed(shape=[True, 4, 2]), "shape of x.0. is True, expected a whole number"),
        (changed(shape=[]), "shape of x is .., expected 1 to"),
        (changed(shape=[0, 4, 2]), "expected 1 to 16777216 rows of 0 to 7 dimensions"),
        (changed(shape=[3, -4, -2]), "expected 1 to 16777216 rows"),
        (changed(shape=[1 << 60, 4, 2]), "expected 1 to 16777216 rows"),
        (changed(shape=[3] + [1] * 50), "expected 1 to 16777216 rows of 0 to 7 dimensions"),
        (changed(shape=[3, 1 << 30, 2]), "expected rows of at most 2147479552 bytes"),
        (changed(shape=[3, 4, 3]), "is not the document that latentry writes for a float16 array of shape"),
        (changed(codecs=[]), "is not the document that latentry writes"),
        (changed(more=1), "is not the document that latentry writes"),
        (DOCUMENT + b" ", "is not the document that latentry writes"),
    ],
)
def test_array_documents_that_lie(data: bytes, message: str) -> None:
    with pytest.raises(Unparsed, match=message):
        shard_format.parse_array(data, "a", "x")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{}", "x has no latentry attributes, expected a latentry/shard group"),
        (b'{"attributes":[]}', "x has no latentry attributes"),
        (shard_format.group_document("../x"), "name in x is '../x', expected lower-case letters"),
        (shard_format.group_document("mask") + b"\n",
         "x is not the document that latentry writes for field 'mask'"),
        (shard_format.group_document("mask").replace(b'version":1', b'version":2'),
         "is not the document that latentry"),
    ],
)
def test_group_documents_that_lie(data: bytes, message: str) -> None:
    with pytest.raises(Unparsed, match=message):
        shard_format.parse_group(data, "x")


def test_the_tree_digest_is_sorted_by_path() -> None:
    listing = [{"path": path, "size": 0, "sha256": ""} for path in ("b", "a", "a/c")]
    assert listing_digest(listing) == listing_digest(listing[::-1])


def test_index_of_two_rows() -> None:
    spec = ArraySpec(name="a", dtype="uint8", shape=(6,))
    entries = np.frombuffer(shard_format.index(spec, 2)[:-4], "<u8").tolist()
    assert entries == [0, 10, 10, 10]
    assert shard_format.data_bytes(spec, 2) == 2 * 10 + 2 * 16 + 4


def test_an_index_of_many_rows_is_made_in_parts(monkeypatch):
    spec = ArraySpec(name="latent", dtype="float32", shape=(3,))
    whole = shard_format.index(spec, 10)
    monkeypatch.setattr(shard_format, "INDEX_PART", 4)
    parts = list(shard_format.index_parts(spec, 10))
    assert [len(part) for part in parts] == [64, 64, 32, 4] and b"".join(parts) == whole
    assert parts[-1] == shard_format.crc_bytes(whole[:-4])
    shorter = shard_format.index(spec, 10)[:128] + shard_format.crc_bytes(whole[:128])
    assert shard_format.index(spec, 8) == shorter
