"""JPEG XL by its plugin: what its header says before it is decoded, what a pixel means, and no half of a picture."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from pictures import decoded
from PIL import Image
from plugged import Bits, boxed, cut, extra_fields, jxl, sides, spoil, turned, usual_rest

from prep.images.decode import _TURNS, decode_layers, decode_picture, read_header
from prep.images.formats.jxl import codestream, read_basics
from prep.images.formats.parts import BadPicture
from prep.images.formats.sniff import sniff
from prep.images.mask import alpha_of, decode_mask

pillow_jxl = pytest.importorskip("pillow_jxl")

RNG = np.random.default_rng(12)
SMOOTH = np.asarray(Image.fromarray(RNG.integers(0, 256, (6, 6, 4), np.uint8)).resize((72, 48)))
RGB, ALPHA = SMOOTH[..., :3], SMOOTH[..., 3]


def exif(orientation: int) -> bytes:
    block = Image.Exif()
    block[0x0112] = orientation
    return block.tobytes()


def from_jpeg(tmp_path, orientation: int) -> tuple[bytes, bytes]:
    """(a JPEG of this EXIF orientation, the same as JPEG XL from which it can be rebuilt)."""
    path = tmp_path / "a.jpg"
    Image.fromarray(RGB).save(path, quality=95, subsampling=0, exif=exif(orientation))
    with Image.open(path) as picture, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the plugin says that it does this
        return path.read_bytes(), jxl(picture, lossless_jpeg=True)


# ---- the header ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "L", "LA"])
@pytest.mark.parametrize("options", [{}, {"lossless": False}, {"use_container": True}],
                         ids=["lossless", "lossy", "boxed"])
def test_the_header_says_what_the_decoder_says(mode, options):
    picture = Image.fromarray(SMOOTH).convert(mode)
    basics = read_basics(codestream(jxl(picture, **options)))
    assert (basics.mode, basics.size, basics.bits, basics.orientation) == (mode, (72, 48), 8, 1)
    assert not (basics.floats or basics.black or basics.animated or basics.premultiplied)


@pytest.mark.parametrize("size", [(8, 8), (256, 256), (257, 8), (200, 136), (1, 300), (40, 30), (30, 20), (48, 27),
                                  (50, 40), (60, 30), (36, 30), (5000, 1), (300, 225)])
def test_sizes_as_the_plugin_writes_them(size):
    assert read_basics(jxl(Image.new("L", size))).size == size


def test_what_else_a_header_may_have():
    odd = extra_fields(sides(40, 30), orientation=6, animated=True)
    odd.put(1, 1).put(0, 2).put(7, 4)  # floats of 32 bits
    odd.put(0, 1).put(2, 2).put(2, 4)  # four channels
    odd.put(0, 1).put(2, 2).put(2, 4).put(0, 1).put(1, 2).put(0, 2).put(1, 2).put(3, 4).put(0x414141, 24)  # black: AAA
    odd.put(0, 1).put(2, 2).put(0, 4).put(0, 1).put(0, 2).put(0, 2).put(0, 2).put(1, 64)  # a spot color
    odd.put(0, 1).put(2, 2).put(3, 4).put(0, 1).put(0, 2).put(0, 2).put(0, 2).put(0, 2)  # a camera's pattern
    odd.put(0, 1).put(0, 2).put(0, 1).put(0, 2).put(0, 2).put(0, 2).put(1, 1)  # alpha, premultiplied
    odd.put(0, 1).put(0, 1).put(1, 1).put(1, 2)  # not XYB; an ICC profile; gray
    basics = read_basics(odd.stream())
    assert basics.size == (30, 40) and basics.orientation == 6 and (basics.bits, basics.floats) == (32, True)
    assert basics.animated and basics.black and basics.gray and basics.premultiplied and basics.mode == "La"


def test_a_header_with_a_preview_and_another_size_to_show_it_at():
    bits = sides(40, 30).put(0, 1).put(1, 1).put(2, 3)
    bits.put(1, 1).put(1, 1).put(3, 5).put(1, 3)  # shown at 32x32
    bits.put(1, 1).put(0, 1).put(0, 2).put(9, 6).put(0, 3).put(0, 2).put(9, 6).put(0, 1)  # a preview of 10x10
    assert read_basics(usual_rest(bits).stream()).orientation == 3


def test_a_header_that_ends_too_early():
    whole = sides(40, 30).put(0, 1).stream()
    for length in range(2, len(whole)):
        with pytest.raises(BadPicture, match=f"JPEG XL ends inside its header, after {length} bytes"):
            read_basics(whole[:length])


def test_both_forms_are_known_by_content():
    assert sniff(jxl(Image.fromarray(RGB))) == sniff(jxl(Image.fromarray(RGB), use_container=True)) == "JXL"


# ---- pixels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"use_container": True}, {"exif": exif(6)}], ids=["bare", "boxed", "in parts"])
def test_rgb_gray_and_alpha(options):
    assert (decoded(jxl(Image.fromarray(RGB), **options)) == RGB).all()
    assert (decoded(jxl(Image.fromarray(ALPHA), **options)) == ALPHA[..., None]).all()
    for kept in (SMOOTH, SMOOTH[..., 2:]):
        data = jxl(Image.fromarray(kept), **options)
        header, _, transparency = decode_layers(data, alpha="black")
        assert header.has_alpha and (np.asarray(transparency) == ALPHA).all()
        assert np.abs(decoded(data, "black") - kept[..., :-1] * (ALPHA[..., None] / 255.0)).max() <= 1


@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_of_the_codestream_is_applied_once_and_that_of_exif_is_not(orientation):
    plain = jxl(Image.fromarray(RGB), lossless=False, quality=95)
    turn = _TURNS.get(orientation)
    upright = Image.fromarray(decoded(plain))
    upright = upright if turn is None else upright.transpose(turn)
    stream = turned(plain, (72, 48), orientation)
    for data in (stream, boxed((b"jxlc", stream), (b"Exif", bytes(4) + exif(8)))):
        assert read_header(data).size == upright.size
        assert np.abs(decoded(data).astype(int) - np.asarray(upright)).max() <= 1  # it dithers by place


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_jpeg_made_smaller_shows_what_the_jpeg_shows(tmp_path, orientation):
    jpeg, data = from_jpeg(tmp_path, orientation)
    assert read_header(data).size == read_header(jpeg).size
    assert np.abs(decoded(data).astype(int) - decoded(jpeg)).mean() < 1


def test_16_bit_gray_is_rounded_and_never_clipped():
    values = RNG.integers(0, 65536, (48, 72), np.uint16)
    values[0, :4] = 0, 65535, 128, 129
    data = jxl(Image.fromarray(values))
    assert read_header(data).bits == 16
    found = np.asarray(decode_mask(data))  # of a mask no profile is asked, and the encoder calls these linear
    assert (found == np.floor(values.astype(float) * 255 / 65535 + 0.5)).all()


class Answer:
    """A decoder that gives what it is told to."""

    def __init__(self, mode, size, data):
        self.mode, (self.width, self.height), self.data = mode, size, data

    def __call__(self, stream):
        return False, self, self.data, b"", []


def test_gray_and_alpha_of_16_bits(monkeypatch):
    """The plugin's encoder writes none."""
    values = RNG.integers(0, 65536, (48, 72, 2), np.uint16)
    header = extra_fields(sides(72, 48)).put(0, 1).put(3, 2).put(15, 6).put(1, 1).put(1, 2).put(1, 1)
    header.put(1, 1).put(0, 1).put(0, 1).put(1, 2)
    monkeypatch.setattr(pillow_jxl, "Decoder", lambda num_threads: Answer("LA", (72, 48), values.tobytes()))
    found = alpha_of(header.stream())
    assert (np.asarray(found) == np.floor(values[..., 1].astype(float) * 255 / 65535 + 0.5)).all()


