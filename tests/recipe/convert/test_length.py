"""A converted run of OneTrainer is as long as it is there, and has the same shares of its concepts.

OneTrainer shows floor(pictures x balancing) samples of a concept in an epoch, or a number of samples, and draws one of
several resolutions for each of them (mgds: VariationSorting, AspectBucketing).
"""

from __future__ import annotations

import json
import tomllib
from math import floor

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pictures import draw

from prep.recipe.convert.detect import convert
from train.config.load import parse

COUNTS = (1, 3, 8, 40)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("length")
    for count in COUNTS:
        for number in range(count):
            draw(place / f"of{count}" / f"{number}.png", (16, 16), seed=0)
    return place


def converted(folder, concepts, **values):
    (folder / "c.json").write_text(json.dumps({"concepts": concepts, "training_method": "LORA", **values}))
    found = convert(folder / "c.json")
    return found, parse(tomllib.loads(found.training.rendered("x")), "train.toml")


def shown(found, roles=("train",)):
    """Samples of each source in an epoch here, at all resolutions."""
    recipe = found.recipe
    return [int(one.path.name[2:]) * one.repeats * len(recipe.image.resolutions)
            for one in recipe.sources if one.role in roles]


ONE = st.tuples(st.sampled_from(COUNTS), st.one_of(
    st.sampled_from((1.0, 2.0, 0.5, 0.25, 1.5, 0.01, 3.0, 0.05)).map(lambda times: ("REPEATS", times)),
    st.sampled_from((1, 2, 10, 100)).map(lambda count: ("SAMPLES", float(count)))))


@given(ones=st.lists(ONE, min_size=1, max_size=3), epochs=st.sampled_from((1, 7, 10, 120)),
       batch=st.sampled_from((1, 2, 4)), accumulated=st.sampled_from((1, 3)),
       resolution=st.sampled_from(("64", "64,128", "64,96,128")))
def test_steps_and_shares_are_those_of_onetrainer(folder, ones, epochs, batch, accumulated, resolution):
    theirs = [int(times) if kind == "SAMPLES" else floor(count * times) for count, (kind, times) in ones]
    assume(all(theirs))
    concepts = [{"path": f"of{count}", "balancing": times, "balancing_strategy": kind} for count, (kind, times) in ones]
    found, config = converted(folder, concepts, epochs=epochs, batch_size=batch, resolution=resolution,
                              gradient_accumulation_steps=accumulated, sample_after=1, sample_after_unit="EPOCH")
    ours, size = shown(found), batch * accumulated
    steps = config.steps if config.steps is not None else config.epochs * sum(ours) / size
    assert steps == pytest.approx(epochs * sum(theirs) / size, abs=1) and config.batch_size == size
    between = config.sample.every
    between = int(between.split()[0]) * sum(ours) / size if isinstance(between, str) else between
    assert between == pytest.approx(sum(theirs) / size, abs=1)
    for here, there in zip(ours, theirs, strict=True):  # floor(pictures x balancing) is not the balancing itself
        assert here / sum(ours) == pytest.approx(there / sum(theirs), abs=0.01) or any(
            "there; fewer files, or an exclude" in one.said for one in found.notes)


def test_a_share_of_class_pictures(folder):
    concepts = [{"path": "of3"}, {"path": "of40", "balancing": 0.1}]
    found, config = converted(folder, concepts, epochs=10)
    assert [one.repeats for one in found.recipe.sources] == [10, 1] and config.epochs == 1
    said = {one.key: one.said for one in (*found.notes, *found.training.notes)}
    assert said["concepts[1].balancing"] == "repeats = 1 is written: 0.571 of the samples of an epoch, as there"
    assert said["epochs"] == ("an epoch here shows 10 times as many samples as one there: 1 of its epochs are as long, "
                              "and are written")
    config = converted(folder, concepts, epochs=15)[1]
    assert (config.epochs, config.steps) == (None, 15 * 7)


def test_prior_concepts_are_as_many_as_the_rest(folder):
    found, config = converted(folder, [{"path": "of8"}, {"path": "of40", "type": "PRIOR_PREDICTION", "balancing": 0.1}],
                              epochs=4)
    assert shown(found) == [8] and config.epochs == 3, "8 + 4 samples there, 8 + 8 here"
    said = {one.key: one.said for one in found.notes}
    assert said["concepts[1].balancing"] == ("repeats = 1 is written: 0.5 of the samples of an epoch, 0.333 there; "
                                             "fewer files, or an exclude, make it less")


def test_pictures_that_cannot_be_counted_leave_the_epochs(folder):
    found, config = converted(folder, [{"path": "nowhere", "balancing": 0.5}], epochs=10, resolution="64,128")
    assert config.epochs == 10
    assert {one.key: one.said for one in found.training.notes}["epochs"] == (
        "an epoch here shows 4 times as many samples as one there: divide by that, which is not done here, since no "
        "pictures were found to count")
    (folder / "list.json").write_text(json.dumps([{"path": "of3", "balancing": 0.4}]))
    assert "divide the epochs by that" in str(convert(folder / "list.json").notes)


def test_the_size_of_the_file_comes_before_that_of_a_concept(folder):
    own = {"enable_resolution_override": True, "resolution_override": "96x64"}
    found, _ = converted(folder, [{"path": "of3", "image": own}, {"path": "of8"}], resolution="128x128")
    assert (found.recipe.image.buckets, found.recipe.image.sizes) == ("list", ("128x128",))
    assert "make another recipe for this value" in {one.key: one.said for one in found.notes}["concepts[0]: sizes"]
