"""What caches of sd-scripts say is read as sd-scripts means it."""

from __future__ import annotations

import io

import numpy as np
import pytest
import sd_scripts
from hypothesis import given
from hypothesis import strategies as st

from prep.export.kohya import crop_ltrb
from prep.geometry import Placement, cover
from prep.imports.kohya import barred, cache_names, npz_facts, placement_of, size_in_name

SIDES = st.integers(64, 4000)
SIZES = st.tuples(SIDES, SIDES)


@given(SIZES)
def test_the_crop_is_that_of_sd_scripts(size):
    reso, resized = sd_scripts.select_bucket(*size, sd_scripts.buckets(512, 64))
    ltrb = sd_scripts.get_crop_ltrb(reso, size)
    assert barred(size, reso) == ltrb
    placement = placement_of(size, reso, ltrb, unscaled=False)
    assert placement is not None
    assert all(abs(mine - theirs) <= 1 for mine, theirs in zip(placement.scaled, resized, strict=True))
    left, top = ((side - cut) // 2 for side, cut in zip(placement.scaled, reso, strict=True))
    assert placement.crop == (left, top)


@given(st.tuples(st.integers(64, 512), st.integers(64, 512)))
def test_pictures_that_were_not_scaled(size):
    reso, resized = sd_scripts.select_unscaled(*size, 64)
    placement = placement_of(size, reso, sd_scripts.get_crop_ltrb(reso, size), unscaled=True)
    crop = (size[0] - reso[0]) // 2, (size[1] - reso[1]) // 2
    assert placement == Placement(scaled=resized, crop=crop, bucket=reso)


@given(SIZES, st.floats(0, 1), st.floats(0, 1))
def test_crops_of_our_exports_come_back(size, across, down):
    reso, _ = sd_scripts.select_bucket(*size, sd_scripts.buckets(512, 64))
    whole = cover(size, reso)
    crop = tuple(int(part * (side - cut)) for part, side, cut in zip((across, down), whole.scaled, reso, strict=True))
    exported = Placement(scaled=whole.scaled, crop=crop, bucket=reso)
    found = placement_of(size, reso, crop_ltrb(exported), unscaled=False)
    # Where bars of sd-scripts would have a width of 0, its middle crop is spelled like this one.
    assert found == exported or crop_ltrb(exported)[:2] == (0, 0)
    earlier = (*crop, crop[0] + reso[0], crop[1] + reso[1])
    assert placement_of(size, reso, earlier, unscaled=False) in (exported, whole)


@pytest.mark.parametrize("ltrb", [(0, 0, 1, 1), (-1, 0, 511, 512), (600, 0, 1112, 512), (3.5, 0, 515.5, 512)])
def test_numbers_that_are_no_crop(ltrb):
    assert placement_of((1000, 700), (512, 512), ltrb, unscaled=False) is None


def test_names_of_caches():
    assert cache_names("a.b", (1500, 64), "sd") == ("a.b.npz", "a.b_1500x0064_sd.npz")
    assert cache_names("a", (1500, 64), "flux") == ("a_1500x0064_flux.npz",)
    assert size_in_name("a_1_1500x0064_sdxl.npz", "sdxl") == ("a_1", (1500, 64))
    for name in ("a_1500x0064_sd.npz", "a_1500x64_sdxl.npz", "1500x0064_sdxl.npz", "a_1500x0064_sdxl.npz.txt"):
        assert size_in_name(name, "sdxl") is None


def facts(**arrays):
    stream = io.BytesIO()
    np.savez(stream, **arrays)
    return npz_facts(stream.getvalue())


LATENTS, SIZE, CROP = np.zeros((4, 8, 12), np.float32), np.array([96, 64]), np.array([0, 0, 96.0, 64.0])


def test_facts_of_a_cache():
    found = facts(latents=LATENTS, original_size=SIZE, crop_ltrb=CROP, other=LATENTS)
    assert found["sizes"] == [["", [4, 8, 12], False, False, [96.0, 64.0], [0.0, 0.0, 96.0, 64.0]]]
    several = {f"{name}_8x12": array for name, array in
               {"latents": LATENTS, "latents_flipped": LATENTS, "original_size": SIZE, "crop_ltrb": CROP,
                "alpha_mask": LATENTS[0]}.items()}
    assert [size[:4] for size in facts(**several)["sizes"]] == [["_8x12", [4, 8, 12], True, True]]


@pytest.mark.parametrize(("arrays", "why"), [
    ({"arr_0": LATENTS}, "has no array 'latents'"),
    ({"latents": LATENTS}, "has no array 'original_size'"),
    ({"latents": LATENTS.astype(np.int32)}, "has latents of int32"),
    ({"latents_8x9": LATENTS}, "expected that height and width"),
    ({"latents": LATENTS, "latents_flipped": LATENTS[:2]}, "of another shape than"),
    ({"latents": LATENTS, "original_size": np.array([np.inf, 1]), "crop_ltrb": CROP}, "expected pixels"),
    ({"latents": LATENTS, "original_size": SIZE, "crop_ltrb": CROP * 1e9}, "expected pixels"),
])
def test_caches_that_are_refused(arrays, why):
    found = facts(**arrays)
    assert found["code"] == "bad-latents" and why in found["detail"]
