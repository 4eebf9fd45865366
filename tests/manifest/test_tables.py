"""Tables: same rows, same bytes; read back whole or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prep.batching.split import ROLES
from prep.cache.records import RowRef
from prep.cache.store import Cache
from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.findings import Finding
from prep.geometry import Placement, Size
from prep.manifest import tables
from prep.manifest.samples import (
    Reference,
    Sample,
    Samples,
    Text,
    View,
    build_samples,
    in_table_order,
    open_samples,
)

SHARD = digest_bytes(b"latents")
TEXTS = digest_bytes(b"texts")
BUCKETS = [(64, 64), (96, 64)]
REFERENCES = ((32, 32), (64, 32))
SHAPES = [((64, 64), ()), ((96, 64), ()), ((64, 64), REFERENCES)]
KEYS = [digest_bytes(bytes([number])) for number in range(6)]
REFS = {key: RowRef(shard=SHARD if row < 4 else TEXTS, row=row) for row, key in enumerate(KEYS)}
SHARDS = {SHARD: 0, TEXTS: 1}


def sample(number: int, **changes: Any) -> Sample:
    plain = View(placement=Placement(scaled=(100, 64), crop=(2, 0), bucket=BUCKETS[1]), latent=KEYS[0], mask=None)
    values: dict[str, Any] = {
        "id": digest_bytes(b"sample %d" % number), "name": f"bilder/größe {number}.png", "source": 0, "role": "train",
        "picture": KEYS[5], "size": (200, 128), "bucket": BUCKETS[1], "views": (plain,),
        "texts": (Text(caption="a cat", weight=1.0, key=KEYS[4]),),
    }
    return Sample(**{**values, **changes})


def flipped() -> Sample:
    views = tuple(
        View(placement=Placement(scaled=(70, 64), crop=(3, 1), bucket=BUCKETS[0], flip=flip), latent=KEYS[1 + flip],
             mask=KEYS[3])
        for flip in (False, True)
    )
    texts = tuple(Text(caption=caption, weight=weight, key=KEYS[4 + place])
                  for place, (caption, weight) in enumerate([("", 0.25), ("çedilla 猫", 0.75)]))
    return sample(1, bucket=BUCKETS[0], views=views, texts=texts, role="prior", repeats=3, weight=0.5)


def build(*samples: Sample) -> pa.Table:
    return build_samples(samples, SHAPES[:2], REFS, SHARDS, {flipped().id: 0.25})


def test_samples_as_columns() -> None:
    columns = open_samples(build(flipped(), sample(0)))
    order = sorted([flipped(), sample(0)], key=lambda one: one.id)
    assert len(columns) == 2
    first, second = order.index(flipped()), order.index(sample(0))
    assert [bytes(row).hex() for row in columns.ids] == [one.id for one in order]
    assert ROLES[columns.role[first]] == "prior"
    assert (columns.repeats[first], columns.weight[first], columns.coverage[first]) == (3, 0.5, 0.25)
    assert np.isnan(columns.coverage[second])
    assert columns.bucket[[first, second]].tolist() == [0, 1]
    assert columns.name(second) == "bilder/größe 0.png"
    assert columns.captions(first) == ["", "çedilla 猫"]
    at = slice(*columns.view_offsets[first : first + 2])
    assert {name: column[at].tolist() for name, column in columns.views.items()} == {
        "scaled_width": [70, 70], "scaled_height": [64, 64], "crop_x": [3, 3], "crop_y": [1, 1], "flip": [False, True],
        "latent_shard": [0, 0], "latent_row": [1, 2], "mask_shard": [0, 0], "mask_row": [3, 3],
    }
    at = slice(*columns.view_offsets[second : second + 2])
    assert columns.views["mask_shard"][at].tolist() == [-1]
    assert columns.views["mask_row"][at].tolist() == [-1]
    at = slice(*columns.text_offsets[first : first + 2])
    assert {name: column[at].tolist() for name, column in columns.texts.items()} == {
        "weight": [0.25, 0.75], "shard": [1, 1], "row": [4, 5],
    }


def test_columns_across_record_batches(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("prep.manifest.samples.BLOCK", 3)
    monkeypatch.setattr(tables, "BATCH_ROWS", 3)
    made = build(*(sample(number, repeats=number + 1) for number in range(8)))
    read = tables.read_table(cache, tables.write_table(cache, made), tables.SAMPLES)
    assert read["id"].num_chunks > 1
    columns = open_samples(read)
    wanted = sorted((sample(number).id, number + 1) for number in range(8))
    assert list(zip([bytes(row).hex() for row in columns.ids], columns.repeats.tolist(), strict=True)) == wanted
    assert columns.view_offsets.tolist() == list(range(9))
    assert columns.views["crop_x"].tolist() == [2] * 8


def test_no_samples() -> None:
    columns = open_samples(build())
    assert len(columns) == 0
    assert columns.ids.shape == (0, 32)
    assert columns.view_offsets.tolist() == [0]


def test_the_same_samples_make_the_same_bytes_in_any_order(cache: Cache) -> None:
    made = [sample(number) for number in range(2, 52)] + [flipped()]
    digests = {tables.write_table(cache, build(*part)) for part in (made, made[::-1], made[20:] + made[:20])}
    assert len(digests) == 1
    (digest,) = digests
    assert tables.read_table(cache, digest, tables.SAMPLES).equals(build(*made))
    assert digest_bytes(cache.table(digest).read_bytes()) == digest


def plainly(samples: list[Sample], coverage: dict[str, float], schema: pa.Schema) -> pa.Table:
    """The table as Arrow makes it of one dict a sample: slow, and what `build_samples` must not differ from."""

    def place(key: str | None) -> tuple[int, int]:
        return (-1, -1) if key is None else (SHARDS[REFS[key].shard], REFS[key].row)

    rows = []
    for one in sorted(samples, key=lambda one: (one.id, one.name)):
        views = [(*view.placement.scaled, *view.placement.crop, view.placement.flip, *place(view.latent),
                  *place(view.mask)) for view in one.views]
        texts = [(text.caption, text.weight, *place(text.key)) for text in one.texts]
        rows.append({
            "id": bytes.fromhex(one.id), "name": one.name, "source": one.source, "role": one.role,
            "picture": bytes.fromhex(one.picture), "width": one.size[0], "height": one.size[1],
            "bucket": SHAPES.index(one.shape), "repeats": one.repeats, "weight": one.weight,
            "coverage": coverage.get(one.id), "views": [dict(zip(tables.VIEW, view, strict=True)) for view in views],
            "texts": [dict(zip(tables.TEXT, text, strict=True)) for text in texts],
            "references": [dict(zip(tables.REFERENCE, (
                each.name, bytes.fromhex(each.picture), *each.size, *each.placement.scaled, *each.placement.crop,
                each.placement.flip, *place(each.latent)), strict=True))
                for view in one.views for each in view.references],
            **dict(zip(tables.EMBEDDING, place(one.embedding), strict=True)),
        })
    return pa.Table.from_pylist(rows, schema=schema)


sides, parts = st.integers(0, 2**31 - 1), st.floats(0, 1)
digests, keys = st.binary(min_size=32, max_size=32).map(bytes.hex), st.sampled_from(KEYS)
pairs, words = st.tuples(sides, sides), st.text(st.characters(exclude_categories=["Cs"]))
placings = st.builds(Placement, scaled=pairs, crop=pairs, bucket=pairs, flip=st.booleans())


def views_with(sizes: tuple[Size, ...]) -> st.SearchStrategy[tuple[View, ...]]:
    """Views with references of these sizes."""
    references = st.tuples(*(st.builds(
        Reference, name=words, picture=digests, size=pairs, latent=keys,
        placement=st.builds(Placement, scaled=pairs, crop=pairs, bucket=st.just(size), flip=st.booleans()))
        for size in sizes))
    return st.lists(st.builds(View, placement=placings, latent=keys, mask=st.none() | keys, references=references),
                    min_size=bool(sizes), max_size=3).map(tuple)


made_samples = st.sampled_from(SHAPES).flatmap(lambda shape: st.builds(
    Sample, id=digests, name=words, source=sides, role=st.sampled_from(ROLES), picture=digests, size=pairs,
    bucket=st.just(shape[0]), repeats=sides, weight=parts, views=views_with(shape[1]), embedding=st.none() | keys,
    texts=st.lists(st.builds(Text, caption=words, weight=parts, key=keys), max_size=3).map(tuple)))


@given(st.lists(made_samples, max_size=9), st.data())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_columns_make_the_bytes_that_rows_make(cache: Cache, samples: list[Sample], data: st.DataObject) -> None:
    """Without references in any bucket as before there were any, else with a column of them; and so of embeddings."""
    coverage = {one.id: data.draw(parts) for one in samples if data.draw(st.booleans())}
    plain, embedded = [one for one in samples if not one.shape[1]], data.draw(st.booleans())
    with mock.patch.object(tables, "BATCH_ROWS", 4), mock.patch("prep.manifest.samples.BLOCK", 3):
        for some, shapes, schema in ((samples, SHAPES, tables.SAMPLES_WITH_REFERENCES),
                                     (plain, SHAPES[:2], tables.SAMPLES)):
            quick = tables.write_table(cache, build_samples(some, shapes, REFS, SHARDS, coverage, embedded=embedded))
            assert tables.samples_schema(shapes) == schema
            whole = tables.samples_schema(shapes, embedded=embedded)
            assert quick == tables.write_table(cache, plainly(some, coverage, whole))
            compact = Samples(some)
            assert list(compact) == some and len(compact) == len(some)
            assert list(in_table_order(compact)) == list(in_table_order(some))
            again = build_samples(compact, shapes, REFS, SHARDS, coverage, embedded=embedded)
            assert quick == tables.write_table(cache, again)


@pytest.mark.parametrize("rows", [0, 1, 4, 9])
def test_a_file_written_in_parts_is_the_one_that_arrow_writes_at_once(cache: Cache, monkeypatch: pytest.MonkeyPatch,
                                                                     rows: int) -> None:
    monkeypatch.setattr(tables, "BATCH_ROWS", 4)
    whole, sink = build(*(sample(number) for number in range(rows))), pa.BufferOutputStream()
    with pa.ipc.new_file(sink, whole.schema) as writer:
        writer.write_table(whole.combine_chunks(), max_chunksize=4)
    assert cache.table(tables.write_table(cache, whole)).read_bytes() == sink.getvalue().to_pybytes()


def test_the_cut_of_a_table_in_memory_does_not_matter(cache: Cache) -> None:
    whole = build(*(sample(number) for number in range(9)))
    parts = pa.concat_tables([whole.slice(0, 2), whole.slice(2, 5), whole.slice(7)])
    assert tables.write_table(cache, parts) == tables.write_table(cache, whole)


def test_a_key_without_a_place_is_our_mistake() -> None:
    with pytest.raises(KeyError):
        build_samples([sample(0)], SHAPES, {}, SHARDS, {})


def test_shards_and_findings_are_sorted(cache: Cache) -> None:
    rows = [
        {"digest": digest, "field": field, "rows": 1, "bytes": 2, "shapes": '{"latent":[4,8,8]}',
         "dtypes": '{"latent":"bfloat16"}'}
        for field, digest in (("text", SHARD), ("latent", "ff" * 32), ("latent", "0a" * 32))
    ]
    read = tables.read_table(cache, tables.write_table(cache, tables.build_shards(rows)), tables.SHARDS)
    assert [(row["field"], row["digest"].hex()) for row in read.to_pylist()] == [
        ("latent", "0a" * 32), ("latent", "ff" * 32), ("text", SHARD),
    ]
    findings = [Finding(path=path, code="x", severity="info", detail="y") for path in ("b", "a")]
    read = tables.read_table(cache, tables.write_table(cache, tables.build_findings(findings)), tables.FINDINGS)
    assert read["path"].to_pylist() == ["a", "b"]


def test_a_missing_table(cache: Cache) -> None:
    with pytest.raises(CacheError, match=f"table {SHARD} is missing") as caught:
        tables.read_table(cache, SHARD, tables.SHARDS)
    assert "prep encode" in caught.value.hint


@pytest.mark.parametrize("place", [0, 300, -20])
def test_a_damaged_table(cache: Cache, edit: Callable[..., None], place: int) -> None:
    digest = tables.write_table(cache, build(sample(0)))
    edit(cache.table(digest), lambda data: data.__setitem__(place, data[place] ^ 1))
    with pytest.raises(CacheError, match=f"table {digest} is damaged: its bytes do not match its name"):
        tables.read_table(cache, digest, tables.SAMPLES)


def test_a_torn_table_that_is_not_checked(cache: Cache, edit: Callable[..., None]) -> None:
    digest = tables.write_table(cache, build(sample(0)))
    edit(cache.table(digest), lambda data: data[:100])
    with pytest.raises(CacheError, match=f"table {digest} cannot be read"):
        tables.read_table(cache, digest, tables.SAMPLES, check=False)


def test_another_table(cache: Cache) -> None:
    digest = tables.write_table(cache, tables.build_findings([]))
    with pytest.raises(CacheError, match=r"has columns .'path', 'code', 'severity', 'detail'., expected .'digest'"):
        tables.read_table(cache, digest, tables.SHARDS)
