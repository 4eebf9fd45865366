"""A partitioned shuffle: what `prep encode` puts side by side is read by one node, and trained as by any number."""

from __future__ import annotations

import numpy as np
import pytest
from pictures import draw

from prep.batching.plan import step_plan
from prep.loader.index import open_index
from prep.loader.prefetch import bytes_by_node
from prep.manifest.document import read_manifest

PICTURES, ROWS = 48, 3


@pytest.fixture
def encoded(prep, tiny_model, tmp_path, monkeypatch):
    """48 pictures of one shape in shards of three rows, each with a caption of its own."""
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", ROWS)
    for number in range(PICTURES):
        picture = draw(tmp_path / "photos" / f"{number}.png", (48, 48), seed=number)
        picture.with_suffix(".txt").write_text(f"no {number}")
    result = prep("encode", tmp_path / "photos", "--model", tiny_model, "--cache", tmp_path / "cache", "-o",
                  tmp_path / "m.json", "--resolution", 48, "--step", 16, "--dtype", "float32", "--device", "cpu")
    assert result.code == 0, result.err
    return tmp_path / "m.json"


def test_neighbors_share_shards_and_so_nodes_need_a_part(encoded):
    index = open_index(read_manifest(encoded))
    (members,) = index.training
    samples = index.samples
    for column in (samples.views["latent_shard"][samples.view_offsets[members]],
                   samples.texts["shard"][samples.text_offsets[members]]):
        changes = int((np.diff(column) != 0).sum())
        assert changes == len(np.unique(column)) - 1, "each shard's samples follow one another"
    total = sum(shard.bytes for shard in index.shards)
    for nodes in (2, 4):
        read = {shuffle: bytes_by_node(
            index, step_plan(index.counts, seed=3, batch_size=16, micro_batch=8, shuffle=shuffle),
            world=8, nodes=nodes, masked=False) for shuffle in ("global", "partitioned")}
        assert min(read["global"]) > 0.45 * total
        assert max(read["partitioned"]) < 1.25 * total / nodes


def test_a_run_continues_and_its_shuffle_stays(train, encoded, tmp_path):
    common = ("--batch-size", 4, "--device", "cpu", "--precision", "fp32", "--set", "sample.every=0",
              "--set", "checkpoint.every=2")
    parts = ("--set", "shuffle=partitioned")
    assert train("run", encoded, *common, *parts, "--steps", 4, "-o", tmp_path / "whole").code == 0
    assert train("run", encoded, *common, *parts, "--steps", 2, "-o", tmp_path / "run").code == 0
    refused = train("run", encoded, *common, "--set", "shuffle=global", "--steps", 4, "-o", tmp_path / "run",
                    "--resume")
    assert refused.code != 0 and "shuffle" in refused.err
    assert train("run", encoded, "--steps", 4, "-o", tmp_path / "run", "--resume").code == 0
    whole, resumed = ((tmp_path / name / "lora.safetensors").read_bytes() for name in ("whole", "run"))
    weights = [data[8 + int.from_bytes(data[:8], "little"):] for data in (whole, resumed)]
    assert weights[0] == weights[1]
