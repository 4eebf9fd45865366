"""Buckets: the lists people know, the nearest by exact fractions, and placements that always cover."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.buckets.assign import Merge, assign, assign_buckets
from prep.buckets.sizes import Rules, buckets_of, default_ends, ratio_buckets, sdxl_buckets, step_buckets
from prep.errors import ConfigError
from prep.geometry import Size, cover, enlarges, nearest

SIDE = st.integers(1, 5000)
SIZE = st.tuples(SIDE, SIDE)

# One half of each list as people print it; the other half is the mirror.
KOHYA_1024 = """256x2048 320x2048 384x2048 448x2048 512x1856 512x1920 512x1984 512x2048 576x1664 576x1728 576x1792
640x1536 640x1600 704x1408 704x1472 768x1280 768x1344 832x1216 896x1152 960x1088 1024x1024"""
KOHYA_512 = "256x832 256x896 256x960 256x1024 320x704 320x768 384x640 448x576 512x512"
RATIO_1024 = "512x2048 576x1792 576x1920 640x1600 704x1472 768x1344 832x1280 896x1152 1024x1024"
RATIO_512 = "256x960 256x1024 320x832 320x896 384x704 448x576 448x640 512x512"
# Appendix I of the SDXL paper, height x width, all 40.
SDXL = """512x2048 512x1984 512x1920 512x1856 576x1792 576x1728 576x1664 640x1600 640x1536 704x1472 704x1408 704x1344
768x1344 768x1280 832x1216 832x1152 896x1152 896x1088 960x1088 960x1024 1024x1024 1024x960 1088x960 1088x896 1152x896
1152x832 1216x832 1280x768 1344x768 1408x704 1472x704 1536x640 1600x640 1664x576 1728x576 1792x576 1856x512 1920x512
1984x512 2048x512"""


def sizes(text: str) -> set[Size]:
    """The sizes in `text`, first side first."""
    return {(int(one.split("x")[0]), int(one.split("x")[1])) for one in text.split()}


def mirrored(text: str) -> set[Size]:
    """The sizes in `text`, both ways up."""
    return sizes(text) | {(height, width) for width, height in sizes(text)}


def rules(**overrides: object) -> Rules:
    """Rules for 512, but for `overrides`."""
    return Rules(**{"resolution": 512, **overrides})  # type: ignore[arg-type]


@pytest.mark.parametrize(("resolution", "ends", "wanted", "count"), [
    (1024, (256, 2048), KOHYA_1024, 41),
    (512, (256, 1024), KOHYA_512, 17),
])
def test_step_buckets_are_the_ones_people_know(resolution, ends, wanted, count):
    found = step_buckets(resolution, 64, *ends)
    assert set(found) == mirrored(wanted)
    assert len(found) == count
    assert default_ends(resolution, 64) == ends


def test_a_longest_side_at_the_resolution_gives_the_25_small_ones():
    assert len(step_buckets(1024, 64, 256, 1024)) == 25


def test_ends_fit_small_and_large_resolutions():
    assert default_ends(64, 8) == (32, 128)
    assert default_ends(2048, 64) == (512, 4096)
    assert default_ends(64, 64) == (64, 128)


@pytest.mark.parametrize(("resolution", "wanted", "count"), [(1024, RATIO_1024, 17), (512, RATIO_512, 15)])
def test_ratio_buckets(resolution, wanted, count):
    assert set(ratio_buckets(resolution, 64)) == mirrored(wanted)
    assert len(ratio_buckets(resolution, 64)) == count


def test_sdxl_buckets_are_the_papers_forty():
    assert {(height, width) for width, height in sdxl_buckets()} == sizes(SDXL)
    assert len(sdxl_buckets()) == 40


def test_single_and_list():
    assert buckets_of(rules(kind="single")) == ((512, 512),)
    assert buckets_of(rules(kind="list", sizes=((512, 512), (384, 640), (512, 512)))) == ((384, 640), (512, 512))


@pytest.mark.parametrize(("overrides", "message"), [
    ({"step": 0}, "image.step is 0, expected at least 1"),
    ({"min_bucket": 0}, "image.min_bucket is 0, expected at least 1"),
    ({"min_side": -1}, "image.min_side is -1, expected 0 (the default) to 32768"),
    *(({name: 10**12}, f"image.{name} is 1000000000000, expected 0 (the default) to 32768")
      for name in ("shortest", "longest", "min_side")),
    ({"resolution": 10**12}, "image.resolution is 1000000000000, expected at most 16384"),
    ({"resolution": 32}, "image.resolution is 32, expected at least the step, 64"),
    ({"shortest": 100}, "image.shortest is 100, expected a multiple of 64 up to the longest side, 1024"),
    ({"longest": 128}, "image.shortest is 256, expected a multiple of 64 up to the longest side, 128"),
    ({"kind": "sdxl-40"}, "image.buckets is 'sdxl-40' and image.resolution 512, expected 1024"),
    ({"kind": "list"}, "image.buckets is 'list' and there are no sizes, expected at least one"),
    ({"kind": "single", "resolution": 500}, "bucket 500x500 of kind 'single' does not fit: expected sides that are "
                                            "multiples of 64"),
])
def test_rules_that_make_no_sense(overrides, message):
    with pytest.raises(ConfigError) as caught:
        buckets_of(rules(**overrides))
    assert caught.value.message == message


def test_a_listed_size_that_does_not_fit_is_to_be_changed_in_the_list():
    with pytest.raises(ConfigError, match="bucket 333x500 of kind 'list' does not fit") as caught:
        buckets_of(rules(kind="list", sizes=((333, 500),)))
    assert caught.value.hint == "change image.sizes or image.step"


@given(SIZE, st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=8))
def test_nearest_agrees_with_fractions_in_any_order(size, buckets):
    def far(bucket: Size) -> tuple[Fraction, int, Size]:
        quotient = Fraction(size[0] * bucket[1], size[1] * bucket[0])
        return max(quotient, 1 / quotient), -bucket[0] * bucket[1], bucket

    assert nearest(size, buckets) == nearest(size, buckets[::-1]) == min(buckets, key=far)


def test_nearest_is_in_logs_not_in_ratios():
    # 2.5 is 1.5 from 1 and from 4, but closer to 4 in logs
    assert nearest((2500, 1000), [(512, 512), (1024, 256)]) == (1024, 256)


def test_ties_go_to_the_larger_then_the_narrower():
    assert nearest((100, 100), [(64, 64), (128, 128)]) == (128, 128)
    assert nearest((100, 100), [(128, 64), (64, 128)]) == (64, 128)


@given(SIZE, SIZE)
def test_a_placement_covers_its_bucket_by_the_least(size, bucket):
    placed = cover(size, bucket)
    for axis in (0, 1):
        assert placed.scaled[axis] >= bucket[axis]
        assert placed.crop[axis] >= 0
        assert placed.scaled[axis] - bucket[axis] - 2 * placed.crop[axis] in (0, 1)
    assert placed.scaled[0] == bucket[0] or placed.scaled[1] == bucket[1]
    scale = max(Fraction(bucket[0], size[0]), Fraction(bucket[1], size[1]))
    assert all(abs(placed.scaled[axis] - scale * size[axis]) <= Fraction(1, 2) for axis in (0, 1))


@given(SIZE, st.sampled_from(["step", "ratio", "sdxl-40", "single"]), st.sampled_from([8, 16, 64]))
def test_no_picture_is_enlarged_unless_asked(size, kind, step):
    if kind in ("ratio", "step"):
        asked = rules(kind=kind, step=step, resolution=256)
    else:
        asked = rules(kind=kind, step=step, resolution=1024)
    result = assign_buckets([("a.png", size)], asked)
    for one in result.pictures:
        assert not one.upscaled
        assert one.scale <= 1
        assert all(side % step == 0 for side in one.placement.bucket)
        kept = one.placement.bucket[0] * one.placement.bucket[1] / (one.placement.scaled[0] * one.placement.scaled[1])
        assert one.crop_loss == pytest.approx(100 * (1 - kept))
    assert len(result.pictures) + len(result.findings) == 1
    if min(size) >= step and kind != "single":
        assert result.pictures


def test_small_pictures_get_a_bucket_of_their_own_area():
    buckets = buckets_of(rules(resolution=1024))
    own = {size: assign(size, buckets, rules(resolution=1024)) for size in
           [(1020, 1020), (700, 500), (1000, 127), (4000, 200), (64, 64)]}
    assert own == {(1020, 1020): (960, 960), (700, 500): (640, 448), (1000, 127): (512, 64), (4000, 200): (2048, 128),
                   (64, 64): (64, 64)}


@given(SIZE)
def test_an_own_bucket_keeps_to_the_area_and_the_longest_side(size):
    asked = rules(resolution=256, step=8)
    bucket = assign(size, buckets_of(asked), asked)
    if bucket is not None:
        assert bucket[0] * bucket[1] <= 256 * 256
        assert max(bucket) <= 512


def test_upscaling_when_asked():
    (one,) = assign_buckets([("a.png", (256, 256))], rules(upscale="allow")).pictures
    assert one.placement.bucket == (512, 512)
    assert one.upscaled
    assert one.scale == 2


@pytest.mark.parametrize(("asked", "size", "detail"), [
    (rules(), (63, 900), "picture is 63x900, expected at least 64 pixels on the short side"),
    (rules(min_side=300), (900, 299), "picture is 900x299, expected at least 300 pixels on the short side"),
    (rules(kind="single"), (600, 500),
     "picture is 600x500, expected one that needs no enlarging for a bucket of kind 'single'"),
])
def test_too_small_is_a_finding(asked, size, detail):
    result = assign_buckets([("a.png", size)], asked)
    assert not result.pictures
    (finding,) = result.findings
    assert (finding.path, finding.code, finding.severity, finding.detail) == ("a.png", "too-small", "error", detail)


def test_pictures_keep_their_order_and_index():
    result = assign_buckets([("b", (512, 512)), ("small", (9, 9)), ("a", (640, 384))], rules())
    assert [(one.index, one.name) for one in result.pictures] == [(0, "b"), (2, "a")]
    assert result.buckets == ((512, 512), (640, 384))


def test_small_buckets_merge_into_the_nearest():
    pictures = [("a", (512, 512)), ("b", (512, 512)), ("c", (600, 600)), ("d", (640, 512))]
    result = assign_buckets(pictures, rules(min_bucket=2))
    assert result.merges == (Merge(bucket=(576, 448), into=(512, 512), pictures=1),)
    assert {one.placement.bucket for one in result.pictures} == {(512, 512)}
    assert not result.findings


def test_merges_chain_and_every_move_ends_in_a_bucket_that_exists():
    pictures = [(f"{ratio}", (512 * ratio // 4, 512 * 4 // ratio * 2)) for ratio in range(4, 9)]
    result = assign_buckets(pictures, rules(min_bucket=5))
    assert sum(merge.pictures for merge in result.merges) >= 1
    assert {one.placement.bucket for one in result.pictures} == set(result.buckets)


def test_a_small_bucket_that_nothing_can_take_stays_and_is_said():
    # the thumbnail is too small for the other bucket, and the other one would shrink to a thumbnail
    result = assign_buckets([("big", (512, 512)), ("thumb", (64, 64))], rules(min_bucket=2))
    assert result.buckets == ((64, 64), (512, 512))
    assert [(one.path, one.code, one.severity) for one in result.findings] == [
        ("big", "small-bucket", "warning"), ("thumb", "small-bucket", "warning")]
    assert result.findings[0].detail == ("bucket 512x512 has 1 of at least 2 pictures wanted, and no other bucket can "
                                         "take them")


def test_with_upscaling_the_thumbnail_goes_along():
    result = assign_buckets([("big", (512, 512)), ("thumb", (64, 80))], rules(min_bucket=2, upscale="allow"))
    assert len(result.buckets) == 1
    assert not result.findings


@given(st.lists(SIZE, max_size=30), st.integers(1, 6), st.sampled_from(["never", "allow"]))
def test_merging_loses_nobody_and_never_enlarges_unasked(given_sizes, min_bucket, upscale):
    asked = rules(resolution=256, step=16, min_bucket=min_bucket, upscale=upscale)
    named = [(str(number), size) for number, size in enumerate(given_sizes)]
    result, again = assign_buckets(named, asked), assign_buckets(named[::-1], asked)
    assert len(result.pictures) == sum(min(size) >= 16 for size in given_sizes)
    assert upscale == "allow" or not any(enlarges(one.size, one.placement.bucket) for one in result.pictures)
    assert {one.name: one.placement for one in result.pictures} == {one.name: one.placement for one in again.pictures}
