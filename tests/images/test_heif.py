"""HEIC by its plugin: what a pixel means, and no half of a picture, whatever became of the file."""

from __future__ import annotations

import io
import struct

import numpy as np
import pytest
from pictures import decoded, srgb_profile, swapped_profile
from PIL import Image
from plugged import cut, heic, spoil

from prep.images.decode import _TURNS, decode_layers, decode_picture, read_header
from prep.images.formats.parts import BadPicture
from prep.images.formats.sniff import sniff
from prep.images.plugins import _nclx_notes, rounded
from prep.scan.examine import _header_notes

pillow_heif = pytest.importorskip("pillow_heif")

RNG = np.random.default_rng(11)
SMOOTH = np.asarray(Image.fromarray(RNG.integers(0, 256, (6, 6, 4), np.uint8)).resize((96, 64)))
RGB, ALPHA = SMOOTH[..., :3], SMOOTH[..., 3]
LOSS = 2  # levels: colors become YCbCr of as many bits and come back


def near(found: np.ndarray, wanted: np.ndarray, loss: int = LOSS) -> bool:
    return found.shape == wanted.shape and np.abs(found.astype(int) - wanted).max() <= loss


def grid(**options) -> bytes:
    """A picture in six tiles, as phones store them."""
    noise = Image.fromarray(RNG.integers(0, 256, (40, 60, 3), np.uint8)).resize((180, 120))
    return heic(noise, tile_size=64, quality=80, **options)


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def test_rgb_gray_and_alpha():
    assert near(decoded(heic(Image.fromarray(RGB))), RGB)
    gray = Image.fromarray(RGB[..., 0])
    assert near(decoded(heic(gray)), np.repeat(RGB[..., :1], 3, 2), 0)
    assert read_header(heic(gray)).mode == "L"
    data = heic(Image.fromarray(SMOOTH))
    header, _, transparency = decode_layers(data, alpha="black")
    assert header.has_alpha and near(np.asarray(transparency), ALPHA)
    assert near(decoded(data, "black"), RGB * (ALPHA[..., None] / 255.0), LOSS + 1)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_once(orientation):
    """The plugin's encoder writes `irot` and `imir`; cameras leave the same in EXIF, too."""
    data = heic(Image.fromarray(RGB), exif=exif(orientation))
    entry = struct.pack(">HHIH", 0x0112, 3, 1, orientation)
    assert (b"irot" in data or b"imir" in data) == (orientation > 1)
    said = data.replace(struct.pack(">HHIH", 0x0112, 3, 1, 1), entry)
    assert entry in said
    turn = _TURNS.get(orientation)
    upright = Image.fromarray(RGB) if turn is None else Image.fromarray(RGB).transpose(turn)
    assert near(decoded(said), np.asarray(upright))
    header = read_header(said)
    assert header.size == upright.size and header.orientation == 1 and header.notes == ()


@pytest.mark.parametrize("deep", [10, 12])
def test_deep_values_are_rounded_and_never_clipped(deep, monkeypatch):
    monkeypatch.setattr(pillow_heif.options, "SAVE_HDR_TO_12_BIT", deep == 12)
    values = np.repeat(np.linspace(0, 65535, 96).astype(np.uint16)[None], 64, 0)
    data = heic(values, "I;16")
    assert read_header(data).bits == deep
    most = (1 << deep) - 1
    wanted = np.floor((values >> (16 - deep)) * 255.0 / most + 0.5)
    assert near(decoded(data)[..., 0], wanted, 0)
    assert {0, 255} <= set(wanted[0])
    colors = np.stack([values, values[:, ::-1], values], axis=-1)
    assert near(decoded(heic(colors, "RGB;16")), np.floor((colors >> (16 - deep)) * 255.0 / most + 0.5), 1)


@pytest.mark.parametrize("bits", [9, 10, 12, 16])
def test_every_deep_value_has_its_rounded_one(bits):
    most = (1 << bits) - 1
    values = np.arange(most + 1).astype(np.uint16)
    assert (rounded(values, bits) == np.floor(values.astype(float) * 255 / most + 0.5)).all()


def test_profiles():
    flat = np.full((64, 64, 3), (200, 40, 90), np.uint8)
    data = heic(Image.fromarray(flat), icc_profile=swapped_profile())
    assert near(decoded(data), np.full_like(flat, (40, 200, 90)), 3)
    assert [code for code, _ in read_header(data).notes] == ["non-srgb-profile"]
    assert read_header(heic(Image.fromarray(flat), icc_profile=srgb_profile())).notes == ()


def test_colors_named_by_number():
    def data(primaries, curve):
        nclx = {"color_primaries": primaries, "transfer_characteristics": curve, "matrix_coefficients": 6,
                "full_range_flag": 1}
        return heic(Image.fromarray(RGB), nclx_profile=nclx, save_nclx_profile=True)

    assert read_header(data(1, 13)).notes == ()
    assert read_header(data(9, 16)).notes == (
        ("invalid-profile", "its colors are CICP 9/16 without an ICC profile; taken as sRGB"),)
    assert near(decoded(data(9, 16)), RGB)
    assert _nclx_notes({}) == ()


