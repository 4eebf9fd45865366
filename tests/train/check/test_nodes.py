"""What is told of nodes that read a cache in a store."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from synthetic import Scale, build

from prep.batching.plan import step_plan
from prep.formatting import format_bytes
from prep.fs.remote.bucket import Bucket
from prep.loader.index import open_index
from prep.loader.prefetch import bytes_by_node, bytes_by_part
from train.check.nodes import notes_on_nodes


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """600 samples in shards of at most 5 rows."""
    return open_index(build(tmp_path_factory.mktemp("many"), Scale(samples=600, buckets=4, per_shard=5)))


@pytest.fixture
def told(index, monkeypatch):
    """`told(shuffle, nodes, room)`: the notes on a copy of the cache with so much room."""
    def notes(shuffle, nodes, room=1 << 40, **how):
        monkeypatch.setattr("train.check.nodes.quota", lambda: room)
        plan = step_plan(index.counts, seed=1, batch_size=48, shuffle=shuffle)
        there = replace(index, cache=replace(index.cache, store=Bucket.parse("s3://bucket/cache")))
        return notes_on_nodes(SimpleNamespace(index=there, plan=plan, reads_masks=True), nodes, **how)

    return notes


@pytest.mark.parametrize("nodes", [1, 2, 8])
def test_parts_are_what_nodes_read_by_a_partitioned_shuffle(index, nodes):
    """But for the few samples of the last micro-batches, which are drawn from all."""
    plan = step_plan(index.counts, seed=1, batch_size=48, shuffle="partitioned")
    parts, read = (bytes_by_part(index, nodes, masked=True),
                   bytes_by_node(index, plan, world=8, nodes=nodes, masked=True))
    assert len(parts) == nodes
    for part, one in zip(parts, read, strict=True):
        assert 0.9 * part <= one <= 1.2 * part


def test_an_order_by_which_nodes_read_less_is_told_before_a_run_begins(index, told):
    parts, whole = bytes_by_part(index, 8, masked=True), sum(shard.bytes for shard in index.shards)
    (note,) = told("global", 8)
    assert note == (f"each of 8 nodes comes to read all shards, {format_bytes(whole)}; with --set shuffle=partitioned, "
                    f"which is another order of the samples, {format_bytes(min(parts))} to {format_bytes(max(parts))}")
    assert told("global", 8, begins=False) == told("partitioned", 8) == told("global", 1) == []


def test_room_is_compared_with_what_a_node_reads(index, told):
    most, whole = max(bytes_by_part(index, 8, masked=True)), sum(shard.bytes for shard in index.shards)
    assert told("partitioned", 8, most) == told("global", 1, whole) == []
    (note,) = told("partitioned", 8, most - 1)
    assert note.startswith(f"a node reads {format_bytes(most)}, but copies of shards may take ")
    assert "they are downloaded again and again; LATENTRY_REMOTE_DIR=DIR names" in note
    (note,) = told("global", 1, whole - 1)
    assert note.startswith(f"the shards have {format_bytes(whole)}, but copies of shards may take ")
    assert len(told("global", 8, most)) == 2
