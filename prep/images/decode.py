"""Picture bytes to pixels: the one place that defines what a pixel of a file means. (`color.py` is its other half.)

`POLICY` decides the value and is part of every latent's and mask's key; raise `meaning` when a line below changes.

| file has                      | we do                                                                               |
|-------------------------------|-------------------------------------------------------------------------------------|
| EXIF orientation 1-8          | applied (JPEG, PNG, WebP, TIFF, AVIF); a size is always that after it               |
| orientation of HEIC, JPEG XL  | the container's, or the codestream's, applied by the decoder; EXIF's is ignored     |
| other or damaged EXIF         | taken as upright; a note                                                            |
| ICC profile, sRGB in effect   | nothing: no color of a 17x17x17 probe moves by more than 2 of 255                  |
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
| alpha, transparent color     | composited onto the recipe's color, in 8 bits, after conversion to sRGB            |
| the same, kept               | a fourth channel, not premultiplied; what is wholly transparent is black           |
| several frames or pages       | the first, of HEIC the primary one; a note. Animated JPEG XL is refused             |
| JPEG without its end marker   | refused, as libjpeg asks for what follows; one that is done before: a note          |
| truncated, damaged            | refused (`BadPicture`); half a picture is never used                                |
| more than 2^28 pixels         | refused from the header, before any is allocated                                    |

Thread-safe and free of global state: plugins are called directly, not through `Image.open`, whose bomb check and
notices are warnings. Decoding, resizing and color conversion release the GIL. Pillow's `warnings` about strange TIFF
tags can only be silenced for the whole process: the command line calls `quiet_pillow`.
"""

from __future__ import annotations

import io
import warnings
from typing import Any

import numpy as np
from PIL import Image

from prep.geometry import Placement, Size
from prep.images.color import split_alpha, to_srgb
from prep.images.header import PictureHeader, as_bad_picture, load_checked, open_picture, profile_of
from prep.parse import KEPT, color_of

# Part of every latent's key: changing a letter here makes every cache stale.
POLICY: dict[str, str | int] = {"meaning": 1, "orientation": "exif", "colour": "srgb relative-colorimetric bpc",
                                "resize": "lanczos", "mask_resize": "bilinear", "mask_cell": "mean"}

Pixels = np.ndarray[Any, np.dtype[np.uint8]]
Picture = Image.Image

_TURNS = {2: Image.Transpose.FLIP_LEFT_RIGHT, 3: Image.Transpose.ROTATE_180, 4: Image.Transpose.FLIP_TOP_BOTTOM,
          5: Image.Transpose.TRANSPOSE, 6: Image.Transpose.ROTATE_270, 7: Image.Transpose.TRANSVERSE,
          8: Image.Transpose.ROTATE_90}


def quiet_pillow() -> None:
    """Silences Pillow's warnings in this process. Call it when a command starts, never from a library."""
    warnings.filterwarnings("ignore", module=r"PIL\.")


def read_header(data: bytes) -> PictureHeader:
    """The `PictureHeader` of a picture file; no pixels are decoded. Raises `BadPicture`."""
    return open_picture(data)[2]


def decode_picture(data: bytes, *, alpha: str) -> Image.Image:
    """The first picture in `data`: mode RGB, sRGB, upright, transparency flattened onto the color `alpha`; mode RGBA if
    that is "keep", opaque where the file has no transparency.

    Raises `BadPicture` for anything that cannot be decoded to its last pixel, `ValueError` as `color_of` does.
    """
    return decode_layers(data, alpha=alpha)[1]


def decode_as_stored(data: bytes) -> Image.Image:
    """The first picture in `data` as programs see it that ignore color profiles and transparency: mode RGB, upright.

    Raises `BadPicture`.
    """
    color, _, _, header = load_layers(data)
    with as_bad_picture("corrupt-data", len(data)):
        return upright(to_srgb(color, None), header)


def decode_layers(data: bytes, *, alpha: str) -> tuple[PictureHeader, Image.Image, Image.Image | None]:
    """(header, picture, transparency or `None`) from decoding once: as `read_header`, `decode_picture`, `alpha_of`."""
    color, transparency, profile, header = load_layers(data)
    with as_bad_picture("corrupt-data", len(data)):
        pixels = to_srgb(color, profile)
    if alpha == KEPT:
        pixels = _with_transparency(pixels, transparency)
    elif transparency is not None:
        canvas = Image.new("RGB", pixels.size, color_of(alpha))
        canvas.paste(pixels, mask=transparency)
        pixels = canvas
    if transparency is not None:
        transparency = upright(transparency, header)
    return header, upright(pixels, header), transparency


def _with_transparency(pixels: Image.Image, transparency: Image.Image | None) -> Image.Image:
    """RGBA, black where nothing is seen, as Pillow's scaling makes it.

    Programs leave colors below what they cut out. Without that, a picture which needs no scaling would teach them.
    """
    whole = pixels.convert("RGBA")
    if transparency is None:
        return whole
    whole.putalpha(transparency)
    made = Image.new("RGBA", whole.size)
    made.paste(whole, mask=transparency.point([0, *[255] * 255]))
    return made


def scale_and_crop(picture: Image.Image, placement: Placement) -> Pixels:
    """The bucket's pixels, uint8 [H, W, 3]: `picture` (RGB) scaled with Lanczos, cropped, perhaps mirrored.

    Of an RGBA picture [H, W, 4]; Pillow scales its colors by their opacity, and divides by it again.

    The whole picture is scaled, not only the crop: Pillow keeps a box in float32, and the last bits would differ.
    """
    return crop(resize(picture, placement.scaled, Image.Resampling.LANCZOS), placement)


def encode_png(pixels: Pixels) -> bytes:
    """`pixels`, uint8 [H, W], [H, W, 3] or [H, W, 4], as the bytes of a PNG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def resize(picture: Image.Image, size: Size, resample: Image.Resampling) -> Image.Image:
    return picture if picture.size == size else picture.resize(size, resample)


def crop(scaled: Image.Image, placement: Placement) -> Pixels:
    (left, top), (width, height) = placement.crop, placement.bucket
    inside = 0 <= left <= scaled.width - width and 0 <= top <= scaled.height - height
    assert inside, f"{placement} cuts outside the scaled picture"
    pixels: Pixels = np.asarray(scaled.crop((left, top, left + width, top + height)))
    return np.ascontiguousarray(pixels[:, ::-1] if placement.flip else pixels)


def load_layers(data: bytes) -> tuple[Image.Image, Image.Image | None, bytes | None, PictureHeader]:
    """(colors, transparency, profile, header), as stored in the file."""
    picture, parts, header = open_picture(data)
    with as_bad_picture("corrupt-data", len(data)):
        header = load_checked(picture, parts, header)
        return *split_alpha(picture, header.bits), profile_of(picture, parts), header


def upright(picture: Image.Image, header: PictureHeader) -> Image.Image:
    turn = _TURNS.get(header.orientation)
    return picture if turn is None or header.format == "TIFF" else picture.transpose(turn)
