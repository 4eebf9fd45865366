"""Each color mode, profile and fault against an expectation computed with numpy alone; no file is needed."""

from __future__ import annotations

import struct
import warnings
import zlib

import numpy as np
import pytest
from pictures import decoded, saved, srgb_profile, swapped_profile
from PIL import Image, ImageFile
from PIL.TiffImagePlugin import TiffImageFile

from prep.geometry import Placement
from prep.images.color import judge
from prep.images.decode import decode_picture, encode_png, quiet_pillow, read_header, scale_and_crop
from prep.images.formats.parts import BadPicture
from prep.images.mask import alpha_of, decode_mask
from prep.parse import color_of

RNG = np.random.default_rng(7)
RGB = RNG.integers(0, 256, (20, 30, 3), np.uint8)
GRAY = RNG.integers(0, 256, (20, 30), np.uint8)
ALPHA = RNG.integers(0, 256, (20, 30), np.uint8)


def flattened(rgb: np.ndarray, alpha: np.ndarray, color: tuple[int, int, int]) -> np.ndarray:
    part = alpha[..., None].astype(float) / 255
    return np.floor(rgb * part + np.array(color) * (1 - part) + 0.5).astype(np.uint8)


def png16(values: np.ndarray, *, key: bytes = b"") -> bytes:
    """A 16-bit PNG, gray or RGB, written by hand: Pillow cannot write RGB of 16 bits."""
    rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
    return raw_png(values.shape[1], values.shape[0], 16, 2 if values.ndim == 3 else 0, rows, key)


