"""Where a pixel goes: orientation, scaling, cutting and mirroring, of pictures and masks, against numpy alone."""

from __future__ import annotations

import io
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pictures import decoded, saved, swapped_profile
from PIL import Image, TiffImagePlugin

from prep.geometry import Placement
from prep.images.decode import _TURNS, decode_picture, read_header, scale_and_crop
from prep.images.mask import decode_mask, place_mask

RNG = np.random.default_rng(7)
RGB = RNG.integers(0, 256, (20, 30, 3), np.uint8)
GRAY = RNG.integers(0, 256, (20, 30), np.uint8)
ALPHA = RNG.integers(0, 256, (20, 30), np.uint8)


# ---- orientation -----------------------------------------------------------------------------------------------------


def exif(orientation: int, order: str = "<") -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + mark + struct.pack(order + "IHHHIHH", 8, 1, 0x0112, 3, 1, orientation, 0) + bytes(4)


TURNED = {1: RGB, 2: RGB[:, ::-1], 3: RGB[::-1, ::-1], 4: RGB[::-1], 5: RGB.transpose(1, 0, 2),
          6: np.rot90(RGB, -1), 7: np.rot90(RGB, 2).transpose(1, 0, 2), 8: np.rot90(RGB)}  # fmt: skip


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_is_applied(orientation, order):
    data = saved(Image.fromarray(RGB), exif=exif(orientation, order))
    assert (decoded(data) == TURNED[orientation]).all()
    assert read_header(data).orientation == orientation
    mask = saved(Image.fromarray(RGB[..., 0]), exif=exif(orientation, order))
    assert (np.asarray(decode_mask(mask)) == TURNED[orientation][..., 0]).all()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_every_other_format(orientation):
    options = TiffImagePlugin.ImageFileDirectory_v2()
    options[0x0112] = orientation
    assert (decoded(saved(Image.fromarray(RGB), "TIFF", tiffinfo=options)) == TURNED[orientation]).all()
    for compression in ("tiff_lzw", "raw"):
        data = saved(Image.fromarray(RGB), "TIFF", tiffinfo=options, compression=compression)
        assert (decoded(data) == TURNED[orientation]).all()
    data = saved(Image.fromarray(RGB), "WEBP", lossless=True, exif=exif(orientation))
    assert (decoded(data) == TURNED[orientation]).all()
    for kind in ("JPEG", "AVIF"):
        flat = saved(Image.fromarray(RGB), kind, quality=95)
        turned = saved(Image.fromarray(RGB), kind, quality=95, exif=exif(orientation))
        whole = Image.open(io.BytesIO(flat)).convert("RGB")
        wanted = np.asarray(whole if orientation == 1 else whole.transpose(_TURNS[orientation]))
        assert (decoded(turned) == wanted).all(), kind


@pytest.mark.parametrize(
    ("block", "says"),
    [(exif(9), "EXIF orientation is 9, expected 1 to 8"), (exif(0), "EXIF orientation is 0"),
     (b"Exif\0\0rubbish12345", "no valid header"), (b"Exif\0\0II*\0\xff\xff\0\0" + bytes(8), "outside its block"),
     (b"Exif\0\0II*\0\x08\0\0\0\xff\x7f" + bytes(12), "claims 32767 entries and has room for 1")],
)  # fmt: skip
def test_bad_exif_is_a_note_and_the_picture_stays_upright(block, says):
    data = saved(Image.fromarray(RGB), exif=block)
    assert (decoded(data) == RGB).all()
    ((code, detail),) = read_header(data).notes
    assert code == "exif-invalid"
    assert says in detail


# ---- placing ---------------------------------------------------------------------------------------------------------


def test_place_without_scaling_is_a_cut():
    picture = Image.fromarray(RGB)
    placed = scale_and_crop(picture, Placement(scaled=(30, 20), crop=(5, 3), bucket=(16, 8)))
    assert (placed == RGB[3:11, 5:21]).all()
    mirrored = scale_and_crop(picture, Placement(scaled=(30, 20), crop=(5, 3), bucket=(16, 8), flip=True))
    assert (mirrored == RGB[3:11, 5:21][:, ::-1]).all()
    assert placed.flags.c_contiguous
    assert mirrored.flags.c_contiguous


def lanczos(values: np.ndarray, size: int) -> np.ndarray:
    """Antialiased Lanczos of window 3 along axis 0, in floats (Duchon 1979, Lanczos filtering)."""
    scale = len(values) / size
    wide = max(scale, 1.0)
    centres = (np.arange(size) + 0.5) * scale
    away = (np.arange(len(values)) + 0.5 - centres[:, None]) / wide
    weights = np.where(np.abs(away) < 3, np.sinc(away) * np.sinc(away / 3), 0)
    return np.tensordot(weights / weights.sum(1, keepdims=True), values, 1)


