"""Each colour mode, orientation and fault against an expectation computed with numpy alone; no file is needed."""

from __future__ import annotations

import io
import struct
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile, TiffImagePlugin

from prep import images
from prep.colour import judge
from prep.images import BadPicture
from prep.records import Placement

RNG = np.random.default_rng(7)
RGB = RNG.integers(0, 256, (20, 30, 3), np.uint8)
GRAY = RNG.integers(0, 256, (20, 30), np.uint8)
ALPHA = RNG.integers(0, 256, (20, 30), np.uint8)


def saved(picture: Image.Image, kind: str = "PNG", **options) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, kind, **options)
    return stream.getvalue()


def decoded(data: bytes, alpha: str = "white") -> np.ndarray:
    picture = images.decode(data, alpha=alpha)
    assert picture.mode == "RGB"
    assert picture.size == images.read_header(data).size
    return np.asarray(picture)


def flattened(rgb: np.ndarray, alpha: np.ndarray, colour: tuple[int, int, int]) -> np.ndarray:
    part = alpha[..., None].astype(float) / 255
    return np.floor(rgb * part + np.array(colour) * (1 - part) + 0.5).astype(np.uint8)


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


def exif(orientation: int, order: str = "<") -> bytes:
    mark = b"II*\0" if order == "<" else b"MM\0*"
    return b"Exif\0\0" + mark + struct.pack(order + "IHHHIHH", 8, 1, 0x0112, 3, 1, orientation, 0) + bytes(4)


# ---- modes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "WEBP"])
def test_rgb_is_itself(kind):
    options = {"lossless": True} if kind == "WEBP" else {}
    assert (decoded(saved(Image.fromarray(RGB), kind, **options)) == RGB).all()


def test_rgba_is_flattened_onto_the_colour():
    data = saved(Image.fromarray(np.dstack([RGB, ALPHA])))
    assert images.read_header(data).has_alpha
    for name, colour in (("white", (255, 255, 255)), ("black", (0, 0, 0)), ("#ff8000", (255, 128, 0))):
        assert (decoded(data, name) == flattened(RGB, ALPHA, colour)).all()
    assert (np.asarray(images.alpha_of(data)) == ALPHA).all()


def test_opaque_picture_has_alpha_255():
    assert (np.asarray(images.alpha_of(saved(Image.fromarray(RGB)))) == 255).all()


def test_gray_and_gray_with_alpha():
    assert (decoded(saved(Image.fromarray(GRAY))) == GRAY[..., None]).all()
    pair = Image.merge("LA", [Image.fromarray(GRAY), Image.fromarray(ALPHA)])
    wanted = flattened(np.repeat(GRAY[..., None], 3, 2), ALPHA, (0, 0, 0))
    assert (decoded(saved(pair), "black") == wanted).all()


def test_one_bit():
    bits = GRAY > 127
    data = saved(Image.fromarray(bits))
    assert images.read_header(data).bits == 1
    assert (decoded(data) == bits[..., None] * 255).all()


def test_palette_with_and_without_transparent_entries():
    colours = RNG.integers(0, 256, (16, 3), np.uint8)
    index = RNG.integers(0, 16, (20, 30), np.uint8)
    picture = Image.fromarray(index, "P")
    picture.putpalette(colours.tobytes())
    assert (decoded(saved(picture)) == colours[index]).all()
    wanted = np.where((index == 3)[..., None], [255, 255, 255], colours[index])
    assert (decoded(saved(picture, transparency=3)) == wanted).all()
    levels = bytes(range(0, 240, 15))
    wanted = flattened(colours[index], np.frombuffer(levels, np.uint8)[index], (255, 255, 255))
    assert (decoded(saved(picture, transparency=levels)) == wanted).all()


def test_transparent_colour_of_rgb_and_of_gray():
    rgb = RGB.copy()
    rgb[3:9] = 10, 20, 30
    data = saved(Image.fromarray(rgb), transparency=(10, 20, 30))
    wanted = np.where((rgb == (10, 20, 30)).all(-1)[..., None], 255, rgb)
    assert (decoded(data) == wanted).all()
    gray = GRAY.copy()
    gray[2:5] = 77
    data = saved(Image.fromarray(gray), transparency=77)
    assert (np.asarray(images.alpha_of(data)) == np.where(gray == 77, 0, 255)).all()


def test_transparent_value_of_one_bit():
    bits = GRAY > 127
    data = saved(Image.fromarray(bits), transparency=1)
    assert (np.asarray(images.alpha_of(data)) == np.where(bits, 0, 255)).all()


