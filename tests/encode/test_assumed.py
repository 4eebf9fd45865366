"""Plans for pictures that are not there: what is assumed has the shards, bytes and tables of real pictures like it."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from assumed_data import write_assumed

from prep.encode.forecast import simulate
from prep.encode.forecast.assumed import assumed, assumptions, sealed
from prep.loader.index import open_index
from prep.manifest.document import read_manifest
from prep.models.configs import Configs
from prep.models.families.registry import FAMILIES
from prep.models.family import TextOptions

SMALL = {"image.resolution": 96, "image.step": 16}
AS_TYPED = "encode --simulate --pictures 1e9 --gpus 512 --store-latency 30ms"


@pytest.fixture
def alone(tmp_path, monkeypatch):
    """An empty working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shards_of(facts):
    return Counter((one.field, one.rows, one.bytes, tuple(one.shapes.items())) for one in facts)


@pytest.fixture
def tiny_pipeline(tmp_path):
    """A tiny random pipeline of a family."""
    pytest.importorskip("transformers", minversion="5", reason="older tokenizers cannot be made in memory")
    import tiny_pipelines

    return lambda family: tiny_pipelines.save(family, tmp_path / family)


@pytest.mark.parametrize(("family", "masks"), [("sd15", True), ("sdxl", False), ("flux", False)])
def test_what_is_assumed_is_what_real_pictures_make(prep, tiny_pipeline, tmp_path, monkeypatch, family, masks):
    """Forty real pictures of the same sizes, names and captions, in shards of at most five rows."""
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", 5)
    tiny_model = tiny_pipeline(family)
    photos = write_assumed(tmp_path / "photos", 40, 96, masks=masks)
    made = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                "--resolution", 96, "--step", 16, "--device", "cpu")
    assert made.code == 0, made.err
    manifest = read_manifest(tmp_path / "m.json")
    real = open_index(manifest)
    wanted = assumed(family, tiny_model, 40, choices={**SMALL, "mask": "sidecar" if masks else None})
    told = sealed(wanted)
    alone = {"shards": shards_of(real.shards) - shards_of(told.shards), "rest": shards_of(told.shards) - shards_of(
        real.shards)}
    assert [(field, rows) for field, rows, *_ in alone["shards"]] == [("text", 1)], "the row of no caption, by itself"
    assert not alone["rest"] and len(told.shards) == len(real.shards) - 1 >= 16
    assert told.manifest.buckets == manifest.buckets and len(manifest.buckets) > 3
    sizes = [real.cache.table(manifest.document["tables"][name]).stat().st_size for name in ("samples", "shards")]
    assert sizes[0] < told.tables <= sum(sizes)
    assert {name: one.arrays for name, one in told.manifest.fields.items()} == {
        name: one.arrays for name, one in manifest.fields.items()}
    for field, rows in assumptions(wanted, "").fields.items():
        assert rows.bytes * 40 == pytest.approx(sum(
            wanted.row_bytes(field, key) for key in wanted.targets.rows_by_field()[field]), abs=40)
        assert rows.rows == 1


@pytest.mark.parametrize(("family", "shapes"), [
    ("sd15", {"hidden": (77, 768)}), ("sd21", {"hidden": (77, 1024)}),
    ("sdxl", {"hidden": (77, 2048), "pooled": (1280,)}), ("sd3", {"hidden": (333, 4096), "pooled": (2048,)}),
    ("flux", {"hidden": (512, 4096), "pooled": (768,)}),
])
def test_text_rows_are_as_wide_as_those_of_published_models(family, shapes):
    facts = FAMILIES[family]
    options = TextOptions(max_length=facts.text.max_length)
    assert facts.text.shapes(Configs.known(facts.published), options) == shapes


def test_families_without_published_widths_say_so():
    known = [name for name, family in FAMILIES.items() if family.published is not None]
    assert known == ["sd15", "sd21", "sdxl", "sd3", "flux"], "a family that is derived from one of them has its widths"


