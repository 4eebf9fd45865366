"""Notes on pictures that one may not want to train on: each measure against another way to it, and on real photos."""

from __future__ import annotations

import io
import random

import numpy as np
import pytest
from pictures import saved
from PIL import Image, ImageFilter, ImageOps

from prep.images.decode import decode_picture
from prep.scan.quality import FEWEST, blurriness, jpeg_quality, odd_lengths, plain_bars, quality_notes

RNG = np.random.default_rng(17)


def textured(size=(320, 240), low=0, high=256) -> Image.Image:
    """Detail of all sizes, its levels from `low` to `high`."""
    wide, high_side = size
    noise = RNG.random((high_side, wide, 3))
    coarse = np.asarray(Image.fromarray((RNG.random((8, 8, 3)) * 255).astype(np.uint8)).resize(size)) / 255
    return Image.fromarray((low + (noise + coarse) / 2 * (high - 1 - low)).astype(np.uint8))


def codes_of(picture: Image.Image, data: bytes = b"") -> dict[str, str]:
    return dict(quality_notes(data, picture))


def test_nothing_is_said_of_a_picture_with_detail():
    assert codes_of(textured()) == {}


def test_brightness():
    dark, light = codes_of(textured(high=80)), codes_of(textured(low=246))
    assert set(dark) == {"dark"} and dark["dark"].startswith("99 % of its pixels are darker than 0.2")
    assert set(light) == {"light"} | {"low-information"} & set(light)
    assert light["light"].startswith("95 % of its pixels are brighter than 0.9")
    lamp = textured(high=80)
    lamp.paste("white", (0, 0, 40, 40))  # 2 % of the picture
    assert "dark" not in codes_of(lamp)


def test_brightness_of_colors():
    """Blue looks darker than green: the weights of the model, by the numbers of its author."""
    for color, brightness in (("#0000ff", 0.261), ("#00ff00", 0.831), ("#ff0000", 0.491)):
        said = codes_of(Image.new("RGB", (64, 64), color)).get("dark")
        assert (said is not None) == (brightness < 0.32)
        assert said is None or f"darker than {brightness:.2f} " in said


def test_little_information():
    levels = Image.fromarray(RNG.choice(np.array([0, 90, 255], np.uint8), (64, 64)).astype(np.uint8)).convert("RGB")
    said = codes_of(levels)
    assert said == {"low-information": "1.6 bits of information in its gray levels, expected at least 3"}


def by_the_paper(gray: np.ndarray) -> float:
    """The measure of Crete et al. as the paper has it: blur, differences, what the blur took away."""
    def along(values: np.ndarray) -> float:
        padded = np.pad(values, ((0, 0), (5, 5)), mode="edge")
        blurred = np.stack([padded[:, x : x + 11].mean(axis=1) for x in range(values.shape[1])], axis=1)
        before, after = abs(np.diff(values, axis=1)), abs(np.diff(blurred, axis=1))
        return (before.sum() - np.maximum(before - after, 0).sum()) / before.sum()

    return max(along(gray.astype(float)), along(gray.T.astype(float)))


@pytest.mark.parametrize("shape", [(12, 12), (3, 200), (90, 160), (161, 12)])
def test_blur_is_that_of_the_paper(shape):
    for gray in (RNG.integers(0, 256, shape, np.uint8), np.cumsum(RNG.integers(0, 2, shape, np.uint8), axis=1) % 256):
        gray = gray.astype(np.uint8)
        assert blurriness(gray) == pytest.approx(by_the_paper(gray), abs=1e-12)


def test_blur_of_what_has_no_edges():
    assert blurriness(np.full((20, 20), 7, np.uint8)) == 1.0
    assert blurriness(np.full((1, 1), 7, np.uint8)) == 1.0


def test_blurred_pictures():
    picture = textured((512, 384))
    blurred = picture.filter(ImageFilter.GaussianBlur(6))
    assert set(codes_of(blurred)) == {"blurred"} and "expected at most 0.5" in codes_of(blurred)["blurred"]
    assert codes_of(blurred.crop((0, 0, 500, 384))) == {}  # too small to say
    assert codes_of(blurred.crop((0, 0, 512, 120))) == {}  # too narrow


@pytest.mark.parametrize("color", ["black", "white"])
def test_bars(color):
    picture = textured((300, 200))
    boxed = ImageOps.expand(picture, (0, 25), color)
    gray = np.asarray(boxed.convert("L"))
    assert plain_bars(gray) == {"top": 0.1, "bottom": 0.1, "left": 0.0, "right": 0.0}
    assert codes_of(boxed) == {"plain-border": "plain bars: top 10%, bottom 10%"}
    out = io.BytesIO()
    boxed.save(out, "JPEG", quality=60)  # its edges ring
    assert set(codes_of(decode_picture(out.getvalue(), alpha="white"), b"")) == {"plain-border"}
    assert codes_of(ImageOps.expand(picture, (0, 4), color)) == {}  # a line
    assert codes_of(ImageOps.expand(picture, (0, 0, 60, 0), color)) == {"plain-border": "plain bars: right 17%"}