def test_a_decoder_that_says_another_size(monkeypatch):
    data = jxl(Image.fromarray(RGB))
    monkeypatch.setattr(pillow_jxl, "Decoder", lambda num_threads: Answer("RGB", (8, 8), bytes(192)))
    with pytest.raises(BadPicture, match="its header says 72x48 RGB, its data 8x8 RGB"):
        decode_picture(data, alpha="white")


def test_a_profile_is_known_when_it_is_decoded():
    """The encoder calls 16-bit gray linear."""
    data = jxl(Image.fromarray(RGB))
    assert read_header(data).notes == decode_layers(data, alpha="white")[0].notes == ()
    values = np.full((48, 72), 0.2140 * 65535, np.uint16)  # the middle of sRGB
    data = jxl(Image.fromarray(values))
    assert read_header(data).notes == ()
    assert [code for code, _ in decode_layers(data, alpha="white")[0].notes] == ["non-srgb-profile"]
    assert np.abs(decoded(data).astype(int) - 128).max() <= 1


# ---- faults ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"lossless": False}, {"use_container": True}, {"exif": exif(6)}],
                         ids=["lossless", "lossy", "boxed", "in parts"])
def test_whole_or_not_at_all_wherever_it_is_cut(options):
    cut(jxl(Image.fromarray(SMOOTH), **options))