@pytest.mark.parametrize("scaled", [(21, 14), (45, 30), (30, 14)])
def test_place_scales_with_lanczos(scaled):
    smooth = np.asarray(Image.fromarray(RGB[:4, :6]).resize((30, 20), Image.Resampling.BICUBIC))
    placed = scale_and_crop(Image.fromarray(smooth), Placement(scaled=scaled, crop=(0, 0), bucket=scaled))
    along = lanczos(smooth.astype(float), scaled[1])
    wanted = np.clip(lanczos(along.transpose(1, 0, 2), scaled[0]).transpose(1, 0, 2), 0, 255)
    assert np.abs(placed - wanted).max() <= 1.5  # two roundings to 8 bits


def test_place_refuses_to_cut_outside():
    with pytest.raises(AssertionError, match="cuts outside the scaled picture"):
        scale_and_crop(Image.fromarray(RGB), Placement(scaled=(30, 20), crop=(20, 0), bucket=(16, 8)))


placements = st.builds(
    lambda cells, extra, crop, flip: Placement(
        scaled=(cells[0] * 8 + extra[0], cells[1] * 8 + extra[1]), bucket=(cells[0] * 8, cells[1] * 8),
        crop=(min(crop[0], extra[0]), min(crop[1], extra[1])), flip=flip),
    st.tuples(st.integers(1, 6), st.integers(1, 6)), st.tuples(st.integers(0, 20), st.integers(0, 20)),
    st.tuples(st.integers(0, 20), st.integers(0, 20)), st.booleans(),
)  # fmt: skip


@settings(max_examples=60, deadline=None)
@given(placement=placements, size=st.tuples(st.integers(1, 70), st.integers(1, 70)))
def test_any_placement_fills_its_bucket(placement, size):
    """Every pixel comes from the picture: one color in, one color out, at the right shape."""
    width, height = placement.bucket
    placed = scale_and_crop(Image.new("RGB", size, (9, 99, 199)), placement)
    assert placed.shape == (height, width, 3)
    assert placed.dtype == np.uint8
    assert (placed == (9, 99, 199)).all()
    cells = place_mask(Image.new("L", size, 200), placement, 8)
    assert cells.shape == (height // 8, width // 8)
    assert (cells == 200).all()


@settings(max_examples=40, deadline=None)
@given(placement=placements)
def test_mask_cells_are_the_means_of_what_place_would_cut(placement):
    """A mask and its picture are cut alike, mirrored alike."""
    width, height = placement.scaled
    mask = Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width), np.uint8))
    pixels = scale_and_crop(mask.convert("RGB"), placement)[..., 0].astype(float)
    rows, columns = placement.bucket[1] // 8, placement.bucket[0] // 8
    means = pixels.reshape(rows, 8, columns, 8).mean(axis=(1, 3))
    assert (place_mask(mask, placement, 8) == np.floor(means + 0.5)).all()


def test_threads_agree():
    data = saved(Image.fromarray(np.dstack([RGB, ALPHA])), icc_profile=swapped_profile())
    placement = Placement(scaled=(24, 16), crop=(4, 0), bucket=(16, 16), flip=True)
    alone = scale_and_crop(decode_picture(data, alpha="white"), placement).tobytes()
    with ThreadPoolExecutor(4) as pool:
        many = pool.map(lambda _: scale_and_crop(decode_picture(data, alpha="white"), placement).tobytes(), range(64))
        assert set(many) == {alone}


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_values_not_colors():
    assert (np.asarray(decode_mask(saved(Image.fromarray(GRAY)))) == GRAY).all()
    same = np.repeat(GRAY[..., None], 3, 2)
    assert (np.asarray(decode_mask(saved(Image.fromarray(same), icc_profile=swapped_profile()))) == GRAY).all()


def test_transparent_parts_of_a_mask_do_not_train():
    white = np.dstack([np.full((20, 30, 3), 255, np.uint8), ALPHA])
    assert (np.asarray(decode_mask(saved(Image.fromarray(white)))) == ALPHA).all()


def test_mask_of_another_size_is_scaled_to_the_picture():
    half = Image.fromarray(np.kron([[0, 255], [255, 0]], np.ones((8, 8))).astype(np.uint8))
    cells = place_mask(half, Placement(scaled=(32, 32), crop=(0, 0), bucket=(32, 32)), 8)
    assert cells.shape == (4, 4)
    assert cells[0, 0] == 0
    assert cells[0, 3] == 255


def test_mask_needs_whole_cells():
    with pytest.raises(AssertionError, match="not in steps of 8"):
        place_mask(Image.new("L", (20, 20)), Placement(scaled=(20, 20), crop=(0, 0), bucket=(20, 20)), 8)
