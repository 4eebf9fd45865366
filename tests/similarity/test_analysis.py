"""An analysis names look-alikes, leaks, outliers, uneven shares and captions that do not fit, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prep.findings import CODES
from prep.setting import check_values
from prep.similarity import analysis
from prep.similarity.analysis import analyze
from prep.similarity.captions import Captions, fits
from prep.similarity.duplicates import ALWAYS, threshold
from prep.similarity.options import SimilarityOptions
from prep.similarity.outliers import outliers
from prep.similarity.shares import Picture
from prep.similarity.vectors import vectors_of

WIDTH = 48
OPTIONS = SimilarityOptions()


def half(rows):
    rows = np.asarray(rows, float)
    return (rows / np.linalg.norm(rows, axis=1, keepdims=True)).astype(np.float16)


def clumps(sizes, spread=0.1, seed=0, base=0.0):
    """Rows around orthogonal middles; `base` is added to all, as with models whose cosines are all high."""
    rng = np.random.default_rng(seed)
    middles = np.eye(len(sizes), WIDTH)
    return np.concatenate([middles[number] + base * np.ones(WIDTH) / np.sqrt(WIDTH) + spread * rng.normal(
        size=(size, WIDTH)) for number, size in enumerate(sizes)])


def pictures_of(count, **values):
    return [Picture(name=f"photos/{number:03}.jpg", size=(640, 480), **values) for number in range(count)]


def said(found, code):
    return [(each.path, each.other) for each in found.findings if each.code == code]


@pytest.mark.parametrize("base", [0.0, 1.0, 3.0], ids=["spread cosines", "high ones", "very high ones"])
def test_copies_are_found_and_others_are_not_whatever_the_model(base):
    rows = clumps((20, 20, 20), base=base)
    copies = rows[[3, 25, 25]] + 0.005 * np.random.default_rng(9).normal(size=(3, WIDTH))
    pictures = [*pictures_of(60), Picture(name="photos/003-copy.jpg", size=(640, 480)),
                Picture(name="photos/bigger.jpg", size=(1280, 960)),
                Picture(name="photos/025 (1).jpg", size=(640, 480))]
    found = analyze(pictures, half([*rows, *copies]), OPTIONS)
    assert said(found, "semantic-duplicate") == [
        ("photos/003-copy.jpg", "photos/003.jpg"), ("photos/025 (1).jpg", "photos/bigger.jpg"),
        ("photos/025.jpg", "photos/bigger.jpg")]
    first = found.findings[0]
    assert (first.severity, first.detail) == (
        "info", f"shows nearly the same as photos/003.jpg (cosine {first.likeness:.3f})")
    assert {each.kept: [name for name, _ in each.others] for each in found.look_alikes} == {
        "photos/003.jpg": ["photos/003-copy.jpg"], "photos/bigger.jpg": ["photos/025.jpg", "photos/025 (1).jpg"]}
    assert found.threshold == threshold(found.mean, OPTIONS.near) <= ALWAYS
    again = analyze(pictures, half([*rows, *copies]), OPTIONS, copies={"photos/003-copy.jpg"})
    assert [path for path, _ in said(again, "semantic-duplicate")] == ["photos/025 (1).jpg", "photos/025.jpg"]


def test_two_of_a_kind_are_found_without_others():
    rows = half([[1, 0, 0], [1, 0.01, 0], [1, 0.4, 0]])
    assert said(analyze(pictures_of(3), rows, OPTIONS), "semantic-duplicate") == [("photos/001.jpg", "photos/000.jpg")]
    assert analyze([], np.zeros((0, 3), np.float16), OPTIONS).findings == ()
    assert analyze(pictures_of(1), rows[:1], OPTIONS).clusters[0].medoid == "photos/000.jpg"


def test_a_held_out_picture_leaks_whatever_its_rank():
    rows = clumps((15, 15))
    rows[29], rows[28] = rows[2] + 0.001, rows[27] + 0.001
    pictures = pictures_of(30)
    for number in (2, 27, 28):  # 27 and 28 are near-duplicates, both held out
        pictures[number] = replace(pictures[number], role="validation")
    found = analyze(pictures, half(rows), OPTIONS)
    assert said(found, "validation-leak") == [("photos/002.jpg", "photos/029.jpg")]
    assert said(found, "semantic-duplicate") == [("photos/028.jpg", "photos/027.jpg")]
    (detail,) = [each.detail for each in found.findings if each.code == "validation-leak"]
    assert detail == "held out, but shows nearly the same as photos/029.jpg, which trains (cosine 1.000)"


def test_outliers_are_far_and_a_uniform_set_has_none():
    rows = [*clumps((30, 30)), *np.eye(2, WIDTH)[:, ::-1]]
    found = analyze(pictures_of(62), half(rows), OPTIONS)
    assert [path for path, _ in said(found, "outlier")] == ["photos/060.jpg", "photos/061.jpg"]
    (first, _) = [each.detail for each in found.findings if each.code == "outlier"]
    assert first.startswith("mean cosine 0.") and "with its 8 nearest pictures, the median of all is 0." in first
    uniform = np.ones((40, WIDTH)) + 1e-3 * np.random.default_rng(0).normal(size=(40, WIDTH))
    uniform[7] += 0.1 * np.eye(WIDTH)[0]
    assert said(analyze(pictures_of(40), half(uniform), OPTIONS), "outlier") == []  # far by deviations, near by cosine
    assert said(analyze(pictures_of(16), half(rows[-16:]), OPTIONS), "outlier") == []  # too few


@given(st.lists(st.floats(-1, 1, width=16), max_size=30), st.floats(0, 5), st.floats(0, 1))
def test_outliers_are_below_the_median_by_both_measures(values, deviations, gap):
    found, median = outliers(np.array(values), deviations=deviations, gap=gap)
    middle = float(np.median(values)) if values else 0.0
    spread = 1.4826 * float(np.median([abs(value - middle) for value in values])) if values else 0.0
    assert median == middle
    assert sorted(found.tolist()) == [number for number, value in enumerate(values)
                                      if middle - value > deviations * spread and middle - value > gap]


def test_shares_count_repeats_and_sources():
    rows = clumps((40, 6, 6, 6, 10))
    pictures = [replace(picture, source="many" if number < 58 else "few", repeats=20.0 if number >= 58 else 1.0)
                for number, picture in enumerate(pictures_of(68))]
    pictures[0] = replace(pictures[0], role="validation", repeats=1000.0)
    found = analyze(pictures, half(rows), replace(OPTIONS, clusters=5, dominance=3.0))
    assert [cluster.pictures for cluster in found.clusters] == [40, 10, 6, 6, 6]
    assert [round(cluster.share, 3) for cluster in found.clusters] == [0.152, 0.778, 0.023, 0.023, 0.023]
    assert [cluster.sources for cluster in found.clusters[:2]] == [(("many", 40),), (("few", 10),)]
    (dominant,) = [each for each in found.findings if each.code == "dominant-cluster"]
    assert dominant.path == found.clusters[1].medoid in {picture.name for picture in pictures[58:]}
    assert dominant.detail == ("pictures like it take 78% of an epoch and are 15% of all; an equal share of 5 clusters "
                               "is 20%")
    (uniform,) = [each for each in found.findings if each.code == "uniform-source"]
    assert (uniform.path, uniform.detail) == (
        "few", f"its 10 pictures all resemble {found.clusters[1].medoid}: 78% of an epoch")
    assert [(spread.source, spread.pictures, spread.clusters, round(spread.part, 2)) for spread in found.sources] == [
        ("few", 10, 1, 1.0), ("many", 58, 4, 0.69)]
    assert len(found.clusters[0].examples) == 11 and found.clusters[0].medoid not in found.clusters[0].examples


def set_of(count, *, seed=0, shared=0.0, specific=1.0, apart=1.0):
    """Rows of pictures and captions: both have a direction of their own, `apart`, as CLIP's and SigLIP's do; `shared`
    is what all pictures show, `specific` how much a caption says of its own."""
    rng = np.random.default_rng(seed)
    ways = rng.normal(size=(3, WIDTH)) / np.sqrt(WIDTH)
    shown, noise = (rng.normal(size=(count, WIDTH)) / np.sqrt(WIDTH) for _ in range(2))
    return (half(apart * ways[0] + shared * ways[2] + shown),
            half(apart * ways[1] + shared * ways[2] + specific * shown + 0.5 * noise))


def captions_of(texts, of=None):
    return Captions(texts=[f"caption {number}" for number in range(len(texts))], rows=texts,
                    of=[[number] for number in range(len(texts))] if of is None else of)


@pytest.mark.parametrize("apart", [0.0, 1.0, 4.0], ids=["one space", "CLIP's gap", "a wide gap"])
@pytest.mark.parametrize(("count", "shared"), [(30, 2.0), (60, 0.0), (300, 2.0), (300, 0.0)])
def test_planted_misfits_are_named_and_hardly_others_whatever_the_model(count, shared, apart):
    hits = wrong = 0
    for seed in range(8):
        rows, texts = set_of(count, seed=seed, shared=shared, apart=apart)
        texts[[4, 11, 20]] = texts[[11, 20, 4]]
        found = analyze(pictures_of(count), rows, OPTIONS, captions=captions_of(texts))
        named = {path for path, _ in said(found, "caption-misfit")}
        planted = {f"photos/{number:03}.jpg" for number in (4, 11, 20)}
        hits, wrong = hits + len(named & planted), wrong + len(named - planted)
    assert hits >= 0.6 * 24 and wrong <= 0.02 * 8 * count, (hits, wrong)  # a quarter of them fit by chance


def test_captions_that_say_little_are_not_named_and_captions_of_others_are_said_once():
    for count in (24, 60, 300):
        rows, texts = set_of(count, shared=2.0, specific=0.15)
        vague = said(analyze(pictures_of(count), rows, OPTIONS, captions=captions_of(texts)), "caption-misfit")
        assert len(vague) <= 0.06 * count
        rows, texts = set_of(count)
        found = analyze(pictures_of(count), rows, OPTIONS, captions=captions_of(np.roll(texts, 1, axis=0)))
        ((path, detail),) = [(each.path, each.detail) for each in found.findings if each.code == "caption-misfit"]
        assert path == "." and detail.endswith("% of random pictures are nearer to half of the captions than their own "
                                               "pictures: these captions say much the same of all, or are those of "
                                               "other pictures")
        assert not said(analyze(pictures_of(20), rows[:20], OPTIONS, captions=captions_of(
            np.roll(texts[:20], 1, axis=0))), "caption-misfit")  # too few others
    same = half(np.ones((60, WIDTH)))
    assert not said(analyze(pictures_of(60), half(np.ones((60, WIDTH))), OPTIONS, captions=captions_of(
        set_of(60)[1])), "caption-misfit")
    assert not said(analyze(pictures_of(60), set_of(60)[0], OPTIONS, captions=captions_of(same)), "caption-misfit")


def test_of_several_captions_the_worst_is_named_and_shared_ones_are_of_all():
    rows, texts = set_of(60)
    every, own = np.concatenate([texts, texts[[30]]]), [[number] for number in range(60)]
    own[4], own[7], own[9] = [4, 60], [7], []
    every[60] = half(-rows[[4]].astype(float) + 0.1)[0]  # the opposite of what it shows
    for number in range(12, 20):
        own[number] = [12]  # one caption of many
    captions = captions_of(every, own)
    found = analyze(pictures_of(60), rows, OPTIONS, captions=captions)
    (detail,) = [each.detail for each in found.findings if each.path == "photos/004.jpg"]
    assert detail.endswith("% of random pictures are nearer to its caption 'caption 60'")
    assert "photos/009.jpg" not in {path for path, _ in said(found, "caption-misfit")}
    owners = np.array([picture for picture, each in enumerate(own) for _ in each])
    numbers = np.array([caption for each in own for caption in each])
    nearer, lead = fits(vectors_of(rows), vectors_of(every), owners, numbers)
    pictures, words = rows.astype(float), every.astype(float)
    scores = (pictures @ (words - words.mean(axis=0)).T) / np.linalg.norm(pictures, axis=1, keepdims=True)
    for place in range(len(numbers)):
        others = [one for one in range(60) if numbers[place] not in own[one]]
        against, mine = scores[others, numbers[place]], scores[owners[place], numbers[place]]
        assert nearer[place] == pytest.approx((against > mine).mean())
        spread = 1.4826 * np.median(np.abs(against - np.median(against)))
        assert lead[place] == pytest.approx((mine - np.median(against)) / spread, abs=1e-2)


@settings(max_examples=25)
@given(st.lists(st.tuples(*[st.integers(-2, 2)] * 3).filter(any), min_size=1, max_size=40), st.randoms(), st.data())
def test_an_analysis_does_not_depend_on_the_order_of_pictures(directions, random, data):
    roles, repeats = st.sampled_from(["train", "validation", "prior"]), st.integers(1, 3)
    pictures = [Picture(name=f"{number}.png", size=data.draw(st.sampled_from([(9, 9), (8, 8)])), role=data.draw(roles),
                        source=data.draw(st.sampled_from("ab")), repeats=data.draw(repeats))
                for number in range(len(directions))]
    rows, order = half(directions), list(range(len(directions)))
    own = captions_of(half([each[::-1] for each in directions]))
    random.shuffle(order)
    options, ticked = SimilarityOptions(neighbors=2, clusters=3), []
    found = analyze(pictures, rows, options, captions=own, tick=ticked.append)
    assert analyze([pictures[one] for one in order], rows[order], options,
                   captions=replace(own, of=[own.of[one] for one in order])) == found
    assert sum(ticked) == len(pictures)


def test_more_pictures_than_the_limit_are_compared_within_clusters(monkeypatch):
    rows = clumps((20, 20, 20))
    rows[3] = rows[4] + 0.001
    whole = analyze(pictures_of(60), half(rows), replace(OPTIONS, clusters=3))
    monkeypatch.setattr(analysis, "LIMIT", 50)
    parts = analyze(pictures_of(60), half(rows), replace(OPTIONS, clusters=3))
    assert said(parts, "semantic-duplicate") == [("photos/004.jpg", "photos/003.jpg")]
    (limited,) = [each for each in parts.findings if each.code == "neighbors-limited"]
    assert limited.detail == ("60 pictures, more than 50: each is compared with those of its cluster, of 3; what "
                              "resembles it in another one is missed")
    assert replace(parts, findings=()) == replace(whole, findings=())


def test_nothing_is_an_error_and_settings_are_bounded():
    codes = ("semantic-duplicate", "validation-leak", "outlier", "dominant-cluster", "uniform-source", "caption-misfit",
             "neighbors-limited")
    assert {CODES[code][0] for code in codes} == {"info"}
    check_values(OPTIONS)
    with pytest.raises(ValueError, match="neighbors"):
        check_values(SimilarityOptions(neighbors=0))
