"""Large data sets in little time: real tables, a real manifest, and shards of tiny rows by the real writer.

Sample i is in bucket i mod B and has a caption of its own; every fourth of a bucket has a mask. Bucket b has
(8 (b + 1), 8) pixels, so its latents are [4, 1, b + 1]; text rows are [2, 4]. Nothing in it depends on anything but the
numbers asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa

from prep.arrays import ArraySpec
from prep.cache.ledger.ledger import write_commit
from prep.cache.publish import publish_table
from prep.cache.records import RowRef, Shard, Task
from prep.cache.store import Cache, open_cache
from prep.cache.writer import ShardWriter
from prep.digest import canonical, digest_json
from prep.fs import atomic
from prep.geometry import Placement
from prep.keys import text_key, unconditional_key
from prep.manifest.document import FORMAT, VERSION, Manifest, write_manifest
from prep.manifest.samples import Sample, Text, View, build_samples
from prep.manifest.tables import BATCH_ROWS, build_findings, build_shards, write_table

CONTEXT = {"meaning": 1, "text": "synthetic", "max_length": 2, "layout": "full"}
FIELDS = {"latent": ("latent", ("c", "h", "w")), "mask": ("mask", ("1", "h", "w")),
          "text": ("hidden", ("token", "channel"))}
WITH_MASK = 4  # one in so many


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large."""

    samples: int
    buckets: int = 40
    per_shard: int = 250
    batch_rows: int = BATCH_ROWS  # of the sample table; fewer make a small table one of many batches, as large ones are

    def size(self, bucket: int) -> tuple[int, int]:
        """Width and height of a bucket."""
        return 8 * (bucket + 1), 8

    def masked(self, number: int) -> bool:
        """Whether a sample has a mask."""
        return number // self.buckets % WITH_MASK == 0


def build(root: Path, scale: Scale) -> Manifest:
    """The manifest root/m.json and its cache. Nothing is synced: a power cut would cost a minute."""
    root.mkdir(parents=True, exist_ok=True)
    cache = open_cache(root / "cache", create=True)
    refs: dict[str, RowRef] = {}
    facts: list[dict[str, Any]] = []
    with mock.patch.object(atomic, "sync", lambda handle: handle.flush()), mock.patch.object(atomic, "sync_dir"):
        for field, spec, keys in groups(scale):
            for start in range(0, len(keys), scale.per_shard):
                put(cache, field, spec, keys[start:start + scale.per_shard], refs, facts)
        return seal(root, cache, scale, refs, facts)


def groups(scale: Scale) -> Iterator[tuple[str, ArraySpec, list[str]]]:
    """(field, a row's array, sorted keys) of rows that have one shape."""
    for bucket in range(scale.buckets):
        members = range(bucket, scale.samples, scale.buckets)
        latent = ArraySpec(name="latent", dtype="bfloat16", shape=(4, 1, bucket + 1))
        mask = ArraySpec(name="mask", dtype="uint8", shape=(1, 1, bucket + 1))
        yield "latent", latent, sorted(key_of("latent", number) for number in members)
        yield "mask", mask, sorted(key_of("mask", number) for number in members if scale.masked(number))
    hidden = ArraySpec(name="hidden", dtype="bfloat16", shape=(2, 4))
    texts = {text_key(caption(number), CONTEXT) for number in range(scale.samples)}
    yield "text", hidden, sorted(texts | {unconditional_key(CONTEXT)})


def key_of(what: str, number: int) -> str:
    return hashlib.sha256(f"{what} {number}".encode()).hexdigest()


def caption(number: int) -> str:
    return f"synthetic picture number {number}"


