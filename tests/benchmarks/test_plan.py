"""Plans for pictures that are not there: what is assumed has the shards, bytes and tables of real pictures like it."""

from __future__ import annotations

import math
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import bench_plan
import pytest
import simulate
from assumed import PUBLISHED, PublishedConfigs, assumed, assumed_pictures, assumed_recipe, lines_of, sealed
from pictures import draw, draw_mask
from simulate import FieldScale, Scale, Simulated, StoreScale

from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions
from train.check.data import planned_by
from train.cluster_forecast import outlook_of
from train.config.load import load_config

SMALL = {"image.resolution": 96, "image.step": 16}


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(simulate, "TIMED", 200)
    monkeypatch.setattr(simulate, "TRACED", 100)


@pytest.fixture
def tiny_pipeline(tmp_path):
    """A tiny random pipeline of a family."""
    pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
    import tiny_pipelines

    return lambda family: tiny_pipelines.save(family, tmp_path / family)


@pytest.fixture
def encoded(prep, tmp_path, monkeypatch):
    """`encoded(model, family, masks)`: a manifest of forty real pictures of the same sizes, names and captions as those
    assumed, in shards of at most five rows."""
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", 5)

    def go(model, family, *, masks):
        recipe = assumed_recipe(family, {**SMALL, "mask": "sidecar" if masks else None})
        for number, known in enumerate(assumed_pictures(recipe, 40).items):
            picture = draw(tmp_path / "photos" / known.item.name, known.size, seed=number)
            picture.with_suffix(".txt").write_text(known.captions[0][0])
            if masks:
                draw_mask(picture.with_name(f"{picture.stem}-masklabel.png"), known.size)
        made = prep("encode", tmp_path / "photos", "--model", model, "--cache", tmp_path / "cache", "-o",
                    tmp_path / "m.json", "--resolution", 96, "--step", 16, "--device", "cpu")
        assert made.code == 0, made.err
        return read_manifest(tmp_path / "m.json")

    return go


def shards_of(facts):
    return Counter((one.field, one.rows, one.bytes, tuple(one.shapes.items())) for one in facts)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "masks"), [("sd15", True), ("sdxl", False), ("flux", False)])
def test_what_is_assumed_is_what_real_pictures_make(encoded, tiny_pipeline, family, masks):
    model = tiny_pipeline(family)
    manifest = encoded(model, family, masks=masks)
    real = open_index(manifest)
    wanted = assumed(family, 40, {**SMALL, "mask": "sidecar" if masks else None}, model)
    told = sealed(wanted)
    missing, more = (shards_of(one) - shards_of(other) for one, other in ((real.shards, told.shards),
                                                                          (told.shards, real.shards)))
    assert [(field, rows) for field, rows, *_ in missing] == [("text", 1)], "the row of no caption, by itself"
    assert not more and len(told.shards) == len(real.shards) - 1 >= 16
    assert told.manifest.buckets == manifest.buckets and len(manifest.buckets) > 3
    sizes = [real.cache.table(manifest.document["tables"][name]).stat().st_size for name in ("samples", "shards")]
    assert sizes[0] < told.tables <= sum(sizes)
    assert {name: one.arrays for name, one in told.manifest.fields.items()} == {
        name: one.arrays for name, one in manifest.fields.items()}


def test_an_assumed_data_set_takes_of_nodes_what_a_real_one_takes(encoded, tiny_model):
    """A million samples: once like forty real ones, once like as many that are assumed."""
    real = open_index(encoded(tiny_model, "sd15", masks=True))
    index = sealed(assumed("sd15", 40, {**SMALL, "mask": "sidecar"}, tiny_model)).index
    plan = planned_by(load_config(None, {"batch_size": 64, "steps": 1}), real.counts)
    told, expected = (outlook_of(one, plan, world=16, nodes=4, masked=True, room=1 << 30, samples=10**6)
                      for one in (index, real))
    for name in ("world", "nodes", "samples", "steps", "idle", "shards", "bytes", "memory"):
        assert getattr(told, name) == getattr(expected, name), name
    for name in ("begin", "first", "later"):  # which samples share a shard differs
        assert getattr(told, name) == pytest.approx(getattr(expected, name), rel=0.1), name
    for name in ("headers", "requests", "rounds"):  # a real one has the row of no caption
        assert 0.85 < getattr(told, name) / getattr(expected, name) <= 1, name


def test_a_sample_stands_for_all():
    """Shards and bytes of a sample of whole shards are those of four times as many samples that are really planned."""
    config = load_config(None, {"batch_size": 64, "steps": 1})
    one, other = (bench_plan.outlook("sd15", 200_000, config, {"mask": "sidecar"}, world=64, nodes=8, planned=planned)
                  for planned in (bench_plan.SAMPLES, 2560))
    assert one.shards == pytest.approx(other.shards, rel=0.15) and one.bytes == pytest.approx(other.bytes, rel=0.01)
    exact = 3 * 200_000 / 256
    assert one.shards == pytest.approx(exact, rel=0.01), "a latent, a mask and a caption each, 256 in a shard"


