"""What is told of a file before it is decoded: its kind, its faults, the parts that are left out."""

from __future__ import annotations

import io
import struct
import zlib
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, PngImagePlugin

from prep.images.decode import decode_picture, read_header
from prep.images.formats.exif import orientation_of
from prep.images.formats.parts import BadPicture
from prep.images.formats.sniff import sniff, unwrap

PICTURE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 48, 3), np.uint8))


def saved(kind: str, **options) -> bytes:
    stream = io.BytesIO()
    PICTURE.save(stream, kind, **options)
    return stream.getvalue()


def chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def with_chunk(png: bytes, new: bytes) -> bytes:
    """`png` with another chunk after its header."""
    return png[:33] + new + png[33:]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "BMP"])
def test_kinds_are_known_by_content(kind):
    assert sniff(saved(kind)) == kind


@pytest.mark.parametrize(
    ("data", "says"),
    [(b"", "file has 0 bytes"), (b"<!DOCTYPE html><p>404", "file is a web page"),
     (b"<svg xmlns='x'/>", "file is SVG"), (b"%PDF-1.7", "file is PDF"), (b"8BPS" + bytes(20), "file is Photoshop"),
     (b"\0\0\0\x0cjP  " + bytes(9), "file is JPEG 2000"), (b"PK\x03\x04" + bytes(9), "file is a zip archive"),
     (b"\0\x05\x16\x07" + bytes(9), "file is a macOS side file"), (b"\x1aE\xdf\xa3" + bytes(9), "file is a video"),
     (b"just text", "file starts with b'just tex', expected JPEG"),
     (b"\r\n\r\n" + saved("JPEG"), "4 stray bytes lie before the picture's signature")],
)  # fmt: skip
def test_other_things_are_named(data, says):
    with pytest.raises(BadPicture) as caught:
        sniff(data)
    assert says in caught.value.detail
    assert caught.value.code == ("empty-file" if not data else "not-an-image")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "BMP"])
def test_a_file_without_its_end_is_known_before_it_is_decoded(kind):
    """Or it has no header, either."""
    whole, seen = saved(kind), set()
    assert not read_header(whole).cut
    for length in {len(whole) * part // 40 for part in range(1, 40)} | {len(whole) - 3}:
        with suppress(BadPicture):
            header = read_header(whole[:length])
            with pytest.raises(BadPicture):
                decode_picture(whole[:length], alpha="white")
            seen.add(header.cut)
    assert seen == ({True} if kind not in ("PNG", "WEBP") else set())


def test_jpeg_body_lacks_exif_and_comments_and_keeps_its_pixels():
    exif = Image.Exif()
    exif[0x010E] = "a secret description"
    data = saved("JPEG", exif=exif, comment=b"a secret comment", icc_profile=b"p" * 70_000)
    parts = unwrap(data)
    assert b"secret" not in parts.body
    assert parts.profile == b"p" * 70_000  # put together from two segments
    assert parts.exif is not None
    assert b"secret" in parts.exif
    one, two = (np.asarray(Image.open(io.BytesIO(each))) for each in (data, parts.body))
    assert (one == two).all()


def test_jpeg_cmyk_keeps_the_segment_that_decides_its_colors():
    inks = Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16, 4), np.uint8), "CMYK")
    stream = io.BytesIO()
    inks.save(stream, "JPEG")
    data = stream.getvalue()
    one, two = (np.asarray(Image.open(io.BytesIO(each))) for each in (data, unwrap(data).body))
    assert (one == two).all()


@pytest.mark.parametrize("options", [{}, {"progressive": True}, {"restart_marker_rows": 1}])
def test_jpeg_end(options):
    data = saved("JPEG", **options)
    assert unwrap(data).notes == ()
    assert unwrap(data + bytes(300)).notes == (("trailing-data", "300 bytes after the end of the picture"),)
    assert unwrap(data[:-2]).notes == (
        ("missing-eoi", "the end-of-image marker is missing; the file may have been cut off"),)
    assert unwrap(data + bytes(300)).body == unwrap(data).body


def test_jpeg_cut_in_its_header():
    with pytest.raises(BadPicture, match="JPEG ends inside its header, after 100 bytes"):
        unwrap(saved("JPEG")[:100])


def test_png_comments_are_left_out_unread():
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "x" * (2 << 20), zip=True)
    parts = unwrap(saved("PNG", pnginfo=info))
    assert parts.notes == (("metadata-bomb", "a compressed comment has more than 1048576 bytes; it is ignored"),)
    assert b"Comment" not in parts.body


def test_small_and_broken_png_comments_are_no_matter():
    info = PngImagePlugin.PngInfo()
    info.add_text("Comment", "".join(map(str, range(3000))), zip=True)
    assert unwrap(saved("PNG", pnginfo=info)).notes == ()
    assert unwrap(with_chunk(saved("PNG"), chunk(b"zTXt", b"k\0\0\x78" + b"\xff" * 2000))).notes == ()


def test_png_checksums():
    data = bytearray(saved("PNG"))
    place = data.index(b"IDAT")
    length = struct.unpack(">I", data[place - 4 : place])[0]
    data[place + 4 + length] ^= 1
    assert unwrap(bytes(data)).notes == (("bad-checksum", "checksum of chunk IDAT does not match its data"),)
    header = bytearray(saved("PNG"))
    header[30] ^= 1
    with pytest.raises(BadPicture, match="checksum of chunk IHDR does not match"):
        unwrap(bytes(header))


def test_png_cut_short():
    with pytest.raises(BadPicture, match="PNG ends before its last chunk, after 2000 bytes"):
        unwrap(saved("PNG")[:2000])


def test_png_trailing_bytes():
    assert unwrap(saved("PNG") + b"abc").notes == (("trailing-data", "3 bytes after the end of the picture"),)


def test_png_profile_that_does_not_unpack():
    for body in (b"name\0\0rubbish", b"name\0\0" + zlib.compress(bytes(1 << 25))):
        parts = unwrap(with_chunk(saved("PNG"), chunk(b"iCCP", body)))
        assert parts.profile is None
        assert parts.notes == (
            ("invalid-profile", "the embedded color profile cannot be unpacked; taken as sRGB"),)


SEEDS = [saved("JPEG"), saved("PNG"), saved("JPEG", exif=b"Exif\0\0II*\0\x08\0\0\0\x01\0" + bytes(16))]


@settings(max_examples=150, deadline=None)
@given(seed=st.sampled_from(SEEDS), cut=st.integers(0, 3000), junk=st.binary(max_size=60), place=st.integers(0, 700))
def test_any_bytes_are_parts_or_a_reason(seed, cut, junk, place):
    data = seed[:place] + junk + seed[place + len(junk) : len(seed) - cut]
    try:
        parts = unwrap(data)
    except BadPicture as error:
        assert error.code
        return
    assert len(parts.body) <= len(data)
    assert orientation_of(parts.exif)[0] in range(1, 9)


@given(st.binary(max_size=80), st.sampled_from([b"", b"II*\0", b"MM\0*", b"Exif\0\0II*\0\x08\0\0\0"]))
def test_any_exif_has_an_orientation(block, start):
    orientation, notes = orientation_of(start + block)
    assert orientation in range(1, 9)
    assert all(code == "exif-invalid" for code, _ in notes)