@pytest.mark.parametrize("kind", ["PNG", "TIFF"])
def test_16_bit_gray_is_scaled_and_never_clipped(kind):
    values = RNG.integers(0, 65536, (20, 30), np.uint16)
    values[0, :4] = 0, 65535, 128, 129
    data = saved(Image.fromarray(values), kind)
    assert images.read_header(data).bits == 16
    assert (decoded(data) == np.floor(values.astype(float) * 255 / 65535 + 0.5).astype(np.uint8)[..., None]).all()


def test_16_bit_rgb_is_its_high_byte():
    values = RNG.integers(0, 65536, (20, 30, 3), np.uint16)
    assert (decoded(png16(values)) == values >> 8).all()
    assert images.read_header(png16(values)).bits == 16


def test_4_bit_gray_and_its_transparent_value():
    data = raw_png(4, 1, 4, 0, b"\0\x0f\x37", struct.pack(">H", 3))  # 0 15 3 7
    assert images.read_header(data).bits == 4
    assert np.asarray(images.alpha_of(data)).tolist() == [[255, 255, 0, 255]]
    assert decoded(data, "black")[0, :, 0].tolist() == [0, 255, 0, 119]


def test_16_bit_transparent_value():
    values = RNG.integers(0, 65536, (20, 30), np.uint16)
    data = png16(values, key=struct.pack(">H", int(values[4, 5])))
    assert (np.asarray(images.alpha_of(data)) == np.where(values == values[4, 5], 0, 255)).all()


def test_float_from_0_to_1():
    values = RNG.random((20, 30), np.float32)
    data = saved(Image.fromarray(values), "TIFF")
    assert (decoded(data) == np.floor(values.astype(float) * 255 + 0.5).astype(np.uint8)[..., None]).all()


@pytest.mark.parametrize("values", [np.full((4, 4), 1.5, np.float32), np.full((4, 4), np.nan, np.float32)])
def test_other_floats_are_refused(values):
    with pytest.raises(BadPicture, match=r"float values are from .* expected 0 to 1"):
        images.decode(saved(Image.fromarray(values), "TIFF"), alpha="white")


def test_32_bit_gray():
    values = RNG.integers(0, 65536, (20, 30), np.int32)
    wanted = np.floor(values.astype(float) * 255 / 65535 + 0.5).astype(np.uint8)
    assert (decoded(saved(Image.fromarray(values), "TIFF")) == wanted[..., None]).all()
    with pytest.raises(BadPicture, match="gray values are from 0 to 70000, expected 0 to 65535"):
        images.decode(saved(Image.fromarray(np.array([[0, 70000]], np.int32)), "TIFF"), alpha="white")


def test_cmyk_without_profile():
    inks = RNG.integers(0, 256, (16, 16, 4), np.uint8)
    data = saved(Image.fromarray(inks, "CMYK"), "TIFF")
    wanted = (255 - inks[..., :3].astype(float)) * (255 - inks[..., 3:]) / 255
    assert np.abs(decoded(data) - wanted).max() <= 1
    assert images.read_header(data).mode == "CMYK"


def test_lab_is_refused_by_name():
    picture = Image.new("LAB", (8, 8))
    with pytest.raises(BadPicture, match="colour mode is LAB, expected RGB, gray, palette or CMYK"):
        images.decode(saved(picture, "TIFF"), alpha="white")


def test_first_frame_of_an_animation():
    frames = [Image.fromarray(np.full((8, 8, 3), level, np.uint8)) for level in (50, 150, 250)]
    for kind in ("GIF", "PNG", "WEBP", "TIFF"):
        options = {"lossless": True} if kind == "WEBP" else {}
        data = saved(frames[0], kind, save_all=True, append_images=frames[1:], **options)
        assert images.read_header(data).frames == 3, kind
        assert (decoded(data) == 50).all(), kind


@pytest.mark.parametrize("text", ["red", "#12345", "#12345g", "ffffff", ""])
def test_colours_are_strict(text):
    with pytest.raises(ValueError, match=f"colour is '{text}', expected #rrggbb, white"):
        images.colour_of(text)


# ---- orientation -----------------------------------------------------------------------------------------------------