def test_primary_picture_of_several():
    frames = [Image.fromarray(np.full((64, 64, 3), level, np.uint8)) for level in (50, 150, 250)]
    file = pillow_heif.from_pillow(frames[0])
    for one in frames[1:]:
        file.add_from_pillow(one)
    stream = io.BytesIO()
    file.save(stream, quality=-1, chroma=444, primary_index=1)
    header = read_header(stream.getvalue())
    assert header.frames == 3
    assert ("multi-page", "3 pictures; the primary one is used") in list(_header_notes(header, "a.heic", 1))
    assert near(decoded(stream.getvalue()), np.full((64, 64, 3), 150))


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"])
def test_brands(brand):
    data = heic(Image.fromarray(RGB))
    assert sniff(data[:8] + brand + data[12:]) == "HEIC"
    assert near(decoded(data[:8] + b"mif1" + data[12:]), RGB)


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [grid, lambda: heic(Image.fromarray(SMOOTH)), lambda: heic(Image.fromarray(RGB))],
                         ids=["tiles", "alpha", "plain"])
def test_whole_or_not_at_all_wherever_it_is_cut(make):
    """libheif itself takes a file without its last tiles, and leaves them black."""
    cut(make())


def test_a_cut_is_found_where_no_box_says_its_length():
    data = grid()
    start = data.index(b"mdat")
    endless = data[: start - 4] + bytes(4) + data[start:]
    assert (decoded(endless) == decoded(data)).all()
    with pytest.raises(BadPicture, match=r"item \d+ of the HEIC file ends at byte \d+ of \d+") as caught:
        read_header(endless[:-100])
    assert caught.value.code == "truncated"


@pytest.mark.parametrize("what", [bytes(4000), b"\xff" * 4000, b"<html>" * 700])
def test_a_tile_that_was_overwritten_is_found(what):
    """Where the damage has a unit's head in it, as blocks of a disk do; inside of one it cannot be told from noise."""
    data = grid()
    start = data.index(b"mdat") + 300
    assert len(data) > start + 2 * len(what)
    with pytest.raises(BadPicture, match=r"item \d+ of the HEIC file is no HEVC; damaged or overwritten"):
        decode_picture(data[:start] + what + data[start + len(what) :], alpha="white")


def patched(data: bytes, box: bytes, offset: int, new: bytes) -> bytes:
    """`data` with other bytes from so many after the name of its first `box`."""
    place = data.index(box) + len(box) + offset
    return data[:place] + new + data[place + len(new) :]


def test_too_many_pixels_are_refused_from_the_header():
    size = struct.pack(">II", 30000, 30000)
    with pytest.raises(BadPicture, match="header says 30000x30000 pixels, expected at most 268435456"):
        read_header(patched(heic(Image.fromarray(RGB)), b"ispe", 4, size))


@pytest.mark.parametrize("size", [(8, 8), (96, 65), (9000, 9000)])
def test_data_of_another_size_than_the_header_says_are_refused(size):
    data = patched(heic(Image.fromarray(RGB)), b"ispe", 4, struct.pack(">II", *size))
    assert read_header(data).size == size
    with pytest.raises(BadPicture, match="cannot be decoded"):
        decode_picture(data, alpha="white")


def test_boxes_that_do_not_fit():
    data = heic(Image.fromarray(RGB))
    with pytest.raises(BadPicture, match="the HEIC box at byte 0 is shorter than its own head"):
        read_header(b"\0\0\0\4" + data[4:])
    with pytest.raises(BadPicture, match="HEIC file has no item, expected one picture at least"):
        read_header(data.replace(b"meta", b"free", 1))
    with pytest.raises(BadPicture, match="HEIC file has no item"):
        read_header(data.replace(b"iloc", b"free", 1))
    with pytest.raises(BadPicture, match="the list of items of the HEIC file does not fit its box"):
        read_header(patched(data, b"iloc", 6, b"\xff\xff"))
    with pytest.raises(BadPicture, match="says that its items lie in more than 65536 places"):
        read_header(boxed_items(b"\0", struct.pack(">HHH", 0, 0, 65535)))
    with pytest.raises(BadPicture, match="items of the HEIC file lie upon each other"):
        read_header(boxed_items(b"\x44", struct.pack(">HHHII", 0, 0, 1, 0, 5000)))


def boxed_items(sizes: bytes, entry: bytes) -> bytes:
    """A file whose list of items has this entry 400 times; `sizes` are those of its numbers."""

    def box(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body) + 8) + kind + body

    places = b"".join(struct.pack(">H", item) + entry[2:] for item in range(400))
    meta = box(b"meta", bytes(4) + box(b"iloc", bytes(4) + sizes + b"\0" + struct.pack(">H", 400) + places))
    return box(b"ftyp", b"heic\0\0\0\0heic") + meta + bytes(1000)


def test_any_bytes_give_a_picture_or_a_finding():
    spoil([grid(), heic(Image.fromarray(SMOOTH)), heic(Image.fromarray(RGB[..., 0]))], 700, RNG)


def test_one_thread_decodes_and_nothing_beside_the_picture_is_opened():
    read_header(heic(Image.fromarray(RGB)))
    options = pillow_heif.options
    assert (options.DECODE_THREADS, options.THUMBNAILS, options.DEPTH_IMAGES, options.AUX_IMAGES) == (1, False, False,
                                                                                                     False)