def test_the_command_as_it_is_typed(prep, alone):
    told = prep(*AS_TYPED.split())
    assert told.code == 0 and told.err == "" and not list(alone.iterdir())
    lines = told.out.splitlines()
    assert lines[0] == ("assumed: family sdxl (Stable Diffusion XL), rows in bfloat16, resolution 1024 in 13 buckets "
                        "of step 64")
    assert "1:2 to 2:1" in lines[1] and lines[1].endswith("of 100 characters in 77 tokens, and no mask")
    assert "1 text row of 310.5 KiB (256 in a shard)" in lines[2]
    assert lines[3] == "simulated: 1,000,000,000 pictures like those assumed, on 512 devices"
    latent = re.fullmatch(r"latent: 1,000,000,000 rows in ([0-9,]+) shards, 116\.\d TiB", lines[4])
    shards = int(latent[1].replace(",", ""))
    assert 0 <= shards - 10**9 / 256 < 13, "each bucket has a shard that is not full"
    assert lines[5] == "text: 1,000,000,000 rows in 3,906,250 shards, 289.2 TiB"
    assert f"commits: {shards + 3_906_250:,}, one for each shard" in lines
    assert f"store: {6 * shards + 8 * 3_906_250:,} objects, " in told.out
    assert "time: 22.6 days on 512 devices if each encodes 1 picture a second" in told.out
    assert re.search(r"store: it becomes the limit where a device encodes more than 3\d\d pictures a second", told.out)
    assert "note: memory for planning is the limit" in told.out
    assert ("note: a manifest has at most 1,048,576 shards and a table of 32.0 GiB, so at least 9 manifests are "
            "needed, which may share a cache") in told.out


def test_bytes_are_those_of_the_family_s_rows(prep, alone):
    told = prep("encode", "--simulate", "--pictures", 1e6, "--family", "sd15", "--mask", "sidecar", "--json").json
    fields, said = told["simulated"]["fields"], told["simulated"]["assumed"]
    assert fields["text"] == {"rows": 10**6, "shards": 3907, "bytes": 10**6 * 77 * 768 * 2}
    assert fields["mask"]["rows"] == 10**6 and fields["mask"]["bytes"] * 8 == fields["latent"]["bytes"]
    assert 0.9 < fields["latent"]["bytes"] / (10**6 * 4 * 64 * 64 * 2) <= 1
    assert said["family"] == "sd15" and said["resolutions"] == [512] and told["encoded"]["latent"] == 10**6
    assert told["bytes"] == sum(one["bytes"] for one in fields.values()) and told["dry_run"]


def test_several_views_and_resolutions_are_rows_of_a_picture(prep, alone):
    told = prep("encode", "--simulate", "--pictures", 1e6, "--resolution", "512,1024", "--flip", "both", "--json").json
    fields = told["simulated"]["fields"]
    assert fields["latent"]["rows"] == 4 * 10**6 and fields["text"]["rows"] == 10**6
    assert told["simulated"]["assumed"]["fields"]["latent"]["rows"] == 4
    few = prep("encode", "--simulate", "--pictures", 10, "--json").json["simulated"]
    assert few["fields"]["latent"]["rows"] == 10 and 4 < few["fields"]["latent"]["shards"] <= 10
    assert few["fields"]["text"]["shards"] == 1


def test_a_model_says_its_own_widths(prep, tiny_model, alone):
    told = prep("encode", "--simulate", "--pictures", 1e6, "--model", tiny_model, "--json").json["simulated"]["assumed"]
    assert told["family"] == "sd15" and told["model"] == str(tiny_model) and told["fields"]["text"]["bytes"] < 10_000
    assert f"assumed: family sd15 (the model {tiny_model})" in prep(
        "encode", "--simulate", "--pictures", 10, "--model", tiny_model).out


def test_a_rate_is_given_instead_of_measured(prep, photos, tiny_model, alone):
    fast = ("--pictures-per-second", 1000)
    told = prep("encode", "--simulate", "--pictures", 1e9, "--gpus", 100, "--store-latency", "30ms", *fast)
    assert "time: about 2.8 h on 100 devices that encode 1,000 pictures a second each" in told.out
    assert "note: the store is the limit: a device encodes a shard in 0.13 s" in told.out and "if each" not in told.out
    real = prep("encode", photos, "--model", tiny_model, "--cache", "cache", "--resolution", 96, "--step", 16,
                "--device", "cpu", "--simulate", "--pictures", 1e6, *fast, "--json").json["simulated"]
    assert real["seconds"] == 1000.0 and "assumed" not in real