def test_a_jpeg_made_smaller_that_is_cut(tmp_path):
    data = from_jpeg(tmp_path, 1)[1]
    whole = decoded(data)
    for length in range(0, len(data), 47):
        try:
            assert (decoded(data[:length]) == whole).all(), length
        except BadPicture as error:
            assert error.code


def test_damage_is_named_in_words_of_ours():
    data = bytearray(jxl(Image.fromarray(RGB)))
    data[len(data) // 2 :] = bytes(len(data) - len(data) // 2)
    with pytest.raises(BadPicture, match=r"^JPEG XL data are damaged, or end too early$"):
        decode_picture(bytes(data), alpha="white")


def test_boxes_that_do_not_fit():
    stream = jxl(Image.fromarray(RGB))
    assert (decoded(boxed((b"jxlc", stream))) == RGB).all()
    with pytest.raises(BadPicture, match=r"the JPEG XL box at byte 32 has \d+ of its \d+ bytes"):
        read_header(boxed((b"jxlc", stream))[:-9])
    with pytest.raises(BadPicture, match="the JPEG XL container has no codestream"):
        read_header(boxed((b"Exif", stream)))
    with pytest.raises(BadPicture, match="the JPEG XL box at byte 32 is shorter than its own head"):
        read_header(boxed() + b"\0\0\0\3jxlc" + stream)
    long = b"\0\0\0\1jxlc" + (len(stream) + 16).to_bytes(8, "big") + stream
    assert (decoded(boxed() + long) == RGB).all()
    assert (decoded(boxed() + b"\0\0\0\0jxlc" + stream) == RGB).all()


def test_too_many_pixels_are_refused_from_the_header():
    for width, height in ((20000, 20000), (1 << 30, 1 << 30), (1 << 29, 1)):
        with pytest.raises(BadPicture, match=f"header says {width}x{height} pixels, expected at most 268435456"):
            read_header(sides(width, height).put(3, 2).stream())


def test_what_the_plugin_would_not_give_as_it_is():
    moving = usual_rest(extra_fields(sides(40, 30), animated=True)).stream()
    with pytest.raises(BadPicture, match="is an animated JPEG XL, of which only the last frame is given out"):
        read_header(moving)
    with pytest.raises(BadPicture, match="JPEG XL has floats, expected integers in RGB or gray"):
        read_header(jxl(Image.fromarray(np.zeros((8, 8), np.float32))))
    inks = sides(40, 30).put(0, 1).put(0, 1).put(0, 1).put(0, 2).put(1, 1).put(1, 2)
    inks.put(0, 1).put(2, 2).put(2, 4).put(0, 1).put(0, 2).put(0, 2).put(0, 2).put(1, 1).put(1, 1).put(0, 2).put(1, 1)
    with pytest.raises(BadPicture, match="JPEG XL has four inks, expected integers in RGB or gray"):
        read_header(inks.stream())


def test_any_bytes_give_a_picture_or_a_finding():
    spoil([jxl(Image.fromarray(SMOOTH)), jxl(Image.fromarray(RGB), lossless=False),
           jxl(Image.fromarray(RGB), exif=exif(3))], 120, RNG)  # fmt: skip


def test_any_bits_are_a_header_or_a_reason():
    for _ in range(500):
        bits = Bits().put(int.from_bytes(RNG.bytes(12), "little"), 96)
        try:
            assert min(read_basics(bits.stream(RNG.bytes(40))).size) > 0
        except BadPicture as error:
            assert error.code == "truncated"