TURNED = {1: RGB, 2: RGB[:, ::-1], 3: RGB[::-1, ::-1], 4: RGB[::-1], 5: RGB.transpose(1, 0, 2),
          6: np.rot90(RGB, -1), 7: np.rot90(RGB, 2).transpose(1, 0, 2), 8: np.rot90(RGB)}  # fmt: skip


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_is_applied(orientation, order):
    data = saved(Image.fromarray(RGB), exif=exif(orientation, order))
    assert (decoded(data) == TURNED[orientation]).all()
    assert images.read_header(data).orientation == orientation
    mask = saved(Image.fromarray(RGB[..., 0]), exif=exif(orientation, order))
    assert (np.asarray(images.decode_mask(mask)) == TURNED[orientation][..., 0]).all()


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
        wanted = np.asarray(whole if orientation == 1 else whole.transpose(images._TURNS[orientation]))
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
    ((code, detail),) = images.read_header(data).notes
    assert code == "exif-invalid"
    assert says in detail


# ---- colour profiles -------------------------------------------------------------------------------------------------


def srgb_profile() -> bytes:
    return ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def swapped_profile() -> bytes:
    """sRGB with its red and green primaries exchanged: a profile whose conversion can be told without LittleCMS."""
    return srgb_profile().replace(b"rXYZ", b"????").replace(b"gXYZ", b"rXYZ").replace(b"????", b"gXYZ")


def test_srgb_profile_changes_nothing():
    data = saved(Image.fromarray(RGB), icc_profile=srgb_profile())
    assert (decoded(data) == RGB).all()
    assert images.read_header(data).notes == ()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "TIFF", "WEBP"])
def test_another_profile_is_converted(kind):
    flat = np.full((16, 16, 3), (200, 40, 90), np.uint8)
    options = {"lossless": True} if kind == "WEBP" else {}
    data = saved(Image.fromarray(flat), kind, icc_profile=swapped_profile(), **options)
    assert np.abs(decoded(data).astype(int) - (40, 200, 90)).max() <= 2
    assert [code for code, _ in images.read_header(data).notes] == ["non-srgb-profile"]


def test_profile_and_alpha():
    pixels = np.dstack([np.full((8, 8, 3), (200, 40, 90), np.uint8), np.full((8, 8), 128, np.uint8)])
    data = saved(Image.fromarray(pixels), icc_profile=swapped_profile())
    wanted = flattened(np.full((8, 8, 3), (40, 200, 90)), pixels[..., 3], (255, 255, 255))
    assert np.abs(decoded(data).astype(int) - wanted).max() <= 2


def test_gray_with_an_rgb_profile_is_usual():
    data = saved(Image.fromarray(GRAY), icc_profile=srgb_profile())
    assert np.abs(decoded(data).astype(int) - GRAY[..., None]).max() <= 2
    assert images.read_header(data).notes == ()


@pytest.mark.parametrize("profile", [b"rubbish", bytes(128), b"x" * 5000])
def test_broken_profile_is_taken_as_srgb(profile):
    data = saved(Image.fromarray(RGB), icc_profile=profile)
    assert (decoded(data) == RGB).all()
    assert images.read_header(data).notes == (
        ("invalid-profile", "the embedded colour profile is unusable; taken as sRGB"),)


def test_profile_for_another_mode_is_ignored():
    assert judge(srgb_profile(), "CMYK") == (
        ("invalid-profile", "the colour profile is for RGB, the picture is CMYK; taken as sRGB"),)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "GIF", "TIFF", "AVIF", "BMP"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_truncated_files_are_refused(kind, share):
    noise = Image.fromarray(RNG.integers(0, 256, (64, 64, 3), np.uint8))
    data = saved(noise, kind)
    with pytest.raises(BadPicture) as caught:
        images.decode(data[: int(len(data) * share)], alpha="white")
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
                images.decode(bytes(broken), alpha="white")
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
        images.read_header(data)


def test_palette_without_colours_is_refused():
    with pytest.raises(BadPicture, match="cannot be decoded: AssertionError"):
        images.read_header(raw_png(4, 1, 8, 3, b"\0\0\1\2\3", b""))


def test_missing_end_of_jpeg_is_a_note():
    data = saved(Image.fromarray(RGB), "JPEG")
    assert (decoded(data[:-2]) == decoded(data)).all()
    assert images.read_header(data[:-2]).notes[0][0] == "missing-eoi"


def test_quiet_silences_pillow_and_nobody_else():
    images.quiet()
    warnings.warn_explicit("strange tag", UserWarning, "TiffImagePlugin.py", 1, module="PIL.TiffImagePlugin")
    with pytest.raises(UserWarning):
        warnings.warn_explicit("ours", UserWarning, "images.py", 1, module="prep.images")


def test_decoding_touches_nothing_global():
    before = Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)
    images.decode(saved(Image.fromarray(RGB)), alpha="white")
    assert (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES, list(warnings.filters)) == before


