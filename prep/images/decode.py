"""Picture bytes → pixels: the one place that says what a pixel of a file means. (`colour.py` is its other half.)

What decides the value is `POLICY`, part of every latent's and mask's key; raise `meaning` when a line below changes.

| file has                      | we do                                                                               |
|-------------------------------|-------------------------------------------------------------------------------------|
| EXIF orientation 1-8          | applied (JPEG, PNG, WebP, TIFF, AVIF); a size is always that after it               |
| orientation of HEIC, JPEG XL  | the container's, or the codestream's, applied by the decoder; EXIF's is ignored     |
| other or damaged EXIF         | taken as upright; a note                                                            |
| ICC profile, sRGB in effect   | nothing: no colour of a 17x17x17 probe moves by more than 2 of 255                  |
| ICC profile, another          | converted to sRGB by LittleCMS, relative colorimetric with black point compensation |
| ICC profile, broken or misfit | ignored, taken as sRGB; a note                                                      |
| no profile                    | taken as sRGB; PNG gAMA, cHRM and cICP are not read                                 |
| HEIC, CICP and no profile     | taken as sRGB; a note when it names another space                                   |
| CMYK                          | by its profile; without one by Pillow's formula, (255-C)(255-K)/255                 |
| gray, 1 bit, palette          | expanded to RGB                                                                     |
| 16-bit gray                   | v * 255 / 65535, rounded; never clipped                                             |
| 16-bit RGB, deep JPEG XL RGB  | the high byte: all that Pillow, or the plugin, hands out                            |
| HEIC of 10 or 12 bits         | v * 255 / 1023 or 4095, rounded; never clipped                                      |
| float                         | times 255 when all values are from 0 to 1, else refused; in JPEG XL refused         |
| alpha, transparent colour     | composited onto the recipe's colour, in 8 bits, after conversion to sRGB            |
| several frames or pages       | the first, of HEIC the primary one; a note. Animated JPEG XL is refused             |
| JPEG without its end marker   | refused, as libjpeg asks for what follows; one that is done before: a note          |
| truncated, damaged            | refused (`BadPicture`); half a picture is never used                                |
| more than 2^28 pixels         | refused from the header, before any is allocated                                    |

Thread-safe and free of global state: plugins are called directly, not through `Image.open`, whose bomb check and
notices are warnings. Decoding, resizing and colour conversion release the GIL. What Pillow says through `warnings`
about strange TIFF tags can only be silenced for the whole process: the command line does it with `quiet`.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from PIL import Image

from prep.arrays import Placement, Size
from prep.images.color import split, to_srgb
from prep.images.header import Header, blaming, loaded, open_picture, profile_of
from prep.parse import colour_of

POLICY: dict[str, str | int] = {"meaning": 1, "orientation": "exif", "colour": "srgb relative-colorimetric bpc",
                                "resize": "lanczos", "mask_resize": "bilinear", "mask_cell": "mean"}

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Picture = Image.Image

_TURNS = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
          5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
          8: Image.Transpose.ROTATE_90}


def quiet() -> None:
    """Silences Pillow's warnings in this process; for a command's start, never for a library."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def read_header(data: bytes) -> Header:
    """The `Header` of a picture file; no pixels are decoded. Raises `BadPicture`."""
    return open_picture(data)[2]


def decode(data: bytes, *, alpha: str) -> Image.Image:
    """The first picture in `data`: mode RGB, sRGB, upright, transparency flattened onto the colour `alpha`.

    Raises `BadPicture` for anything that cannot be decoded to its last pixel, `ValueError` as `colour_of` does.
    """
    return look(data, alpha=alpha)[1]


def look(data: bytes, *, alpha: str) -> tuple[Header, Image.Image, Image.Image | None]:
    """(header, picture, transparency or `None`) of one decoding: what `read_header`, `decode` and `alpha_of` say."""
    colour, transparency, profile, header = _load(data)
    with blaming("corrupt-data"):
        pixels = to_srgb(colour, profile)
    if transparency is not None:
        canvas = Image.new("RGB", pixels.size, colour_of(alpha))
        canvas.paste(pixels, mask=transparency)
        pixels, transparency = canvas, _upright(transparency, header)
    return header, _upright(pixels, header), transparency


