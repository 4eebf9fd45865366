"""zarr-python and tensorstore as referees: every row that we write, they read, bit for bit; and the other way round."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorstore
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.codecs import BytesCodec, Crc32cCodec
from zarr.core.dtype.common import DataTypeValidationError

from prep.arrays import ITEM_BYTES, ArraySpec
from prep.cache import zarr_view as shard
from prep.cache.reader import Reader
from prep.cache.store import Cache, open_cache
from prep.cache.zarr_view import BFloat16, open_shard
from prep.fs.tree import tree_digest

EVERY = [ArraySpec(name=f"in_{dtype}", dtype=dtype, shape=(2, 3)) for dtype in sorted(ITEM_BYTES)]


def through_zarr(cache: Cache, digest: str, name: str) -> np.ndarray:
    return np.asarray(open_shard(cache, digest)[name][:])


def through_tensorstore(cache: Cache, digest: str, name: str) -> np.ndarray:
    path = f"{cache.shard(digest)}/{name}/"
    spec = {"driver": "zarr3", "kvstore": {"driver": "file", "path": path}, "fill_missing_data_reads": False}
    return np.asarray(tensorstore.open(spec, open=True, read=True).result().read().result())


def through_us(cache: Cache, digest: str, name: str) -> np.ndarray:
    reader = Reader(cache)
    spec, rows = reader.array_info(digest, name)
    out = np.empty((rows, spec.row_bytes), np.uint8)
    for row in range(rows):
        reader.read_into(out[row], digest, name, row)
    return out


READERS = [through_zarr, through_tensorstore, through_us]
Read = Callable[[Cache, str, str], np.ndarray]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("zero", [False, True])
def test_every_dtype_is_read_back(cache: Cache, draw: Any, put: Any, read: Read, zero: bool) -> None:
    """All-zero rows too: Zarr libraries drop those chunks when they write, we do not."""
    rows = draw(EVERY, 5)
    for values in rows.values():
        for value in values.values():
            value *= not zero
    made = put(cache, "text", EVERY, rows)
    for spec in EVERY:
        wanted = b"".join(values[spec.name].tobytes() for values in rows.values())
        assert read(cache, made.digest, spec.name).tobytes() == wanted
    assert through_zarr(cache, made.digest, "key").tobytes() == bytes.fromhex("".join(rows))
    assert through_tensorstore(cache, made.digest, "key").tobytes() == bytes.fromhex("".join(rows))


@settings(max_examples=25, deadline=None)
@given(
    dtypes=st.lists(st.sampled_from(sorted(ITEM_BYTES)), min_size=1, max_size=3),
    shape=st.lists(st.integers(1, 5), max_size=4), rows=st.integers(1, 9), seed=st.integers(0, 99),
)
def test_any_shape_is_read_back(draw: Any, put: Any, dtypes: Any, shape: Any, rows: int, seed: int) -> None:
    specs = [ArraySpec(name=f"a{place}", dtype=dtype, shape=tuple(shape)) for place, dtype in enumerate(dtypes)]
    drawn = draw(specs, rows, seed)
    with tempfile.TemporaryDirectory() as scratch:
        cache = open_cache(Path(scratch) / "cache", create=True)
        made = put(cache, "text", specs, drawn)
        assert tree_digest(cache.shard(made.digest)) == made.digest
        for spec in specs:
            wanted = b"".join(values[spec.name].tobytes() for values in drawn.values())
            for read in READERS:
                assert read(cache, made.digest, spec.name).tobytes() == wanted


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("place", [5, 47, 49, -3, -40])
def test_every_reader_notices_a_flipped_bit(
    cache: Cache, shard: Any, edit: Callable[..., None], read: Read, place: int
) -> None:
    """In a row, in its checksum, in the index and the index's checksum."""
    edit(cache.shard(shard.digest) / "latent" / "c.0.0.0.0", lambda data: data.__setitem__(place, data[place] ^ 16))
    with pytest.raises(Exception, match=r"(?i)checksum|crc|digest|index"):
        read(cache, shard.digest, "latent")


