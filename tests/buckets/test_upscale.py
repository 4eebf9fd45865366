"""Pictures smaller than their buckets: never enlarged, allowed, refused, or enlarged so many times at most."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.errors import ConfigError
from prep.recipe.load import load_recipe
from prep.recipe.schema import SETTINGS

SIZES = st.lists(st.tuples(st.integers(64, 2000), st.integers(64, 2000)), min_size=1, max_size=12)


def bucket(size, upscale, **overrides):
    found = assign_buckets([("a", size)], Rules(**{"resolution": 512, "upscale": upscale, **overrides}))
    return found.pictures[0].placement.bucket if found.pictures else found.findings[0].detail


def test_each_policy():
    small = (400, 400)
    assert bucket(small, "never") == (384, 384)
    assert bucket(small, "allow") == (512, 512)
    assert bucket(small, "reject") == (
        "picture is 400x400, expected one that needs no enlarging for a bucket of kind 'step'")
    assert bucket(small, Fraction("1.28")) == (512, 512), "exactly 1.28 times"
    assert bucket(small, Fraction("1.27")) == (448, 448), "as large as 1.27 times allows, 508"
    assert bucket((512, 512), "reject") == (512, 512)


def test_lists_too():
    sizes = {"kind": "list", "sizes": ((512, 512), (256, 512))}
    assert bucket((400, 520), "never", **sizes) == (256, 512)
    assert bucket((450, 520), "reject", **sizes).startswith("picture is 450x520, expected one that needs no enlarging")
    assert bucket((450, 520), Fraction("1.2"), **sizes) == (512, 512)
    assert bucket((200, 200), Fraction("1.2"), **sizes) == (
        "picture is 200x200, expected one that needs no enlarging by more than 1.2 for a bucket of kind 'list'")


@given(SIZES, st.sampled_from([Fraction(1), Fraction("1.1"), Fraction("1.5"), Fraction(3)]), st.integers(1, 4),
       st.sampled_from(["step", "ratio", "single"]))  # fmt: skip
def test_nothing_is_enlarged_by_more_than_was_said(sizes, most, min_bucket, kind):
    named = [(f"{number}", size) for number, size in enumerate(sizes)]
    rules = Rules(resolution=256, step=16, kind=kind, upscale=most, min_bucket=min_bucket)
    found = assign_buckets(named, rules)
    for one in found.pictures:
        assert all(side <= most * own for side, own in zip(one.placement.bucket, one.size, strict=True))
    assert len(found.pictures) + len([one for one in found.findings if one.code == "too-small"]) == len(sizes)
    if most == 1:
        never = assign_buckets(named, Rules(resolution=256, step=16, kind=kind, min_bucket=min_bucket))
        assert [one.placement for one in never.pictures] == [one.placement for one in found.pictures]


@pytest.mark.parametrize(("text", "value"), [("'reject'", "reject"), ("true", "allow"), ("false", "never"), ("2", 2),
                                             ("1.5", 1.5)])
def test_a_recipe_says_it(tmp_path, text, value):
    assert recipe(tmp_path, text).image.upscale == value
    assert SETTINGS["image.upscale"].spec.check(True, "image.upscale") == "allow"


def recipe(folder, text):
    (folder / "photos").mkdir()
    path = folder / "dataset.toml"
    path.write_text(f"[image]\nupscale = {text}\n[[source]]\npath = 'photos'")
    return load_recipe(path, choices={})


@pytest.mark.parametrize(("text", "says"), [
    ("'twice'", "image.upscale is 'twice', expected one of: never, allow, reject, or a number from 1 to 100"),
    ("0.5", "image.upscale is 0.5, expected a number from 1 to 100"),
    ("[2]", "image.upscale is [2], expected one of: never, allow, reject, or a number from 1 to 100"),
])  # fmt: skip
def test_policies_that_are_none(tmp_path, text, says):
    with pytest.raises(ConfigError) as caught:
        recipe(tmp_path, text)
    assert says in str(caught.value)


def test_the_command_says_what_becomes_of_each(prep, photos):
    options = ("--resolution", 128, "--step", 16, "--buckets", "single", "--json")
    enlarged = {}
    for policy in ("allow", "1.34"):
        document = prep("bucket", photos, *options, "--upscale", policy).json
        enlarged[policy] = [one["upscaled"] for one in document["pictures"]]
    assert enlarged == {"allow": [True] * 8, "1.34": [True] * 4}
    refused = prep("bucket", photos, "--resolution", 96, "--step", 16, "--upscale", "reject", "--json").json
    assert {one["code"] for one in refused["findings"]} <= {"too-small"}
    assert load_recipe(photos, choices={"image.upscale": 1.5}).options == ("--upscale", "1.5")