def alpha_of(data: bytes) -> Image.Image:
    """The transparency of a picture as mode L, upright: 0 transparent, 255 opaque everywhere when it has none."""
    colour, transparency, _, header = _load(data)
    return _upright(transparency or Image.new("L", colour.size, 255), header)


def decode_mask(data: bytes) -> Image.Image:
    """A mask file as mode L, upright: 255 trains, 0 does not.

    Colour profiles are ignored, colours become luma, what is transparent counts as black. Raises `BadPicture`.
    """
    return look_at_mask(data)[1]


def look_at_mask(data: bytes) -> tuple[Header, Image.Image, bool]:
    """(header, mask, whether it has colours) of one decoding; the mask as `decode_mask` gives it."""
    colour, transparency, _, header = _load(data)
    colour = colour.convert("RGB") if colour.mode == "CMYK" else colour
    coloured = colour.mode == "RGB" and len({band.tobytes() for band in colour.split()}) > 1
    gray = colour.convert("L")
    if transparency is not None:
        canvas = Image.new("L", gray.size, 0)
        canvas.paste(gray, mask=transparency)
        gray = canvas
    return header, _upright(gray, header), coloured


def place(picture: Image.Image, placement: Placement) -> Pixels:
    """The bucket's pixels, uint8 [H, W, 3]: `picture` (RGB) scaled as a whole with Lanczos, cut, perhaps mirrored.

    The whole is scaled, not only what the cut needs: Pillow keeps a box in float32, and the last bits would differ.
    """
    return _cut(_scale(picture, placement.scaled, Image.Resampling.LANCZOS), placement)


def place_mask(mask: Image.Image, placement: Placement, factor: int) -> Pixels:
    """The mask at latent cells, uint8 [h, w]: scaled and cut as its picture, then the rounded mean of each cell.

    `factor` is pixels per cell. The triangle filter is antialiased like Lanczos, without its ringing.
    """
    pixels_HW = _cut(_scale(mask, placement.scaled, Image.Resampling.BILINEAR), placement)
    high, wide = pixels_HW.shape[0] // factor, pixels_HW.shape[1] // factor
    assert pixels_HW.shape == (high * factor, wide * factor), f"bucket {placement.bucket} is not in steps of {factor}"
    sums_hw = pixels_HW.reshape(high, factor, wide, factor).sum(axis=(1, 3), dtype=np.int64)
    mean_hw: Pixels = ((2 * sums_hw + factor * factor) // (2 * factor * factor)).astype(np.uint8)
    return mean_hw


def encode_png(pixels: Pixels) -> bytes:
    """`pixels`, uint8 [H, W] or [H, W, 3], as the bytes of a PNG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def _scale(picture: Image.Image, size: Size, resample: Image.Resampling) -> Image.Image:
    return picture if picture.size == size else picture.resize(size, resample)


def _cut(scaled: Image.Image, placement: Placement) -> Pixels:
    (left, top), (width, height) = placement.crop, placement.bucket
    inside = 0 <= left <= scaled.width - width and 0 <= top <= scaled.height - height
    assert inside, f"{placement} cuts outside the scaled picture"
    pixels: Pixels = np.asarray(scaled.crop((left, top, left + width, top + height)))
    return np.ascontiguousarray(pixels[:, ::-1] if placement.flip else pixels)


def _load(data: bytes) -> tuple[Image.Image, Image.Image | None, bytes | None, Header]:
    """(colours, transparency, profile, header), decoded as they are stored."""
    picture, parts, header = open_picture(data)
    with blaming("corrupt-data"):
        header = loaded(picture, parts, header)
        return *split(picture, header.bits), profile_of(picture, parts), header


def _upright(picture: Image.Image, header: Header) -> Image.Image:
    turn = _TURNS.get(header.orientation)
    return picture if turn is None or header.format == "TIFF" else picture.transpose(turn)