def test_a_plain_background_is_no_bar():
    studio = Image.new("RGB", (300, 200), "white")
    studio.paste(textured((80, 120)), (110, 40))
    assert plain_bars(np.asarray(studio.convert("L"))) == dict.fromkeys(("top", "bottom", "left", "right"), 0.0)


def test_quality_of_a_jpeg():
    picture = textured((64, 64))
    for quality in (20, 35, 49, 50, 51, 75, 92):
        assert jpeg_quality(saved(picture, "JPEG", quality=quality)) == quality
    assert jpeg_quality(saved(picture, "JPEG", quality=5)) <= 15  # divisors end at 255
    assert jpeg_quality(saved(picture, "JPEG", quality=100)) >= 98
    assert jpeg_quality(saved(picture)) is None
    rough = saved(picture, "JPEG", quality=49)
    assert dict(quality_notes(rough, picture))["heavy-compression"] == "JPEG of quality 49, expected at least 50"


def test_tables_that_are_none():
    whole = saved(textured((32, 32)), "JPEG", quality=40)
    start = whole.index(b"\xff\xdb")
    assert jpeg_quality(whole[:start] + whole[start + 2 + int.from_bytes(whole[start + 2 : start + 4]) :]) is None
    wide = b"\xff\xdb" + (2 + 129).to_bytes(2) + b"\x10" + b"\x01\x00" * 64 + b"\xff\xda\x00\x02"
    assert jpeg_quality(b"\xff\xd8" + wide) == 11  # 16-bit divisors: 256 each
    random.seed(3)
    for _ in range(300):  # damage raises nothing
        spoiled = bytearray(whole)
        for _ in range(random.randrange(1, 20)):
            spoiled[random.randrange(len(spoiled))] = random.randrange(256)
        quality = jpeg_quality(bytes(spoiled[: random.randrange(len(spoiled))]))
        assert quality is None or 1 <= quality <= 100


def test_lengths_of_captions():
    usual = [90, 100, 110, 120] * 6
    said = dict(odd_lengths([*usual, 3, 1000, 60, 200]))
    assert said == {24: "3 characters; half of all have 90 to 120", 25: "1000 characters; half of all have 90 to 120"}
    assert list(odd_lengths([5] * (FEWEST - 2) + [500])) == []  # too few to say
    assert [index for index, _ in odd_lengths([5] * FEWEST + [15, 500])] == [FEWEST + 1]
    assert list(odd_lengths(list(range(100, 2000)))) == []  # of all lengths


@pytest.mark.slow
@pytest.mark.real_data
def test_real_photos(real_data):
    """None of the photos is blamed; each is once it was spoiled."""
    photos = sorted(path for path in (real_data / "photos").rglob("*") if path.suffix in (".jpg", ".png"))
    assert len(photos) > 50
    for path in photos:
        data = path.read_bytes()
        picture = decode_picture(data, alpha="white")
        assert list(quality_notes(data, picture)) == [], path
        blurred = picture.filter(ImageFilter.GaussianBlur(max(picture.size) / 200))
        assert set(codes_of(blurred)) == {"blurred"}, path
        assert "dark" in codes_of(picture.point([level // 4 for level in range(256)] * 3)), path
        small = picture.reduce(2)
        assert any("plain-border" in codes_of(ImageOps.expand(small, (small.width // 6, 0), color))
                   for color in ("black", "white")), path  # a black cat has no edge to a black bar


def test_a_scan_says_it(tmp_path, prep):
    (tmp_path / "set").mkdir()
    for number in range(FEWEST):
        picture = textured((96, 80))
        (tmp_path / "set" / f"{number}.png").write_bytes(saved(picture))
        (tmp_path / "set" / f"{number}.txt").write_text(f"a picture of number {number:02}" if number else "x")
    (tmp_path / "set" / "bad.jpg").write_bytes(saved(textured((96, 80), high=70), "JPEG", quality=20))
    (tmp_path / "set" / "bad.txt").write_text("a picture of number 20")
    for _ in range(2):  # also from memory
        found = {(one["path"], one["code"], one["severity"])
                 for one in prep("scan", tmp_path / "set", "--json").json["findings"]}
        assert found == {("0.png", "odd-length", "info"), ("bad.jpg", "dark", "info"),
                         ("bad.jpg", "heavy-compression", "info")}
    left = prep("scan", tmp_path / "set", "--json", "--ignore", "dark")
    assert [one["code"] for one in left.json["findings"]] == ["odd-length", "heavy-compression"]
