"""One picture and one bucket: how near they are, how the one covers the other, what is lost; in exact integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Size = tuple[int, int]  # (width, height)
Focus = tuple[int, int]  # (x, y) of what matters in a picture: parts of its width and height in 1/65536
ONE = 1 << 16  # the whole width or height, in the numbers of a `Focus`
ASPECT = 0.01  # relative: how far a mask's aspect may be off before it is another picture's mask


def nearest(size: Size, buckets: Sequence[Size]) -> Size:
    """The bucket whose aspect ratio is nearest to that of `size` in log; of equals the larger, then the narrower."""
    best, best_over, best_under = buckets[0], 0, 0
    for bucket in buckets:
        # over / under is exp(|difference of the logs|); two of them are compared as exact fractions.
        under, over = sorted((size[0] * bucket[1], bucket[0] * size[1]))
        farther = over * best_under - best_over * under if best_under else -1
        if farther < 0 or (farther == 0 and _rank(bucket) < _rank(best)):
            best, best_over, best_under = bucket, over, under
    return best


def cover(size: Size, bucket: Size) -> Placement:
    """Scale `size` just enough to cover `bucket`, rounding half up; crop in the centre, rounding the offset down."""
    (width, height), (wide, high) = size, bucket
    if wide * height >= high * width:  # the width decides, and height × wide / width is at least high
        scaled = (wide, (2 * height * wide + width) // (2 * width))
    else:
        scaled = ((2 * width * high + height) // (2 * height), high)
    crop = ((scaled[0] - wide) // 2, (scaled[1] - high) // 2)
    return Placement(scaled=scaled, crop=crop, bucket=bucket)


def enlarges(size: Size, bucket: Size) -> bool:
    """Whether covering `bucket` makes a picture of `size` larger."""
    return bucket[0] > size[0] or bucket[1] > size[1]


def crop_loss(placement: Placement) -> float:
    """Percent of a picture's area that is cut away."""
    (wide, high), (width, height) = placement.scaled, placement.bucket
    return 100 * (wide * high - width * height) / (wide * high)


def _rank(bucket: Size) -> tuple[int, Size]:
    """Sorts the larger area first, then the narrower."""
    return -bucket[0] * bucket[1], bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How a picture gets into its bucket: scale the whole, cut out the bucket at `crop`, perhaps mirror."""

    scaled: Size  # the whole picture after resizing
    crop: tuple[int, int]  # (left, top) of the bucket in scaled pixels
    bucket: Size
    flip: bool = False  # mirrored left to right, after cropping


def fits(mask: Size, picture: Size) -> bool:
    """Whether a mask of one size can be scaled to a picture of another: same aspect, to 1 % or a pixel of the mask."""
    wanted = mask[1] * picture[0] / picture[1]  # the mask's width, had it the picture's aspect
    return abs(mask[0] - wanted) <= max(ASPECT * wanted, 1.0, picture[0] / picture[1])


def fits_scaled(mask: Size, scaled: Size) -> bool:
    """The same, where only the picture's scaled size is known: whole pixels there may hide a little of its shape."""
    (width, height), (wide, high) = mask, scaled
    return fits(mask, scaled) or abs(width * high - wide * height) <= max(width, height)
