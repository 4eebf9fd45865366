"""Plans of runs without a manifest: what is told of an assumed data set is told of a real one like it."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from assumed_data import write_assumed

from prep.cache.store import Cache
from prep.encode.forecast.assumed import assumed, sealed
from prep.errors import EmptyPlanError
from prep.loader.index import Index, open_index
from prep.manifest.document import read_manifest
from train.check.data import planned_by
from train.cluster_forecast import outlook_of
from train.config.load import load_config
from train.synthetic import SAMPLES, assumed_data, assumed_outlook

AS_TYPED = "check --simulate --samples 1e9 --world-size 1024 --node-cache 2TB"


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("nodes", "less"), [(2, 0.05), (8, 0.16)])
def test_a_part_is_that_of_as_many_samples(alone, monkeypatch, nodes, less):
    """Six thousand samples, planned as they are, and as six times a thousand."""
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", 5)
    config = load_config(None, {"batch_size": 64, "shuffle": "partitioned", "steps": 1})
    whole, sample = (assumed_data("sd15", None, count, masked=True) for count in (6000, 1000))
    exact, told = (assumed_outlook(replace(data, samples=6000), config, world=8, nodes=nodes, masked=True, room=None)
                   for data in (whole, sample))
    assert 1 - less < told.first / exact.first < 1.02 and exact.first < 1.3 * exact.bytes / nodes
    assert told.bytes == pytest.approx(exact.bytes, rel=0.01) and told.steps == exact.steps


@pytest.mark.parametrize("shuffle", ["global", "partitioned"])
def test_an_assumed_data_set_takes_what_a_real_one_takes(prep, tiny_model, tmp_path, monkeypatch, shuffle):
    """A million samples: once like forty real ones, once like as many that are assumed."""
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", 5)
    photos = write_assumed(tmp_path / "photos", 40, 96, masks=True)
    made = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                "--resolution", 96, "--step", 16, "--device", "cpu")
    assert made.code == 0, made.err
    real = open_index(read_manifest(tmp_path / "m.json"))
    wanted = assumed("sd15", tiny_model, 40, choices={"image.resolution": 96, "image.step": 16, "mask": "sidecar"})
    like = sealed(wanted)
    index = Index(manifest=like.manifest, cache=Cache(root=tmp_path / "none"), samples=like.samples, shards=like.shards)
    config = load_config(None, {"batch_size": 64, "shuffle": shuffle, "steps": 1})
    plan = planned_by(config, real.counts)
    assert planned_by(config, index.counts).counts == plan.counts
    told, expected = (outlook_of(one, plan, world=16, nodes=4, masked=True, room=1 << 30, samples=10**6, tables=tables)
                      for one, tables in ((index, like.tables), (real, None)))
    for name in ("world", "nodes", "samples", "steps", "idle", "shards", "bytes", "memory"):
        assert getattr(told, name) == getattr(expected, name), name
    for name in ("begin", "first", "later"):  # which samples share a shard differs
        assert getattr(told, name) == pytest.approx(getattr(expected, name), rel=0.1), name
    for name in ("headers", "requests", "rounds"):  # a real one has the row of no caption
        assert 0.85 < getattr(told, name) / getattr(expected, name) <= 1, name


def test_a_sample_stands_for_all(alone):
    """Shards and bytes of a sample of whole shards are those of ten times as many samples that are really planned."""
    config = load_config(None, {"batch_size": 64, "steps": 1})
    few, many = (replace(data, samples=200_000) for data in (
        assumed_data("sd15", None, SAMPLES, masked=True), assumed_data("sd15", None, 2560, masked=True)))
    one, other = (assumed_outlook(data, config, world=64, nodes=8, masked=True, room=None) for data in (few, many))
    assert one.shards == pytest.approx(other.shards, rel=0.15) and one.bytes == pytest.approx(other.bytes, rel=0.01)
    exact = 3 * 200_000 / 256
    assert one.shards == pytest.approx(exact, rel=0.01), "a latent, a mask and a caption each, 256 in a shard"


def test_a_small_data_set_is_planned_as_it_is(alone):
    data = assumed_data("sd15", None, 100, masked=False)
    told = assumed_outlook(data, load_config(None, {"batch_size": 8, "steps": 1}), world=8, nodes=1, masked=False,
                           room=None)
    assert len(data.index.samples) == 100 == told.samples and told.shards == len(data.index.shards)
    with pytest.raises(EmptyPlanError, match="underfill 'drop' drops all 100 samples"):
        assumed_outlook(data, load_config(None, {"batch_size": 64, "underfill": "drop", "steps": 1}), world=8, nodes=1,
                        masked=False, room=None)
    large = replace(data, samples=10**6)
    dropping = load_config(None, {"batch_size": 64, "underfill": "drop", "steps": 1})
    assert assumed_outlook(large, dropping, world=8, nodes=1, masked=False, room=None).steps > 15_000


def test_the_command_as_it_is_typed(train, alone):
    told = train(*AS_TYPED.split())
    assert told.code == 0 and told.err == "" and not list(alone.iterdir())
    lines = told.out.splitlines()
    assert lines[0].startswith("assumed: family sdxl (Stable Diffusion XL), rows in bfloat16, resolution 1024 in 13")
    assert lines[2].endswith("1 text row of 310.5 KiB (256 in a shard); shards of at most 256.0 MiB")
    assert lines[3] == "note: steps of 1024 samples are assumed, one for each rank; --batch-size says otherwise"
    assert lines[4] == "note: 128 nodes of 8 ranks are assumed; --nodes says otherwise"
    assert re.match(r"1024 ranks on 128 nodes: 1,000,000,000 samples and 976,5\d\d steps an epoch; planning a step "
                    r"takes \d+\.\d ms, the index 1\.0 TiB of a node's memory", lines[5])
    found = re.search(r"about (\d+\.\d) TiB in its first epoch, (\d\.\d) times the (\d+\.\d) TiB \(7,812,500 shards\) "
                      "that there are, since it downloads the same shards again and again, and", told.out)
    first, times, whole = map(float, found.groups())
    assert times == pytest.approx(first / whole, abs=0.06) and whole == pytest.approx(116.3 + 289.2, rel=1e-3)
    assert "note: memory for the index is the limit" in told.out
    assert ("note: a manifest has at most 1,048,576 shards and a table of 32.0 GiB, so these samples need at least 9 "
            "manifests") in lines
    assert re.fullmatch(r"from an object store, a first start also reads tables of 266\.\d GiB and the headers of all "
                        r"shards, 58,593,750 requests for 113\.8 GiB, before its first step; --store-latency says how "
                        "long that takes", lines[-1])


def test_ranks_that_eight_do_not_divide(train, alone):
    def said(*options):
        return train("check", "--simulate", "--samples", 1e6, "--family", "sd15", *options).out

    assert "note: 2 nodes of 6 ranks are assumed" in said("--world-size", 12)
    assert "note: 1 node of 4 ranks is assumed" in said("--world-size", 4)
    told = said("--world-size", 12, "--nodes", 3, "--batch-size", 24)
    assert "assumed; --" not in told and "12 ranks on 3 nodes: 1,000,000 samples and 41,67" in told
    assert "note: steps of 15 samples are assumed, the fewest for 12 ranks" in said("--world-size", 12,
                                                                                   "--micro-batch", 5)
    assert "downloads the same" not in told and re.search(r"about \S+ GiB of \S+ GiB \(\d+ shards\) in its first", told)
    later = said("--world-size", 12, "--store-latency", "30ms")
    assert "from an object store" not in later and "if the store answers in 30 ms" in later
    assert "\na first start reads tables of " in later


def test_masks_are_assumed_if_the_loss_uses_them(train, alone):
    plain, masked = (train("check", "--simulate", "--samples", 1e6, "--world-size", 8, *more, "--json").json
                     for more in ((), ("--masked",)))
    assert not plain["masked"] and masked["masked"] and masked["ok"] and masked["faults"] == []
    assert set(masked["assumed"]["fields"]) == {"latent", "mask", "text"} > set(plain["assumed"]["fields"])
    assert masked["outlook"]["shards"] == pytest.approx(plain["outlook"]["shards"] * 1.5, abs=2)
    assert masked["steps_per_epoch"] == masked["outlook"]["steps"] and len(masked["notes"]) == 2


def test_a_manifest_is_simulated_with_as_much_assumed(train, make):
    path = make().path
    told = train("check", path, "--simulate", "--world-size", 1024, "--samples", "1e9", "--node-cache", "1KB")
    assert told.code == 0, told.err
    assert "note: steps of 1024 samples are assumed, one for each rank" in told.out
    assert "1024 ranks on 128 nodes: 1,000,000,0" in told.out
    alone = train("check", path, "--simulate", "--world-size", 8, "--samples", "1e9", "--node-cache", "1KB")
    assert "note: 1 node of 8 ranks is assumed" in alone.out
    assert re.search(r"times the \S+ \S+ \([0-9,]+ shards\) that there are, since it downloads", alone.out)
    assert train("check", path, "--simulate", "--world-size", 8, "--batch-size", 4).code == 3, "a batch that was named"
    assert train("check", path, "--simulate", "--world-size", 8, "--set", "batch_size=4").code == 3
    assert train("check", path, "--world-size", 8, "--samples", 1e9).code == 3, "no simulation"


@pytest.mark.parametrize("command", [("train", "check", "--samples", 9, "--world-size", 8),
                                     ("prep", "encode", "--pictures", 9)], ids=lambda words: words[0])
@pytest.mark.parametrize("family", ["sdxl", "foo"])
def test_a_family_that_is_not_the_models(train, prep, tiny_model, command, family):
    program, *words = command
    told = {"train": train, "prep": prep}[program](*words, "--simulate", "--model", tiny_model, "--family", family)
    assert told.code == 2, told.err
    assert f"--family is '{family}', but {tiny_model} is of the family sd15\nhint: omit --family\n" in told.err


@pytest.mark.parametrize(("options", "code", "message", "hint"), [
    ((), 2, "no MANIFEST is given, expected one to check", "train check --simulate --samples 1e9 --world-size 1024"),
    (("--samples", 9, "--world-size", 8), 2, "no MANIFEST is given", "train check --simulate"),
    (("--simulate",), 2, "--simulate, --node-cache or --samples is given without --world-size", "add --world-size"),
    (("--simulate", "--world-size", 8), 2, "--simulate is given without MANIFEST and without --samples, expected one "
     "of them", "--samples 1e9"),
    (("--simulate", "--world-size", 8, "--samples", 9, "-o", "run"), 2, "--output is given without MANIFEST, expected "
     "both", "name a MANIFEST, or omit --output to plan for a data set that is not there yet"),
    (("--simulate", "--world-size", 8, "--samples", 9, "--init-from", "a"), 2, "--init-from is given without MANIFEST",
     "omit --init-from"),
    (("--simulate", "--world-size", 8, "--samples", 9, "--nodes", 3), 2,
     "--world-size is 8, expected a multiple of --nodes, which is 3", "--world-size 9"),
    (("--simulate", "--world-size", 8, "--samples", 9, "--batch-size", 4), 3,
     "batch_size is 4, but 8 ranks divide a step's samples", "--batch-size 8 or more"),
    (("--simulate", "--world-size", 8, "--samples", 9, "--family", "sdxxl"), 2,
     "--family is 'sdxxl', expected one of: sd15, sd21, sdxl, sd3, flux", "--model MODEL"),
    (("--simulate", "--world-size", 8, "--samples", 9, "--node-cache", "much"), 2, "--node-cache is 'much'", ""),
    (("--simulate", "--world-size", 8, "--samples", 9, "--store-latency", "3h"), 2, "--store-latency is '3h'", ""),
    (("m.json", "--family", "sd15"), 2, "--family is given, but the manifest has its own", "omit --family"),
])
def test_contradictory_options(train, alone, options, code, message, hint):
    said = train("check", *options)
    assert said.code == code and message in said.err and hint in said.err, said.err
    assert not list(alone.iterdir())
