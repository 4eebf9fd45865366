"""`prep encode --simulate`: what many pictures would take is what as many real ones take."""

from __future__ import annotations

import math

import pytest
from pictures import draw

from prep.encode.forecast import simulate
from prep.encode.forecast.simulate import FieldScale, Simulated, StoreScale
from prep.formatting import duration

SMALL = ("--resolution", 96, "--step", 16, "--device", "cpu", "--mask", "sidecar")


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(simulate, "TIMED", 200)
    monkeypatch.setattr(simulate, "TRACED", 100)


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    def go(*options, source=photos, code=0):
        result = prep("encode", source, "--model", tiny_model, "--cache", tmp_path / "cache", "-o",
                      tmp_path / "m.json", *SMALL, *options)
        assert result.code == code, result.err
        return result

    return go


def test_rows_shards_and_bytes_are_those_of_so_many_pictures(encode, prep, photos, tmp_path, monkeypatch):
    """The photos four times, each with captions of its own: what is simulated is what a dry run of them says."""
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", 5)
    for number, caption in enumerate(sorted(photos.glob("*.txt"))):
        caption.write_text(f"one of a kind {number}")
    told = encode("--simulate", "--pictures", 32, "--json").json
    for copy in range(4):
        for path in photos.iterdir():
            target = tmp_path / "more" / f"{copy}-{path.name}"
            target.parent.mkdir(exist_ok=True)
            if path.suffix == ".txt":
                target.write_text(f"{path.read_text()} {copy}")
            elif "masklabel" in path.name:
                target.write_bytes(path.read_bytes())
            else:
                from PIL import Image
                with Image.open(path) as image:
                    draw(target, image.size, seed=100 * copy + int(path.stem))
    real = encode("--dry-run", "--json", source=tmp_path / "more").json
    fields = told["simulated"]["fields"]
    assert fields["latent"]["rows"] == real["encoded"]["latent"] == 32
    for name, one in fields.items():
        shared = one["rows"] - real["encoded"][name]  # each mask is there once
        assert shared == {"latent": 0, "mask": 9, "text": 0}[name]
    assert fields["latent"]["bytes"] == real["estimate"]["fields"]["latent"]["bytes"]
    assert told["simulated"]["like"] == 8 and told["dry_run"] and not (tmp_path / "cache").exists()
    encode(source=tmp_path / "more")
    table = prep("inspect", tmp_path / "m.json", "--json").json
    shards = {name: field["shards"] for name, field in table["fields"].items()}
    assert fields["latent"]["shards"] == shards["latent"] and fields["text"]["shards"] - shards["text"] in (0, 1)


def test_what_is_planned_is_like_the_real_samples(encode, monkeypatch):
    seen = []
    many = simulate.many_like
    monkeypatch.setattr(simulate, "many_like", lambda *given: seen.append((given[0], many(*given))) or seen[-1][1])
    encode("--simulate", "--pictures", 1000)
    (wanted, more), *_ = seen
    assert len(more.targets.samples) == 200 and len({one.id for one in more.targets.samples}) == 200
    for field, keys in wanted.targets.by_field().items():
        copies = more.targets.by_field()[field]
        assert len(copies) == len(keys) * 26  # the real ones and 25 copies
        groups = [sorted(each.group_of(field, key) for key in some) for each, some in ((wanted, keys), (more, copies))]
        assert groups[1] == sorted(groups[0] * 26)


def test_time_is_divided_among_devices_but_not_the_time_to_load(encode):
    told = [encode("--simulate", "--pictures", 1e6, "--gpus", gpus, "--measure", "--json").json for gpus in (1, 100)]
    one, many = (each["simulated"]["seconds"] for each in told)
    measured = told[0]["estimate"]["measured"]["seconds"]
    assert many < one / 10 and one > 10_000 * measured / 2
    encode()
    assert encode("--simulate", "--pictures", 10, "--measure", "--json").json["simulated"]["seconds"] is None


def test_a_report_for_people(encode):
    said = encode("--simulate", "--pictures", 1e9, "--gpus", 512, "--store-latency", "30ms").out
    assert "simulated: 1,000,000,000 pictures like the 8 samples here, on 512 devices\n" in said
    assert "\nlatent: 1,000,000,000 rows in 3,906," in said and "\ncommits: " in said
    assert "\nplanning: at least " in said and "\nsealing: at least " in said
    assert "\nstore: " in said and " objects, " in said and "; each shard waits 0." in said
    assert "note: memory for planning is the limit: all keys are held at once. Several manifests of at most " in said
    plain = encode("--simulate", "--pictures", 1000).out
    assert "simulated: 1000 pictures" in plain and "\nstore: " not in plain and "note: " not in plain


def test_limits_are_said():
    base = {"scale": simulate.Scale(pictures=100, latency=1.0), "like": 1, "planning": 1.0, "planning_memory": 1,
            "ledger": 1, "sealing": 1.0, "table": 1, "fields": {"text": FieldScale(rows=1, shards=1, bytes=1)}}
    store = StoreScale(objects=1, requests=1, waited=5.0, listing=50.0, catching_up=1.0)
    assert Simulated(**base, store=store, seconds=1000.0, per_shard=9.0).limits() == []
    (slow,) = Simulated(**base, store=store, seconds=1000.0, per_shard=2.0).limits()
    assert slow.startswith("the store is the limit: a device encodes a shard in 2.00 s")
    (listed,) = Simulated(**base, store=store, seconds=100.0, per_shard=9.0).limits()
    assert listed.startswith("listing the store takes more than a tenth")


def test_long_times_and_round_numbers():
    assert [duration(one) for one in (1.26, 300, 7200, 400_000)] == ["1.3 s", "5.0 min", "2.0 h", "4.6 days"]
    assert [simulate._round(one) for one in (7, 42, 123, 98_765)] == [7, 42, 120, 98_000]
    assert math.isclose(simulate.requests_of(1, 9 << 20)[0] - simulate.requests_of(1, 100)[0], 4)


@pytest.mark.parametrize(("options", "message", "hint"), [
    (("--pictures", 10), "--pictures is given without --simulate, expected both", "add --simulate"),
    (("--gpus", 2), "--gpus is given without --simulate, expected both", "add --simulate"),
    (("--store-latency", 2), "--store-latency is given without --simulate, expected both", "add --simulate"),
    (("--simulate",), "--simulate is given without --pictures, expected both", "add --pictures 1e9"),
    (("--simulate", "--pictures", 10, "--part", "0/2"),
     "--part is given with --simulate, which shows what all parts take", "omit --part"),
    (("--simulate", "--pictures", "inf"), "Invalid value for '--pictures'", ""),
    (("--simulate", "--pictures", 9, "--store-latency", "3h"), "--store-latency is '3h', expected a time like", ""),
    (("--encoder-memory", "inf"), "Invalid value for '--encoder-memory'", ""),
])
def test_options_that_need_others(encode, options, message, hint):
    said = encode(*options, code=2).err
    assert message in said and hint in said
