"""What each node reads is what its ranks' requests name, and needs no more than the plan."""

from __future__ import annotations

import pytest

from prep.loader import draws
from prep.loader.prefetch import bytes_by_node
from prep.loader.rows import Rows


@pytest.mark.parametrize(("world", "nodes"), [(1, 1), (2, 2), (4, 2), (6, 3), (12, 4)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shuffle", ["global", "partitioned"])
def test_it_is_what_the_requests_of_its_ranks_name(make, setup_of, world, nodes, masked, shuffle):
    """With one view and one text, exactly."""
    setup = setup_of(make(counts=(7, 5)), batch_size=4, micro_batch=2, underfill="partial", shuffle=shuffle)
    index, plan, sizes = setup.index, setup.plan, {shard.digest: shard.bytes for shard in setup.index.shards}
    unconditional = index.manifest.document["prompts"]["unconditional"]["shard"]
    wanted = []
    for node in range(nodes):
        shards = {index.shards[unconditional].digest}
        for rank in range(node * world // nodes, (node + 1) * world // nodes):
            share = draws.RankShare(rank=rank, world=world)
            for request in draws.training(index, plan, 0, plan.steps_per_epoch, timesteps=10, share=share):
                shards |= Rows(index).shards_of(request, masked)
        wanted.append(sum(map(sizes.get, shards)))
    assert bytes_by_node(index, plan, world=world, nodes=nodes, masked=masked) == wanted


def test_all_views_and_texts_count(make, setup_of):
    setup = setup_of(make(views=3, texts=2), batch_size=2)
    (every,) = bytes_by_node(setup.index, setup.plan, world=1, nodes=1, masked=True)
    assert every <= sum(shard.bytes for shard in setup.index.shards)


@pytest.mark.slow
def test_the_command_tells(train, make, tiny_model):
    path = make().path
    told = train("check", path, "--world-size", 4, "--nodes", 2)
    assert told.code == 0 and "\n2 nodes of 2 ranks: each reads " in told.out
    assert told.out.rstrip().endswith(" KiB in an epoch")
    document = train("check", path, "--world-size", 4, "--nodes", 2, "--json").json
    assert (document["nodes"]["nodes"], document["nodes"]["ranks"], len(document["nodes"]["bytes"])) == (2, 4, 2)
    assert "nodes" not in train("check", path, "--json").json
    told = train("check", path, "--world-size", 5, "--nodes", 2)
    assert told.code == 2 and "--world-size is 5, expected a multiple of --nodes, which is 2" in told.err
    told = train("check", path, "--nodes", 2)
    assert told.code == 2 and "--nodes is 2, but --world-size is not given" in told.err
