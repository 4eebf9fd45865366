"""Thousands of random sizes under every kind of buckets, policy, crop and flip: everybody is somewhere, and inside."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from walking import item_of

from prep.buckets.assign import assign_buckets
from prep.buckets.sizes import Rules
from prep.buckets.views import CROPS, FLIPS, Framing
from prep.dataset.bucketing import with_views
from prep.dataset.ingest import KnownItem
from prep.geometry import ONE

AT_ONCE = 100  # sizes of an example
SIDE = st.integers(1, 400) | st.integers(200, 1500) | st.integers(1000, 9000)
SIZES = st.lists(st.tuples(SIDE, SIDE), min_size=AT_ONCE, max_size=AT_ONCE)
FOCUS = st.none() | st.tuples(st.integers(0, ONE), st.integers(0, ONE))
KINDS = [{"kind": "step"}, {"kind": "ratio"}, {"kind": "single"}, {"kind": "sdxl-40", "resolution": 1024},
         {"kind": "list", "sizes": ((512, 512), (384, 640), (1024, 256))}]
RULES = st.builds(
    lambda kind, **rest: Rules(**{"resolution": 512, **rest, **kind}),
    st.sampled_from(KINDS), upscale=st.sampled_from(["never", "allow", "reject", Fraction("1.5")]),
    min_bucket=st.integers(1, 8))
FRAMINGS = st.builds(Framing, crop=st.sampled_from(CROPS), views=st.integers(1, 5), flip=st.sampled_from(FLIPS))


def check(sizes, rules, framing, focus, several):
    """All that must hold of the bucketing of these sizes."""
    items = [KnownItem(item=item_of(str(number)), size=size,
                       picture=f"{number:064x}", has_alpha=False, captions=(), mask=None, focus=focus)
             for number, size in enumerate(sizes)]  # fmt: skip
    more = (Rules(resolution=1024, upscale=rules.upscale, min_bucket=rules.min_bucket),) if several else ()
    found = with_views(assign_buckets([(one.item.name, one.size) for one in items], rules, *more), items, framing)
    refused = {one.path for one in found.findings if one.code == "too-small"}
    assert {one.name for one in found.pictures} | refused == {one.item.name for one in items}
    assert not {one.name for one in found.pictures} & refused
    assert set(Counter((one.name, one.placement.bucket) for one in found.pictures).values()) <= {1}
    for one in found.pictures:
        check_views(one, rules)
        assert len(one.views) <= framing.views * 2 and len(set(one.views)) == len(one.views)


def check_views(one, rules):
    (width, height), (wide, high), (across, down) = one.size, one.placement.scaled, one.placement.bucket
    assert across % 64 == down % 64 == 0 and (wide == across or high == down) and wide >= across and high >= down
    scale = max(Fraction(across, width), Fraction(down, height))
    assert abs(wide - scale * width) <= Fraction(1, 2) and abs(high - scale * height) <= Fraction(1, 2)
    assert one.scale == pytest.approx(float(scale)) and one.upscaled == (scale > 1)
    most = {"never": 1, "reject": 1, "allow": None}.get(rules.upscale, rules.upscale)
    assert most is None or scale <= most
    assert one.crop_loss == pytest.approx(float(100 * (1 - Fraction(across * down, wide * high))))
    for view in one.views:
        assert (view.scaled, view.bucket) == (one.placement.scaled, one.placement.bucket)
        left, top = view.crop
        assert 0 <= left <= wide - across and 0 <= top <= high - down


@given(SIZES, RULES, FRAMINGS, FOCUS, st.booleans())
@settings(max_examples=2_000 // AT_ONCE)
def test_two_thousand_sizes(sizes, rules, framing, focus, several):
    check(sizes, rules, framing, focus, several and rules.kind in ("step", "ratio", "single"))


@pytest.mark.slow
@given(SIZES, RULES, FRAMINGS, FOCUS, st.booleans())
@settings(max_examples=20_000 // AT_ONCE)
def test_twenty_thousand_sizes(sizes, rules, framing, focus, several):
    check(sizes, rules, framing, focus, several and rules.kind in ("step", "ratio", "single"))
