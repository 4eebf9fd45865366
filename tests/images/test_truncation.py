"""PNGs and JPEGs whose data end before the picture does: refused, and no others are."""

from __future__ import annotations

import struct
import zlib

import numpy as np
import pytest
from pictures import decoded, saved
from PIL import Image, ImageFile

from prep.images.decode import decode_picture
from prep.images.formats import png as whole
from prep.images.formats.jpeg import SOS, pad_scans, segments
from prep.images.formats.parts import BadPicture

NOISE = np.random.default_rng(0).integers(1, 256, (61, 47, 3), np.uint8)


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


PASSES = ((0, 0, 8, 8), (4, 0, 8, 8), (0, 4, 4, 8), (2, 0, 4, 4), (0, 2, 2, 4), (1, 0, 2, 2), (0, 1, 1, 2))


def png(pixels: np.ndarray, color: int, *, interlaced: bool = False, lacking: int = 0) -> bytes:
    """A PNG of 8 bits a channel, but for the last bytes of its data; the stream itself is whole."""
    high, wide = pixels.shape[:2]
    rows = b"".join(b"\0" + line.tobytes() for left, top, right, down in (PASSES if interlaced else ((0, 0, 1, 1),))
                    for line in pixels[top::down, left::right] if line.size)
    head = struct.pack(">IIBBBBB", wide, high, 8, color, 0, 0, interlaced)
    data = zlib.compress(rows[: len(rows) - lacking])
    return (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", data[:50]) + chunk(b"IDAT", data[50:])
            + chunk(b"IEND", b""))


@pytest.mark.parametrize("interlaced", [False, True])
@pytest.mark.parametrize("size", [(61, 47), (60, 47), (1, 47), (61, 1), (2, 2), (3, 3), (1, 1)])
@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_that_lacks_a_byte(size, channels, interlaced):
    pixels = NOISE[: size[0], : size[1], :channels]
    pixels, color = (pixels[..., 0], 0) if channels == 1 else (pixels, 2)
    assert (decoded(png(pixels, color, interlaced=interlaced)).reshape(*size, 3) == NOISE[: size[0], : size[1],
            [0, 0, 0] if channels == 1 else [0, 1, 2]]).all()
    for lacking in (1, 2):
        with pytest.raises(BadPicture, match=r"PNG has \d+ of \d+ bytes of pixels|the rest is missing") as caught:
            decode_picture(png(pixels, color, interlaced=interlaced, lacking=lacking), alpha="white")
        assert caught.value.code == "truncated"


def test_a_small_png_that_says_it_is_large():
    """Black as a whole: nothing was there."""
    data = bytearray(png(NOISE, 2))
    data[16:24] = struct.pack(">II", 47, 1 << 20)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    with pytest.raises(BadPicture, match=r"PNG has 8662 of 148897792 bytes of pixels"):
        decode_picture(bytes(data), alpha="white")


def test_a_png_that_is_black_where_it_ends(monkeypatch):
    """It is unpacked once more, and found whole; one that is not is not unpacked."""
    counted = []
    check = whole.check_complete
    monkeypatch.setattr("prep.images.header.check_complete", lambda body: counted.append(1) or check(body))
    for mode in ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"):
        assert not decoded(saved(Image.new(mode, (40, 40))), "black").any(), mode
    assert len(counted) == 7
    assert decoded(saved(Image.fromarray(NOISE))).any() and len(counted) == 7
    large = np.zeros((1500, 1500, 3), np.uint8)  # in several steps
    assert not decoded(saved(Image.fromarray(large))).any()


JPEGS = [{}, {"progressive": True}, {"restart_marker_blocks": 2}, {"subsampling": 2}, {"optimize": True}]


def test_a_gray_pixel_at_the_end_is_no_gray_corner(monkeypatch):
    """Pictures that end in one are many, and none of them is decoded twice; a gray corner is looked at."""
    opened = []
    monkeypatch.setattr("prep.images.header.pad_scans", lambda body: opened.append(1) or pad_scans(body))
    ramp = np.add.outer(np.arange(64), np.arange(64))[..., None].repeat(3, 2)
    for mode in ("RGB", "L"):
        pixels = Image.fromarray((ramp + 128 - ramp.max()).clip(0, 255).astype(np.uint8)).convert(mode)
        last = decoded(saved(pixels, "JPEG", quality=100))[-1, -1]
        assert np.abs(last.astype(int) - 128).max() <= 4 and not opened
    decoded(saved(Image.new("L", (64, 64), 128), "JPEG"))
    assert len(opened) == 1


def scan_end(data: bytes) -> int:
    """Where the data of the first scan end."""
    places = [start for _, start, _ in segments(data)]
    first = next(number for number, start in enumerate(places) if data[start + 1] == 0xDA)
    return places[first + 1]


@pytest.mark.parametrize("options", JPEGS)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_a_jpeg_that_ends_too_early(mode, options):
    """Cut, with an end marker after the cut, as some programs mend it; libjpeg makes gray of the rest."""
    photo = Image.fromarray(NOISE).resize((200, 160)).convert(mode)
    data = saved(photo, "JPEG", **options)
    assert decode_picture(data, alpha="white").size == (200, 160)
    start, end = data.index(b"\xff\xda"), scan_end(data)
    for part in (0.3, 0.7) if "progressive" in options else (0.3, 0.7, 0.95):
        with pytest.raises(BadPicture) as caught:
            decode_picture(data[: start + int(part * (end - start))] + b"\xff\xd9", alpha="white")
        assert caught.value.code in ("truncated", "corrupt-data")
    if options == {} and mode == "RGB":
        assert caught.value.detail == "JPEG data end before the picture does; what they lack would be gray"


@pytest.mark.parametrize("options", JPEGS)
@pytest.mark.parametrize(("mode", "gray"), [("RGB", (128, 128, 128)), ("L", 128), ("CMYK", (127, 127, 127, 127))])
def test_a_jpeg_that_is_gray_where_it_ends(monkeypatch, mode, gray, options):
    opened = []
    monkeypatch.setattr("prep.images.header.pad_scans", lambda body: opened.append(1) or pad_scans(body))
    photo = Image.fromarray(NOISE).resize((200, 160)).convert(mode)
    assert decode_picture(saved(photo, "JPEG", **options), alpha="white").size == (200, 160) and not opened
    photo.paste(gray, (0, 80, 200, 160))
    data = saved(photo, "JPEG", **options)
    assert decode_picture(data, alpha="white").size == (200, 160) and opened == [1]
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", False)
    assert decode_picture(data + b"more", alpha="white").size == (200, 160)


def test_only_what_scans_hold_is_made_longer():
    data = saved(Image.fromarray(NOISE), "JPEG", progressive=True)
    scans = sum(marker == SOS for marker, _, _ in segments(data))
    assert scans > 5 and len(pad_scans(data)) == len(data) + 128 * scans
    assert pad_scans(data[:-2]) == pad_scans(data), "an end marker is made where there is none"