def test_what_zarr_writes_as_bfloat16_has_our_bytes(cache: Cache, draw: Any, put: Any, tmp_path: Path) -> None:
    spec = ArraySpec(name="a", dtype="bfloat16", shape=(2, 3))
    rows = draw([spec], 4)
    made = put(cache, "latent", [spec], rows)
    shard.register()
    array = zarr.create_array(
        str(tmp_path / "theirs"), shape=(4, 2, 3), shards=(4, 2, 3), chunks=(1, 2, 3), dtype=BFloat16(), fill_value=0,
        serializer=BytesCodec(endian="little"), compressors=[Crc32cCodec()], config={"write_empty_chunks": True},
        chunk_key_encoding={"name": "default", "separator": "."},
    )
    array[:] = np.stack([values["a"] for values in rows.values()]).view(BFloat16().to_native_dtype())
    theirs = (tmp_path / "theirs" / "c.0.0.0").read_bytes()
    assert theirs == (cache.shard(made.digest) / "a" / "c.0.0.0").read_bytes()


def test_bfloat16_reads_as_numbers_where_ml_dtypes_is_installed(cache: Cache, put: Any) -> None:
    spec = ArraySpec(name="a", dtype="bfloat16", shape=(2,))
    made = put(cache, "latent", [spec], {"ab" * 32: {"a": np.array([0x3F80, 0xC000], np.uint16)}})
    row = open_shard(cache, made.digest)["a"][0]
    assert row.dtype.name == "bfloat16"
    assert row.astype(np.float32).tolist() == [1.0, -2.0]


def test_bfloat16_reads_as_bits_elsewhere(cache: Cache, put: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "native_bfloat16", lambda: None)
    spec = ArraySpec(name="a", dtype="bfloat16", shape=(2,))
    made = put(cache, "latent", [spec], {"ab" * 32: {"a": np.array([0x3F80, 0xC000], np.uint16)}})
    row = open_shard(cache, made.digest)["a"][0]
    assert (row.dtype.name, row.tolist()) == ("uint16", [0x3F80, 0xC000])


@pytest.mark.parametrize("native", [True, False])
def test_fill_values_of_bfloat16(monkeypatch: pytest.MonkeyPatch, native: bool) -> None:
    if not native:
        monkeypatch.setattr(shard, "native_bfloat16", lambda: None)
    kind = BFloat16()
    for spelled in (0.0, -1.5, 256.0, "NaN", "Infinity", "-Infinity"):
        assert kind.to_json_scalar(kind.from_json_scalar(spelled, zarr_format=3), zarr_format=3) == spelled
    assert kind.to_json_scalar(kind.default_scalar(), zarr_format=3) == 0.0
    assert kind.item_size == 2


def test_bfloat16_is_nothing_else() -> None:
    """uint16 stays uint16 for everybody who uses zarr in the same process."""
    shard.register()
    assert zarr.create_array({}, shape=(3,), dtype="uint16").metadata.to_dict()["data_type"] == "uint16"
    with pytest.raises(DataTypeValidationError, match="data type is uint16, expected bfloat16"):
        BFloat16.from_native_dtype(np.dtype("uint16"))
    with pytest.raises(DataTypeValidationError, match="data type is 'float16', expected 'bfloat16'"):
        BFloat16.from_json("float16", zarr_format=3)
    with pytest.raises(DataTypeValidationError, match="Zarr v2 has no bfloat16"):
        BFloat16.from_json({"name": "bfloat16", "object_codec_id": None}, zarr_format=2)
    with pytest.raises(DataTypeValidationError, match="Zarr v2 has no bfloat16"):
        BFloat16().to_json(zarr_format=2)


def test_the_group_says_its_field(cache: Cache, shard: Any) -> None:
    group = open_shard(cache, shard.digest)
    assert group.attrs.asdict() == {"latentry": {"format": "latentry/shard", "version": 1, "field": "latent"}}
    assert sorted(group.array_keys()) == ["key", "latent"]