def raw_png(wide: int, high: int, bits: int, kind: int, rows: bytes, key: bytes) -> bytes:
    """A PNG from its parts; each row starts with a filter byte."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", wide, high, bits, kind, 0, 0, 0)
    parts = [chunk(b"IHDR", header), chunk(b"tRNS", key) if key else b"", chunk(b"IDAT", zlib.compress(rows))]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts) + chunk(b"IEND", b"")


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_rgb_is_itself(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    assert (decoded(saved(Image.fromarray(RGB), kind, **options)) == RGB).all()


def test_rgba_is_flattened_onto_the_color():
    data = saved(Image.fromarray(np.dstack([RGB, ALPHA])))
    assert read_header(data).has_alpha
    for name, color in (("white", (255, 255, 255)), ("black", (0, 0, 0)), ("#ff8000", (255, 128, 0))):
        assert (decoded(data, name) == flattened(RGB, ALPHA, color)).all()
    assert (np.asarray(alpha_of(data)) == ALPHA).all()


def test_transparency_that_is_kept():
    """Colors are as in the file, but black where nothing is seen; scaled as Pillow scales RGBA."""
    clear = ALPHA.copy()
    clear[4:9], clear[9:12] = 0, 255
    picture = Image.fromarray(np.dstack([RGB, clear]))
    wanted = np.where(clear[..., None] == 0, 0, np.dstack([RGB, clear]))
    kept = decode_picture(saved(picture), alpha="keep")
    assert kept.mode == "RGBA" and (np.asarray(kept) == wanted).all()
    placement = Placement(scaled=(20, 12), crop=(2, 1), bucket=(16, 8), flip=True)
    scaled = np.asarray(picture.resize((20, 12), Image.Resampling.LANCZOS))[1:9, 2:18][:, ::-1]
    assert (scale_and_crop(kept, placement) == scaled).all()
    opaque = np.asarray(decode_picture(saved(Image.fromarray(RGB)), alpha="keep"))
    assert (opaque[..., :3] == RGB).all() and (opaque[..., 3] == 255).all()


def test_opaque_picture_has_alpha_255():
    assert (np.asarray(alpha_of(saved(Image.fromarray(RGB)))) == 255).all()


def test_gray_and_gray_with_alpha():
    assert (decoded(saved(Image.fromarray(GRAY))) == GRAY[..., None]).all()
    pair = Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(ALPHA)])
    wanted = flattened(np.repeat(GRAY[..., None], 3, 2), ALPHA, (0, 0, 0))
    assert (decoded(saved(pair), "black") == wanted).all()


def test_one_bit():
    bits = GRAY > 127
    data = saved(Image.fromarray(bits))
    assert read_header(data).bits == 1
    assert (decoded(data) == bits[..., None] * 255).all()


def test_palette_with_and_without_transparent_entries():
    colors = RNG.integers(0, 256, (16, 3), np.uint8)
    index = RNG.integers(0, 16, (20, 30), np.uint8)
    picture = Image.fromarray(index, "P")
    picture.putpalette(colors.tobytes())
    assert (decoded(saved(picture)) == colors[index]).all()
    wanted = np.where((index == 3)[..., None], [255, 255, 255], colors[index])
    assert (decoded(saved(picture, transparency=3)) == wanted).all()
    levels = bytes(range(0, 240, 15))
    wanted = flattened(colors[index], np.frombuffer(levels, np.uint8)[index], (255, 255, 255))
    assert (decoded(saved(picture, transparency=levels)) == wanted).all()


def test_transparent_color_of_rgb_and_of_gray():
    rgb = RGB.copy()
    rgb[3:9] = 10, 20, 30
    data = saved(Image.fromarray(rgb), transparency=(10, 20, 30))
    wanted = np.where((rgb == (10, 20, 30)).all(-1)[..., None], 255, rgb)
    assert (decoded(data) == wanted).all()
    gray = GRAY.copy()
    gray[2:5] = 77
    data = saved(Image.fromarray(gray), transparency=77)
    assert (np.asarray(alpha_of(data)) == np.where(gray == 77, 0, 255)).all()


def test_transparent_value_of_one_bit():
    bits = GRAY > 127
    data = saved(Image.fromarray(bits), transparency=1)
    assert (np.asarray(alpha_of(data)) == np.where(bits, 0, 255)).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_and_never_clipped(kind):
    values = RNG.integers(0, 65536, (20, 30), np.uint16)
    values[0, :4] = 0, 65535, 128, 129
    data = saved(Image.fromarray(values), kind)
    assert read_header(data).bits == 16
    assert (decoded(data) == np.floor(values.astype(float) * 255 / 65535 + 0.5).astype(np.uint8)[..., None]).all()


def test_16_bit_rgb_is_its_high_byte():
    values = RNG.integers(0, 65536, (20, 30, 3), np.uint16)
    assert (decoded(png16(values)) == values >> 8).all()
    assert read_header(png16(values)).bits == 16


def test_4_bit_gray_and_its_transparent_value():
    data = raw_png(4, 1, 4, 0, b"\0\x0f\x37", struct.pack(">H", 3))  # 0 15 3 7
    assert read_header(data).bits == 4
    assert np.asarray(alpha_of(data)).tolist() == [[255, 255, 0, 255]]
    assert decoded(data, "black")[0, :, 0].tolist() == [0, 255, 0, 119]


def test_16_bit_transparent_value():
    values = RNG.integers(0, 65536, (20, 30), np.uint16)
    data = png16(values, key=struct.pack(">H", int(values[4, 5])))
    assert (np.asarray(alpha_of(data)) == np.where(values == values[4, 5], 0, 255)).all()


def test_float_from_0_to_1():
    values = RNG.random((20, 30), np.float32)
    data = saved(Image.fromarray(values), "TIFF")
    assert (decoded(data) == np.floor(values.astype(float) * 255 + 0.5).astype(np.uint8)[..., None]).all()


@pytest.mark.parametrize("values", [np.full((4, 4), 1.5, np.float32), np.full((4, 4), np.nan, np.float32)])
def test_other_floats_are_refused(values):
    with pytest.raises(BadPicture, match=r"float values are from .* expected 0 to 1"):
        decode_picture(saved(Image.fromarray(values), "TIFF"), alpha="white")


def test_32_bit_gray():
    values = RNG.integers(0, 65536, (20, 30), np.int32)
    wanted = np.floor(values.astype(float) * 255 / 65535 + 0.5).astype(np.uint8)
    assert (decoded(saved(Image.fromarray(values), "TIFF")) == wanted[..., None]).all()
    with pytest.raises(BadPicture, match="gray values are from 0 to 70000, expected 0 to 65535"):
        decode_picture(saved(Image.fromarray(np.array([[0, 70000]], np.int32)), "TIFF"), alpha="white")


def test_cmyk_without_profile():
    inks = RNG.integers(0, 256, (16, 16, 4), np.uint8)
    data = saved(Image.fromarray(inks, "CMYK"), "TIFF")
    wanted = (255 - inks[..., :3].astype(float)) * (255 - inks[..., 3:]) / 255
    assert np.abs(decoded(data) - wanted).max() <= 1
    assert read_header(data).mode == "CMYK"


def test_lab_is_refused_by_name():
    picture = Image.new("LAB", (8, 8))
    with pytest.raises(BadPicture, match="color mode is LAB, expected RGB, gray, palette or CMYK"):
        decode_picture(saved(picture, "TIFF"), alpha="white")


def test_first_frame_of_an_animation():
    frames = [Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in (50, 150, 250)]
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert read_header(data).frames == 3, kind
        assert (decoded(data) == 50).all(), kind


def tiff(*pages: bytes) -> bytes:
    """A TIFF of these directories, one after the other; in each, an address below 99 is that of the pixels."""
    data, pixels = b"II*\0", np.arange(48, dtype=np.uint8).tobytes()
    place = 8 + len(pixels)
    data += struct.pack("<I", place) + pixels
    for number, page in enumerate(pages):
        place += len(page) + 4
        data += page + struct.pack("<I", place if number + 1 < len(pages) else 0)
    return data


def page(height: int = 4, *, planes: int = 1, strips: int = 1, orientation: int = 1) -> bytes:
    """A directory: 4 pixels wide, RGB or in three planes, in strips of 16 bytes, or one of all 48."""
    sizes = [16] * strips if planes == 2 else [48]
    entries = [(256, 3, 1, 4), (257, 3, 1, height), (259, 3, 1, 1), (262, 3, 1, 2), (277, 3, 1, 3),
               (274, 3, 1, orientation), (278, 3, 1, 4), (284, 3, 1, planes), (339, 3, 1, 1), (258, 3, 1, 8)]
    entries += [(273, 1, strips, sum((8 + 16 * number) << 8 * number for number in range(strips))),
                (279, 1, strips, sum(size << 8 * number for number, size in enumerate(sizes)))]
    return struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *one) for one in sorted(entries))


def test_a_tiff_whose_strips_do_not_cover_it():
    """Pillow leaves the rest black, of one plane or of all."""
    assert decoded(tiff(page()))[..., 0].max() == 45
    assert decoded(tiff(page(planes=2, strips=3)))[0, 0].tolist() == [0, 16, 32]
    for data, pixels in ((tiff(page(8)), (16, 32)), (tiff(page(planes=2, strips=2)), (32, 48))):
        with pytest.raises(BadPicture, match="TIFF has strips for {} of {} pixels".format(*pixels)) as caught:
            decode_picture(data, alpha="white")
        assert caught.value.code == "truncated"


def test_pages_of_a_tiff_are_counted_where_they_lie(monkeypatch):
    """Pillow seeks them: one that breaks off there would be decoded by the tags of another page."""
    broken = page(orientation=6).replace(struct.pack("<HHII", 256, 3, 1, 4), struct.pack("<HHII", 256, 2, 9, 1 << 30))
    data = tiff(page(), broken, page())
    assert read_header(data).frames == 3 and (decoded(data) == decoded(tiff(page()))).all()
    assert read_header(tiff(page(orientation=6), broken)).size == (4, 4)
    loop = tiff(page(), page())
    assert read_header(loop[:-4] + struct.pack("<I", 56)).frames == 2, "a circle has an end"
    assert read_header(loop[:-4] + struct.pack("<I", 1 << 30)).frames == 2, "so has one that leads out"
    monkeypatch.setattr(TiffImageFile, "n_frames", property(lambda _: pytest.fail("it takes the square of them")))
    assert read_header(tiff(*[page()] * 5000)).frames == 5000
    monkeypatch.setattr("prep.images.header._MOST_PAGES", 99)  # of a gigabyte of them the numbers alone would take ten
    assert read_header(tiff(*[page()] * 5000)).frames == 99


@pytest.mark.parametrize("text", ["red", "#12345", "#12345g", "ffffff", ""])
def test_colors_are_strict(text):
    with pytest.raises(ValueError, match=f"color is '{text}', expected #rrggbb, white"):
        color_of(text)


# ---- color profiles -------------------------------------------------------------------------------------------------


def test_srgb_profile_changes_nothing():
    data = saved(Image.fromarray(RGB), icc_profile=srgb_profile())
    assert (decoded(data) == RGB).all()
    assert read_header(data).notes == ()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_another_profile_is_converted(kind):
    flat = np.full((16, 16, 3), (200, 40, 90), np.uint8)
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(Image.fromarray(flat), kind, icc_profile=swapped_profile(), **options)
    assert np.abs(decoded(data).astype(int) - (40, 200, 90)).max() <= 2
    assert [code for code, _ in read_header(data).notes] == ["non-srgb-profile"]


def test_profile_and_alpha():
    pixels = np.dstack([np.full((8, 8, 3), (200, 40, 90), np.uint8), np.full((8, 8), 128, np.uint8)])
    data = saved(Image.fromarray(pixels), icc_profile=swapped_profile())
    wanted = flattened(np.full((8, 8, 3), (40, 200, 90)), pixels[..., 3], (255, 255, 255))
    assert np.abs(decoded(data).astype(int) - wanted).max() <= 2


def test_gray_with_an_rgb_profile_is_usual():
    data = saved(Image.fromarray(GRAY), icc_profile=srgb_profile())
    assert np.abs(decoded(data).astype(int) - GRAY[..., None]).max() <= 2
    assert read_header(data).notes == ()


@pytest.mark.parametrize("profile", [b"rubbish", bytes(128), b"x" * 5000])
def test_broken_profile_is_taken_as_srgb(profile):
    data = saved(Image.fromarray(RGB), icc_profile=profile)
    assert (decoded(data) == RGB).all()
    assert read_header(data).notes == (
        ("invalid-profile", "the embedded color profile is unusable; taken as sRGB"),)


def test_profile_for_another_mode_is_ignored():
    assert judge(srgb_profile(), "CMYK") == (
        ("invalid-profile", "the color profile is for RGB, the picture is CMYK; taken as sRGB"),)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "BMP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_files_are_refused(kind, share):
    noise = Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8))
    data = saved(noise, kind)
    with pytest.raises(BadPicture) as caught:
        decode_picture(data[: int(len(data) * share)], alpha="white")
    assert caught.value.code in ("truncated", "unreadable", "corrupt-data")


def test_any_bytes_give_a_picture_or_a_finding():
    rng = np.random.default_rng(3)
    for kind in ("JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "BMP"):
        whole = bytearray(saved(Image.fromarray(RGB), kind))
        for _ in range(40):
            broken = bytearray(whole)
            for place in rng.integers(0, len(broken), 4):
                broken[place] = rng.integers(0, 256)
            try:
                decode_picture(bytes(broken), alpha="white")
            except BadPicture as error:
                assert error.code
            except UserWarning:  # TIFF tags; silenced by `quiet` where it matters
                assert kind == "TIFF"


def test_too_many_pixels_are_refused_from_the_header():
    header = struct.pack(">IIBBBBB", 50000, 50000, 8, 2, 0, 0, 0)
    body = struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    end = struct.pack(">I", 0) + b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    data = b"\x89PNG\r\n\x1a\n" + body + struct.pack(">I", 0) + b"IDAT" + struct.pack(">I", zlib.crc32(b"IDAT")) + end
    with pytest.raises(BadPicture, match="header says 50000x50000 pixels, expected at most 268435456"):
        read_header(data)


def test_palette_without_colors_is_refused():
    with pytest.raises(BadPicture, match="cannot be decoded: AssertionError"):
        read_header(raw_png(4, 1, 8, 3, b"\0\0\1\2\3", b""))


def test_missing_end_of_jpeg_is_a_note():
    data = saved(Image.fromarray(RGB), "JPEG")
    assert (decoded(data[:-2]) == decoded(data)).all()
    assert read_header(data[:-2]).notes[0][0] == "missing-eoi"


def test_quiet_silences_pillow_and_nobody_else():
    quiet_pillow()
    warnings.warn_explicit("strange tag", UserWarning, "TiffImagePlugin.py", 1, module="PIL.TiffImagePlugin")
    with pytest.raises(UserWarning):
        warnings.warn_explicit("ours", UserWarning, "images.py", 1, module="prep.images.decode")


def test_decoding_touches_nothing_global():
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    decode_picture(saved(Image.fromarray(RGB)), alpha="white")
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before


def test_png_round_trip():
    assert (np.asarray(decode_mask(encode_png(GRAY))) == GRAY).all()
    assert (decoded(encode_png(RGB)) == RGB).all()
