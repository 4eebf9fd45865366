"""What nodes download, against the shards that the real draws of each node's ranks read."""

from __future__ import annotations

import pytest
from synthetic import Scale, build

from prep.batching.plan import step_plan
from prep.loader import draws
from prep.loader.index import open_index
from prep.loader.rows import Rows
from train.cluster_forecast import outlook_of


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    """600 samples in shards of at most 5 rows."""
    return open_index(build(tmp_path_factory.mktemp("many"), Scale(samples=600, buckets=4, per_shard=5)))


def read_by(index, plan, ranks, world, steps=None):
    """The bytes of all shards that these ranks read in the first epoch, or its first steps."""
    rows, seen = Rows(index), set()
    for rank in ranks:
        for request in draws.training(index, plan, 0, steps or plan.steps_per_epoch, timesteps=10,
                                      share=draws.RankShare(rank=rank, world=world)):
            places = rows.places(request.draws, masked=True)
            refs = tuple(places.read)
            seen |= {ref.shard for ref in refs if ref is not None}
    return sum(facts.bytes for facts in index.shards if facts.digest in seen)


@pytest.mark.parametrize("shuffle", ["global", "partitioned"])
@pytest.mark.parametrize(("world", "nodes"), [(8, 1), (8, 2), (8, 8), (24, 12)])
def test_a_first_epoch_downloads_what_the_report_expects(index, world, nodes, shuffle):
    plan = step_plan(index.counts, seed=1, batch_size=48, shuffle=shuffle)
    told = outlook_of(index, plan, world=world, nodes=nodes, masked=True)
    each = world // nodes
    found = [read_by(index, plan, range(node * each, (node + 1) * each), world) for node in range(nodes)]
    assert told.first == pytest.approx(sum(found) / nodes, rel=0.03)
    assert told.bytes == sum(facts.bytes for facts in index.shards) == read_by(index, plan, range(1), 1)
    assert told.later == 0 and told.shards == len(index.shards) and told.steps == plan.steps_per_epoch
    assert (nodes == 1) == (told.first == told.bytes)


@pytest.mark.parametrize("shuffle", ["global", "partitioned"])
@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (8, 2), (8, 8), (24, 12)])
def test_a_first_step_needs_the_shards_of_its_samples(index, world, nodes, shuffle):
    plan = step_plan(index.counts, seed=1, batch_size=48, micro_batch=16, shuffle=shuffle)
    each = world // nodes
    found = [read_by(index, plan, range(node * each, (node + 1) * each), world, 1) for node in range(nodes)]
    told = outlook_of(index, plan, world=world, nodes=nodes, masked=True)
    assert told.begin == pytest.approx(max(found), rel=0.1)  # which of its captions a sample shows is drawn
    larger = outlook_of(index, plan, world=world, nodes=nodes, masked=True, samples=10**9)
    rows = sum(len(part.occurrences) for part in plan.at(0)) / nodes
    assert told.begin * 0.95 < larger.begin  # as good as no two rows of the step are in one shard
    assert larger.begin < 2 * rows * 3 * max(facts.bytes for facts in index.shards)


def test_without_room_for_all_shards_come_again(index):
    plan = step_plan(index.counts, seed=1, batch_size=48)
    whole = outlook_of(index, plan, world=1, nodes=1, masked=True)
    half = outlook_of(index, plan, world=1, nodes=1, masked=True, room=whole.bytes // 2)
    assert half.first == half.later > whole.bytes  # about 5 rows a shard, half of which are there
    assert outlook_of(index, plan, world=1, nodes=1, masked=True, room=whole.bytes).later == 0


def test_a_larger_data_set_is_planned_by_its_counts(index):
    plan = step_plan(index.counts, seed=1, batch_size=48)
    told = outlook_of(index, plan, world=64, nodes=8, samples=10**9, masked=True)
    assert told.samples == 10**9 and told.steps == pytest.approx(10**9 / 48, rel=1e-6)
    assert told.idle == 16 and told.planning > 0
    here = outlook_of(index, plan, world=1, nodes=1, masked=True).memory
    assert told.memory == pytest.approx(8 * 10**9 / 600 * here, rel=1e-6)
