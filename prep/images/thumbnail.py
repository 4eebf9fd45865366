"""Small copies of pictures and masks, for HTML pages and for models that describe them. No row depends on them."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from prep.geometry import Placement, Size
from prep.images.decode import Picture, Pixels, scale_and_crop

WEBP = 50  # quality: a photo of 80 pixels takes 0.8 kB, since WebP has 30 bytes of headers, and JPEG has 600
QUALITY = 82  # of JPEG: a photo of 360 pixels takes 15 to 40 kB, and its PNG six times as much
SHADE = (208, 32, 48)  # marks what does not train: a red that skin and skies do not have
STRIP = 256  # rows
SHADED = 0.65  # opacity of the shade where a mask is black


def shrunk_size(size: Size, side: int) -> Size:
    """`size` shrunk until its longer side is at most `side` pixels; never enlarged, and each side at least 1."""
    longer = max(size)
    width, height = (max(1, length * min(side, longer) // longer) for length in size)
    return width, height


def shrink(picture: Picture, side: int) -> Pixels:
    """uint8 [H, W, 3]: the whole of `picture` (RGB), its longer side at most `side` pixels."""
    size = shrunk_size(picture.size, side)
    return scale_and_crop(picture, Placement(scaled=size, crop=(0, 0), bucket=size))


def white_square(picture: Picture, side: int) -> Pixels:
    """uint8 [side, side, 3]: `picture` (RGB) in the middle of a white square, which is scaled to `side` by Pillow's
    bicubic filter. The square is made strip by strip: that of a panorama has a billion pixels."""
    (width, height), longer = picture.size, max(picture.size)
    narrow = Image.new("RGB", (side, longer), "white")  # the square, scaled in its rows: Pillow scales these first, too
    for top in range(0, height, STRIP):
        strip = Image.new("RGB", (longer, min(STRIP, height - top)), "white")
        strip.paste(picture.crop((0, top, width, top + strip.height)), ((longer - width) // 2, 0))
        narrow.paste(strip.resize((side, strip.height), Image.Resampling.BICUBIC), (0, (longer - height) // 2 + top))
    return np.asarray(narrow.resize((side, side), Image.Resampling.BICUBIC))


def small_copies(picture: Picture, side: int) -> tuple[Picture, Picture]:
    """Averages of the pixels of `picture` (RGB): (colors, its longer side below `side` / 2; gray, at most `side`)."""
    small = picture.reduce(max(max(picture.size) // side, 1))  # a whole factor takes a tenth of the time of any other
    return small.reduce(4), small.convert("L").resize(shrunk_size(picture.size, side), Image.Resampling.BOX)


def encode_jpeg(pixels: Pixels, quality: int = QUALITY) -> bytes:
    """`pixels`, uint8 [H, W, 3], as the bytes of a JPEG file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=quality)
    return stream.getvalue()


def encode_webp(pixels: Pixels) -> bytes:
    """`pixels`, uint8 [H, W, 3], as the bytes of a small WebP file."""
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "WEBP", quality=WEBP, method=4)
    return stream.getvalue()


def small_jpeg(pixels: Pixels, side: int) -> bytes:
    """`pixels`, uint8 [H, W, 3], as a JPEG whose longer side is at most `side` pixels."""
    return encode_jpeg(shrink(Image.fromarray(pixels), side))


def encode_shade(mask_HW: Pixels) -> bytes:
    """A PNG to lay over a picture: red where a mask (255 trains) leaves the picture out, transparent where it trains.

    The mask's levels are the palette's numbers, so a pixel takes a byte.
    """
    shade = Image.fromarray(mask_HW).convert("L")
    shade.putpalette(bytes(SHADE) * 256)
    stream = io.BytesIO()
    shade.save(stream, "PNG", transparency=bytes(round(SHADED * (255 - level)) for level in range(256)))
    return stream.getvalue()


def small_shade(mask_HW: Pixels, side: int) -> bytes:
    """`encode_shade` as a WebP of at most `side` pixels, in 8 levels: a tenth of the bytes of a PNG with a palette."""
    mask = Image.fromarray(mask_HW).convert("L")
    mask = mask.resize(shrunk_size(mask.size, side), Image.Resampling.BOX)
    shade = Image.new("RGBA", mask.size, SHADE)
    shade.putalpha(mask.point([round(SHADED * (255 - round(level * 7 / 255) * 255 / 7)) for level in range(256)]))
    stream = io.BytesIO()
    shade.save(stream, "WEBP", lossless=True, exact=True, method=4)
    return stream.getvalue()
