"""Regularization samples: their showings are those of the training samples, whatever repeats a recipe gives them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pictures import draw

from prep.dataset.prior import MOST_REPEATS, balance_prior, prior_notes
from prep.manifest import consistency
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest

ROLES = st.lists(st.tuples(st.sampled_from(["train", "validation", "prior"]), st.integers(1, 40)), max_size=60)


@given(asked=ROLES)
def test_prior_showings_are_those_of_training(asked):
    found = balance_prior(asked)
    train = sum(repeats for role, repeats in asked if role == "train")
    prior = [(repeats, shown) for (role, repeats), shown in zip(asked, found, strict=True) if role == "prior"]
    assert all(shown == repeats for (role, repeats), shown in zip(asked, found, strict=True) if role != "prior")
    if train and prior:
        assert sum(shown for _, shown in prior) == train
        raised = [shown - repeats for repeats, shown in prior]
        if sum(repeats for repeats, _ in prior) <= train:
            assert min(raised) >= 0 and max(raised) - min(raised) <= 1, "as evenly as can be"
        else:
            assert max(raised) <= 0
            level = max(shown for _, shown in prior)
            assert all(shown in (repeats, level, level - 1) for repeats, shown in prior), "nobody twice before all once"
    else:
        assert found == [repeats for _, repeats in asked]


@pytest.mark.parametrize(("asked", "shown"), [
    ([("train", 10)] * 2 + [("prior", 1)] * 3, [10, 10, 7, 7, 6]),
    ([("train", 1)] * 2 + [("prior", 1)] * 3, [1, 1, 1, 1, 0]),
    ([("train", 2)] * 2 + [("prior", 3), ("prior", 1)], [2, 2, 3, 1]),
    ([("train", 3), ("prior", 9), ("prior", 1)], [3, 2, 1]),
    ([("prior", 4), ("validation", 1)], [4, 1]),
    ([("train", 1 << 22), ("prior", 1)], [1 << 22, 1 << 20])])
def test_examples(asked, shown):
    assert balance_prior(asked) == shown


def test_a_manifest_takes_as_many_repeats():
    assert MOST_REPEATS == consistency.MOST_REPEATS


def test_what_changes_is_said():
    train = [("train", 5)] * 2
    assert prior_notes([*train, ("prior", 10)]) == ()
    assert prior_notes([*train, ("prior", 1)]) == (
        "note: the regularization picture is shown 10 times per epoch in total, as often as the training pictures",)
    assert prior_notes([*train, *[("prior", 1)] * 12]) == (
        "note: the 10 regularization pictures are shown 10 times per epoch in total, as often as the training "
        "pictures; 2 of 12 are skipped",)


@pytest.fixture
def recipe(photos, tmp_path):
    """Eight training pictures, two of regularization in a bucket of their own, one for validation."""
    for place, size, count in (("reg", (64, 96), 2), ("val", (96, 96), 1)):
        for number in range(count):
            draw(tmp_path / f"{place}/{number}.png", size, seed=50 + number).with_suffix(".txt").write_text("a dog")
    path = tmp_path / "dataset.toml"
    path.write_text('[image]\nresolution = 96\nstep = 16\n[[source]]\npath = "photos"\nrepeats = 3\n'
                    '[[source]]\npath = "reg"\nrole = "prior"\nweight = 0.5\n'
                    '[[source]]\npath = "val"\nrole = "validation"\n')
    return path


def test_encode_and_bucket_agree(prep, recipe, tiny_model, tmp_path):
    result = prep("encode", recipe, "--model", tiny_model, "--cache", tmp_path / "c", "-o", tmp_path / "m.json",
                  "--device", "cpu")
    said = "the 2 regularization pictures are shown 24 times per epoch in total, as often as the training pictures"
    assert result.code == 0 and said in result.err, result.err
    samples = open_manifest(read_manifest(tmp_path / "m.json")).samples
    shown = {name: sum(int(samples.repeats[place]) for place in range(len(samples.repeats))
                       if samples.source[place] == number) for number, name in enumerate(["train", "prior", "val"])}
    assert shown == {"train": 24, "prior": 24, "val": 1}
    seen = prep("bucket", recipe, "--json")
    assert said in seen.err and sum(one["showings"] for one in seen.json["buckets"]) == 48
    assert said not in prep("bucket", recipe, "--quiet").err


def test_those_that_are_too_many_are_left_out(prep, recipe, tiny_model, tmp_path):
    recipe.write_text(recipe.read_text().replace('"photos"\nrepeats = 3', '"val"\nrepeats = 1'))
    seen = prep("bucket", recipe, "--json", "--suggest")
    assert ("note: the regularization picture is shown 1 time per epoch in total, as often as the training pictures; "
            "1 of 2 are skipped") in seen.err
    assert sum(one["showings"] for one in seen.json["buckets"]) == 2
