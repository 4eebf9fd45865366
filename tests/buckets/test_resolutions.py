"""Several resolutions: a sample of a picture at each, held out together, never two that are the same."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.cache.store import Cache
from prep.errors import ConfigError
from prep.manifest.document import read_manifest
from prep.manifest.tables import SAMPLES, read_table
from prep.recipe.load import load_recipe

OPTIONS = ("--step", 16, "--dtype", "float32", "--device", "cpu", "--json")
BOTH = (Rules(resolution=512), Rules(resolution=1024))
SIDE = st.integers(40, 3000)


def buckets(size, *rules):
    return [(one.resolution, one.placement.bucket) for one in assign_buckets([("a", size)], *rules).pictures]


def test_a_large_picture_is_a_sample_at_each():
    assert buckets((1200, 1200), *BOTH) == [(512, (512, 512)), (1024, (1024, 1024))]
    assert buckets((600, 600), *BOTH) == [(512, (512, 512)), (1024, (576, 576))], "as large as it can be, not larger"


def test_no_picture_is_twice_in_a_bucket():
    assert buckets((520, 520), *BOTH) == [(512, (512, 512))]
    assert buckets((100, 100), *BOTH) == [(512, (64, 64))]


def test_a_picture_is_refused_only_where_no_resolution_takes_it():
    single = [Rules(resolution=side, kind="single") for side in (512, 1024)]
    found = assign_buckets([("large", (1100, 1100)), ("middle", (600, 600)), ("small", (300, 300))], *single)
    assert [(one.name, one.resolution) for one in found.pictures] == [("large", 512), ("large", 1024), ("middle", 512)]
    assert [one.path for one in found.findings] == ["small"]


@given(st.lists(st.tuples(SIDE, SIDE), max_size=12))
def test_each_resolution_has_what_it_has_alone(sizes):
    named = [(f"{number}", size) for number, size in enumerate(sizes)]
    both = {(one.index, one.placement) for one in assign_buckets(named, *BOTH).pictures}
    alone = {(one.index, one.placement) for rules in BOTH for one in assign_buckets(named, rules).pictures}
    assert both == alone


def test_encode_makes_a_sample_at_each_and_holds_both_out(prep, photos, tiny_model, tmp_path):
    done = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                *OPTIONS, "--resolution", "96,64,96", "--validation", 0.4)
    assert done.code == 0, done.err
    opened = read_manifest(tmp_path / "m.json")
    rows = read_table(Cache(root=opened.cache_root), opened.document["tables"]["samples"], SAMPLES).to_pylist()
    by_picture = defaultdict(list)
    for row in rows:
        by_picture[row["picture"]].append(row)
    assert len(by_picture) == 8 and all(len(two) == 2 for two in by_picture.values())
    assert all(len({row["role"] for row in two}) == 1 for two in by_picture.values()), "a picture is on one side only"
    assert {row["role"] for row in rows} == {"train", "validation"}
    assert len({row["id"] for row in rows}) == 16 and all(len({row["bucket"] for row in two}) == 2
                                                          for two in by_picture.values())
    seen = prep("bucket", photos, "--step", 16, "--resolution", "64,96", "--json").json
    assert seen["resolutions"] == [{"resolution": 64, "pictures": 8}, {"resolution": 96, "pictures": 8}]
    assert sum(one["samples"] for one in seen["buckets"]) == 16
    assert "pictures at resolution 64: 8, 96: 8" in prep("bucket", photos, "--step", 16, "--resolution", "64,96").out
    again = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                 *OPTIONS, "--resolution", "64", "--validation", 0.4)
    assert set(again.json["encoded"].values()) == {0}


def recipe(folder: Path, image: str):
    (folder / "photos").mkdir(exist_ok=True)
    path = folder / "dataset.toml"
    path.write_text(f"[image]\n{image}\n[[source]]\npath = 'photos'")
    return load_recipe(path, choices={})


def test_a_recipe_says_one_or_several(tmp_path):
    assert recipe(tmp_path, "resolution = 768").image.resolution == 768
    assert recipe(tmp_path, "resolution = [1024, 512, 1024]").image.resolutions == (512, 1024)
    assert recipe(tmp_path, "resolution = [768]").image.resolution == 768
    again = load_recipe(tmp_path / "photos", choices={"image.resolution": (512, 768)})
    assert again.options == ("--resolution", "512,768")


@pytest.mark.parametrize(
    ("image", "says"),
    [("resolution = []", "image.resolution is [], expected a whole number of pixels, or several"),
     ("resolution = [512, 'large']", "image.resolution[1] is 'large', expected a whole number"),
     ("resolution = [512, 4]", "image.resolution is 4, expected a number from 8 to 16384"),
     ("resolution = [512, 1024]\nbuckets = 'list'\nsizes = ['64x64']",
      "image.buckets is 'list' and image.resolution has 2 numbers, expected one, since these sizes")],
)  # fmt: skip
def test_resolutions_that_are_none(tmp_path, image, says):
    with pytest.raises(ConfigError) as caught:
        recipe(tmp_path, image)
    assert says in str(caught.value)


@pytest.mark.parametrize("text", ["large", "512,", "512;1024", ""])
def test_options_that_are_none(prep, photos, text):
    done = prep("bucket", photos, "--resolution", text)
    assert done.code == 2
    assert f"--resolution is '{text}', expected pixels like 512, or several like 512,1024" in done.err