def value_of(key: str, spec: ArraySpec) -> bytes:
    """A row's bytes: its key, over and over, without a bit that every NaN has."""
    part = bytes(byte & 0xBF for byte in bytes.fromhex(key))
    return (part * (spec.row_bytes // 32 + 1))[:spec.row_bytes]


def put(cache: Cache, field: str, spec: ArraySpec, keys: list[str], refs: dict[str, RowRef],
        facts: list[dict[str, Any]]) -> None:
    """One shard and its commit."""
    with ShardWriter(cache, field, [spec]) as writer:
        for key in keys:
            writer.add(key, {spec.name: value_of(key, spec)})
        shard: Shard = writer.finish()
    write_commit(cache, Task(key=digest_json({"rows": keys}), field=field, rows=tuple(keys)), shard, [], {})
    refs.update({key: RowRef(shard=shard.digest, row=row) for row, key in enumerate(keys)})
    facts.append({"digest": shard.digest, "field": field, "rows": shard.rows, "bytes": shard.bytes,
                  "shapes": canonical({spec.name: list(spec.shape)}).decode(),
                  "dtypes": canonical({spec.name: spec.dtype}).decode()})


def samples(scale: Scale) -> Iterator[Sample]:
    """Every sample; they share what they can."""
    places = [Placement(scaled=scale.size(bucket), crop=(0, 0), bucket=scale.size(bucket))
              for bucket in range(scale.buckets)]
    for number in range(scale.samples):
        place = places[number % scale.buckets]
        mask = key_of("mask", number) if scale.masked(number) else None
        yield Sample(
            id=key_of("sample", number), name=f"{number // 1000:04}/{number:08}.png", source=0, role="train",
            picture=key_of("picture", number), size=place.bucket, bucket=place.bucket,
            views=(View(placement=place, latent=key_of("latent", number), mask=mask),),
            texts=(Text(caption=caption(number), weight=1.0, key=text_key(caption(number), CONTEXT)),))


def seal(root: Path, cache: Cache, scale: Scale, refs: Mapping[str, RowRef], facts: list[dict[str, Any]]) -> Manifest:
    """Tables and document."""
    shards = build_shards(facts)
    numbers = {digest.as_py().hex(): number for number, digest in enumerate(shards["digest"])}
    buckets = [scale.size(bucket) for bucket in range(scale.buckets)]
    table = build_samples(samples(scale), [(size, ()) for size in buckets], refs, numbers, {})
    unconditional = refs[unconditional_key(CONTEXT)]
    return write_manifest(root / "m.json", {
        "format": FORMAT, "version": VERSION, "cache": "cache", "family": "sd15",
        "model": {"path": "model"}, "prediction": "epsilon", "models": {"vae": "ab" * 32, "text": "cd" * 32},
        "latents": {"channels": 4, "factor": 8, "scaling_factor": "0.18215", "shift_factor": "0"},
        "fields": {field: of_field(field, facts) for field in FIELDS}, "sources": ["photos"], "recipe": None,
        "options": [], "rejected": 0, "samples": {"train": scale.samples, "validation": 0, "prior": 0},
        "buckets": [{"size": list(size), "train": len(range(bucket, scale.samples, scale.buckets)), "validation": 0,
                     "prior": 0} for bucket, size in enumerate(buckets)],
        "prompts": {"file": None, "digest": None, "samples": [],
                    "unconditional": {"shard": numbers[unconditional.shard], "row": unconditional.row}},
        "tables": {"samples": put_table(cache, table, scale.batch_rows), "shards": write_table(cache, shards),
                   "findings": write_table(cache, build_findings([]))},
    })


def put_table(cache: Cache, table: pa.Table, batch_rows: int) -> str:
    """What `write_table` does, but for the size of batches."""
    if batch_rows == BATCH_ROWS:
        return write_table(cache, table)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=batch_rows)
    return publish_table(cache, lambda: [sink.getvalue()])


def of_field(field: str, facts: list[dict[str, Any]]) -> dict[str, Any]:
    mine = [one for one in facts if one["field"] == field]
    array, dims = FIELDS[field]
    return {"context": CONTEXT if field == "text" else {}, "rows": sum(one["rows"] for one in mine),
            "arrays": {array: {"dtype": "uint8" if field == "mask" else "bfloat16", "dims": list(dims)}},
            "shards": len(mine), "bytes": sum(one["bytes"] for one in mine)}