def test_threads_agree():
    data = saved(Image.fromarray(np.dstack([RGB, ALPHA])), icc_profile=swapped_profile())
    placement = Placement(scaled=(24, 16), crop=(4, 0), bucket=(16, 16), flip=True)
    alone = images.place(images.decode(data, alpha="white"), placement).tobytes()
    with ThreadPoolExecutor(4) as pool:
        many = pool.map(lambda _: images.place(images.decode(data, alpha="white"), placement).tobytes(), range(64))
        assert set(many) == {alone}


# ---- placing ---------------------------------------------------------------------------------------------------------


def test_place_without_scaling_is_a_cut():
    picture = Image.fromarray(RGB)
    placed = images.place(picture, Placement(scaled=(30, 20), crop=(5, 3), bucket=(16, 8)))
    assert (placed == RGB[3:11, 5:21]).all()
    mirrored = images.place(picture, Placement(scaled=(30, 20), crop=(5, 3), bucket=(16, 8), flip=True))
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
    placed = images.place(Image.fromarray(smooth), Placement(scaled=scaled, crop=(0, 0), bucket=scaled))
    along = lanczos(smooth.astype(float), scaled[1])
    wanted = np.clip(lanczos(along.transpose(1, 0, 2), scaled[0]).transpose(1, 0, 2), 0, 255)
    assert np.abs(placed - wanted).max() <= 1.5  # two roundings to 8 bits


def test_place_refuses_to_cut_outside():
    with pytest.raises(AssertionError, match="cuts outside the scaled picture"):
        images.place(Image.fromarray(RGB), Placement(scaled=(30, 20), crop=(20, 0), bucket=(16, 8)))


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
    """Every pixel comes from the picture: one colour in, one colour out, at the right shape."""
    width, height = placement.bucket
    placed = images.place(Image.new("RGB", size, (9, 99, 199)), placement)
    assert placed.shape == (height, width, 3)
    assert placed.dtype == np.uint8
    assert (placed == (9, 99, 199)).all()
    cells = images.place_mask(Image.new("L", size, 200), placement, 8)
    assert cells.shape == (height // 8, width // 8)
    assert (cells == 200).all()


@settings(max_examples=40, deadline=None)
@given(placement=placements)
def test_mask_cells_are_the_means_of_what_place_would_cut(placement):
    """A mask and its picture are cut alike, mirrored alike."""
    width, height = placement.scaled
    mask = Image.fromarray(np.random.default_rng(1).integers(0, 256, (height, width), np.uint8))
    pixels = images.place(mask.convert("RGB"), placement)[..., 0].astype(float)
    rows, columns = placement.bucket[1] // 8, placement.bucket[0] // 8
    means = pixels.reshape(rows, 8, columns, 8).mean(axis=(1, 3))
    assert (images.place_mask(mask, placement, 8) == np.floor(means + 0.5)).all()


# ---- masks -----------------------------------------------------------------------------------------------------------


def test_masks_are_values_not_colours():
    assert (np.asarray(images.decode_mask(saved(Image.fromarray(GRAY)))) == GRAY).all()
    same = np.repeat(GRAY[..., None], 3, 2)
    assert (np.asarray(images.decode_mask(saved(Image.fromarray(same), icc_profile=swapped_profile()))) == GRAY).all()


def test_transparent_parts_of_a_mask_do_not_train():
    white = np.dstack([np.full((20, 30, 3), 255, np.uint8), ALPHA])
    assert (np.asarray(images.decode_mask(saved(Image.fromarray(white)))) == ALPHA).all()


def test_mask_of_another_size_is_scaled_to_the_picture():
    half = Image.fromarray(np.kron([[0, 255], [255, 0]], np.ones((8, 8))).astype(np.uint8))
    cells = images.place_mask(half, Placement(scaled=(32, 32), crop=(0, 0), bucket=(32, 32)), 8)
    assert cells.shape == (4, 4)
    assert cells[0, 0] == 0
    assert cells[0, 3] == 255


def test_mask_needs_whole_cells():
    with pytest.raises(AssertionError, match="not in steps of 8"):
        images.place_mask(Image.new("L", (20, 20)), Placement(scaled=(20, 20), crop=(0, 0), bucket=(20, 20)), 8)


def test_png_round_trip():
    assert (np.asarray(images.decode_mask(images.encode_png(GRAY))) == GRAY).all()
    assert (decoded(images.encode_png(RGB)) == RGB).all()