@pytest.mark.parametrize(("family", "shapes"), [
    ("sd15", {"hidden": (77, 768)}), ("sd21", {"hidden": (77, 1024)}),
    ("sdxl", {"hidden": (77, 2048), "pooled": (1280,)}), ("sd3", {"hidden": (333, 4096), "pooled": (2048,)}),
    ("flux", {"hidden": (512, 4096), "pooled": (768,)}),
])
def test_text_rows_are_as_wide_as_those_of_published_models(family, shapes):
    facts = FAMILIES[family]
    options = TextOptions(max_length=facts.text.max_length)
    assert facts.text.shapes(PublishedConfigs(PUBLISHED[family]), options) == shapes


def test_a_family_whose_rows_are_as_long_as_captions_has_the_longest(tiny_pipeline):
    """Its captions are not there to be counted."""
    wanted = assumed("zimage", 40, {"image.resolution": 64}, tiny_pipeline("zimage"))
    tokens = {wanted.group_of("text", key)[1] for key in wanted.targets.texts}
    assert tokens == {FAMILIES["zimage"].text.max_length}
    assert ", of 100 characters in 512 tokens, the most, and no mask" in lines_of(wanted)[1]
    assert {one.shapes["attention_mask"] for one in sealed(wanted).shards if one.field == "text"} == {(*tokens,)}


def test_bytes_are_those_of_the_family_s_rows():
    fields = simulate.simulate_assumed("sd15", Scale(pictures=10**6), {"mask": "sidecar"}).fields
    assert fields["text"] == FieldScale(rows=10**6, shards=3907, bytes=10**6 * 77 * 768 * 2)
    assert fields["mask"].rows == 10**6 and fields["mask"].bytes * 8 == fields["latent"].bytes
    assert 0.9 < fields["latent"].bytes / (10**6 * 4 * 64 * 64 * 2) <= 1


def test_several_views_and_resolutions_are_rows_of_a_picture():
    views = {"image.resolution": (512, 1024), "image.flip": "both"}
    fields = simulate.simulate_assumed("sdxl", Scale(pictures=10**6), views).fields
    assert fields["latent"].rows == 4 * 10**6 and fields["text"].rows == 10**6
    few = simulate.simulate_assumed("sdxl", Scale(pictures=10), {}).fields
    assert few["latent"].rows == 10 and 4 < few["latent"].shards <= 10 and few["text"].shards == 1


def test_samples_that_are_planned_are_like_the_first_ones():
    wanted = assumed("sd15", 40, {"mask": "sidecar"})
    more = simulate.many_like(wanted, 200)
    assert len(more.targets.samples) == 200 == len({one.id for one in more.targets.samples})
    for field, keys in wanted.targets.by_field().items():
        copies = more.targets.by_field()[field]
        assert len(copies) == len(keys) * 6  # the first ones, and five copies
        groups = [sorted(each.group_of(field, key) for key in some) for each, some in ((wanted, keys), (more, copies))]
        assert groups[1] == sorted(groups[0] * 6)


def test_what_is_measured_does_not_grow_with_the_pictures():
    assert simulate.simulate_assumed("sdxl", Scale(pictures=10**15), {}).like == simulate.ASSUMED


def test_limits_are_said():
    base = {"scale": Scale(pictures=100, latency=1.0), "like": 1, "planning": 1.0, "planning_memory": 1,
            "ledger": 1, "sealing": 1.0, "table": 1, "fields": {"text": FieldScale(rows=1, shards=1, bytes=1)}}
    store = StoreScale(objects=1, requests=1, waited=5.0, listing=50.0, catching_up=1.0)
    assert Simulated(**base, store=store, seconds=1000.0, per_shard=9.0).limits() == []
    (slow,) = Simulated(**base, store=store, seconds=1000.0, per_shard=2.0).limits()
    assert slow.startswith("the store is the limit: a device encodes a shard in 2.00 s")
    (listed,) = Simulated(**base, store=store, seconds=100.0, per_shard=9.0).limits()
    assert listed.startswith("listing the store takes more than a tenth")
    (large,) = replace(Simulated(**base, store=None, seconds=None, per_shard=None), ledger=65 << 30).limits()
    assert large.startswith("memory for planning is the limit")


def test_round_numbers_and_requests():
    assert [simulate._round(one) for one in (7, 42, 123, 98_765)] == [7, 42, 120, 98_000]
    assert math.isclose(simulate.requests_of(1, 9 << 20)[0] - simulate.requests_of(1, 100)[0], 4)


@pytest.mark.slow
def test_the_benchmark_as_it_is_typed():
    command = [sys.executable, Path(bench_plan.__file__), "--quick", "--family", "sd15", "--masks", "--gpus", "8",
               "--pictures-per-second", "1000", "--world-size", "8", "--nodes", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert "- simulated: 1,000,000 pictures on 8 devices" in lines
    assert "- time: about 2.1 min on 8 devices that encode 1,000 pictures a second each" in lines
    assert any(line.startswith("- 8 ranks on 1 node: 1,000,000 samples and 125,0") for line in lines)
