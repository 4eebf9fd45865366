"""The drawing is a function of its arguments."""

import numpy as np
import pytest

from prep.demo.drawing import RGB, as_file, draw_picture
from prep.demo.vocabulary import COLORS, GROUNDS, LEFT_OUT, SHAPES


@pytest.mark.parametrize("shape", SHAPES)
def test_same_arguments_same_pixels(shape):
    def drawn(seed):
        return draw_picture(shape=shape, color="blue", ground="checked", size=(80, 112), seed=seed)

    assert [part.tobytes() for part in drawn(3)] == [part.tobytes() for part in drawn(3)]
    assert drawn(3)[0].tobytes() != drawn(4)[0].tobytes()


@pytest.mark.parametrize("ground", GROUNDS)
@pytest.mark.parametrize("color", COLORS)
def test_the_mask_is_where_the_color_is(ground, color):
    picture, mask = draw_picture(shape="circle", color=color, ground=ground, size=(96, 64), seed=1)
    assert picture.size == mask.size == (96, 64)
    assert (picture.mode, mask.mode) == ("RGB", "L")
    pixels, inside = np.asarray(picture, int), np.asarray(mask) == 255
    assert 0.1 < inside.mean() < 0.5
    assert np.abs(pixels[inside] - RGB[color]).max() <= 11
    assert (pixels[np.asarray(mask) == 0].max(-1) - pixels[np.asarray(mask) == 0].min(-1)).max() < 60, "a muted ground"


def test_what_is_left_out_can_be_drawn():
    assert LEFT_OUT[0] in COLORS
    assert LEFT_OUT[1] in SHAPES


@pytest.mark.parametrize("suffix", [".png", ".jpg", ".webp"])
def test_files_have_the_same_bytes_each_time(suffix):
    picture, _ = draw_picture(shape="star", color="red", ground="cloudy", size=(64, 64), seed=0)
    assert as_file(picture, suffix) == as_file(picture, suffix)
