"""Small copies for pages: their sizes, JPEGs that Pillow reads, and masks as shades."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from prep.images.decode import read_header
from prep.images.thumbnail import SHADE, SHADED, encode_jpeg, encode_shade, shrink, shrunk_size

SIDES = st.integers(1, 1 << 20)


@given(st.tuples(SIDES, SIDES), st.integers(1, 1000))
def test_sizes(size, side):
    width, height = shrunk_size(size, side)
    assert max(width, height) == min(side, max(size)) and min(width, height) >= 1
    if max(size) <= side:
        assert (width, height) == size
    assert abs(width * size[1] - height * size[0]) <= max(size) or min(width, height) == 1, "the same aspect ratio"


@pytest.mark.parametrize(("size", "wanted"), [((640, 320), (100, 50)), ((3, 1000), (1, 100)), ((40, 30), (40, 30))])
def test_a_picture_shrinks_to_a_jpeg_of_the_whole(size, wanted):
    picture = Image.new("RGB", size, "teal")
    picture.paste("white", (0, 0, size[0], size[1] // 2))
    small = shrink(picture, 100)
    assert small.shape == (wanted[1], wanted[0], 3)
    data = encode_jpeg(small)
    assert data.startswith(b"\xff\xd8\xff") and read_header(data).size == wanted
    with Image.open(io.BytesIO(data)) as read:
        assert np.abs(np.asarray(read).astype(int) - small).mean() < 6


def test_a_shade_is_red_where_the_mask_is_black():
    mask = np.arange(256, dtype=np.uint8).reshape(16, 16)
    with Image.open(io.BytesIO(encode_shade(mask))) as shade:
        assert shade.size == (16, 16)
        pixels = np.asarray(shade.convert("RGBA")).astype(int)
    assert (pixels[..., :3] == SHADE).all()
    assert pixels[0, 0, 3] == round(SHADED * 255) and pixels[-1, -1, 3] == 0
    assert (np.diff(pixels[..., 3].ravel()) <= 0).all()