def test_a_family_whose_rows_are_as_long_as_captions_has_the_longest(tiny_pipeline):
    """Its captions are not there to be counted."""
    wanted = assumed("zimage", tiny_pipeline("zimage"), 40, choices={"image.resolution": 64})
    tokens = {wanted.group_of("text", key)[1] for key in wanted.targets.texts}
    assert tokens == {FAMILIES["zimage"].text.max_length}
    assert ", of 100 characters in 512 tokens, the most, and no mask" in assumptions(wanted, "").as_lines()[1]
    assert {one.shapes["attention_mask"] for one in sealed(wanted).shards if one.field == "text"} == {(*tokens,)}


@pytest.mark.parametrize(("options", "code", "message", "hint"), [
    ((), 2, "no SOURCE is given, expected the pictures to encode", "prep encode --simulate --pictures 1e9"),
    (("--cache", "cache"), 2, "no SOURCE is given", "prep encode SOURCE"),
    ((".",), 2, "--cache is missing: where should the encoded data go?", "add --cache cache, or name a recipe"),
    (("photos", "--cache", "c", "--family", "sd15"), 2, "--family is given with SOURCE, expected one of them",
     "omit --family"),
    (("--simulate",), 2, "--simulate is given without --pictures, expected both", "add --pictures 1e9"),
    (("--simulate", "--pictures", 9, "--cache", "c"), 2, "--cache is given without SOURCE, expected both",
     "name a SOURCE, or omit --cache to plan for pictures that are not there yet"),
    (("--simulate", "--pictures", 9, "--measure"), 2, "--measure is given without SOURCE", "omit --measure"),
    (("--simulate", "--pictures", 9, "--engine", "ray", "--workers", 3), 2,
     "--workers is given with --simulate, which starts no workers", "omit --workers"),
    (("--simulate", "--pictures", 9, "--recheck"), 2, "--recheck is given without SOURCE", "omit --recheck"),
    (("--simulate", "--pictures", 9, "--prompts", "p.txt"), 2, "--prompts is given without SOURCE", "omit --prompts"),
    (("--simulate", "--pictures", 9, "--family", "qwenimage"), 2,
     "--family is 'qwenimage', expected one of: sd15, sd21, sdxl, sd3, flux", "--model MODEL"),
    (("--simulate", "--pictures", 9, "--model", "nowhere"), 6, "nowhere", ""),
    (("--simulate", "--pictures", 9, "--pictures-per-second", 0), 2, "Invalid value for '--pictures-per-second'", ""),
    (("--pictures-per-second", 9), 2, "--pictures-per-second is given without --simulate", "add --simulate"),
    (("photos", "--simulate", "--pictures", 9, "--pictures-per-second", 9, "--measure"), 2,
     "--pictures-per-second is given with --measure, expected one of them", "--measure finds out"),
    (("--simulate", "--pictures", 9, "--step", 12), 3, "image.step is 12, expected a multiple of 8", ""),
    (("--simulate", "--pictures", 9, "--max-length", 9), 3, "model.max_length is 9, expected 77", ""),
    (("--simulate", "--pictures", 9, "--buckets", "list", "--sizes", "8192x8192", "--upscale", "reject"), 8,
     "no assumed picture fits a bucket", "leave --upscale out"),
])
def test_contradictory_options(prep, alone, options, code, message, hint):
    said = prep("encode", *options)
    assert said.code == code and message in said.err and hint in said.err, said.err
    assert not list(alone.iterdir())


def test_what_is_measured_is_small(alone):
    """The pictures that are made to be planned do not grow with those that are simulated."""
    told = simulate.simulate_assumed(None, "", simulate.Scale(pictures=10**15), 256 << 20, {})
    assert told.like == simulate.ASSUMED
