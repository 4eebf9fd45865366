"""Fits pictures into buckets, in exact integers: the nearest bucket, scaling, cropping, and the area lost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

Size = tuple[int, int]  # (width, height)
BucketShape = tuple[Size, tuple[Size, ...]]  # sizes of a bucket's pictures, and of their references in order
Fit = Literal["family", "bucket", "exact", "pair"]  # how reference pictures are scaled: see `prep.buckets.references`
FITS: tuple[Fit, ...] = get_args(Fit)
PAIR: Fit = "pair"  # the one reference of a picture is its opposite in a slider, and no condition
Focus = tuple[int, int]  # (x, y) of the subject of a picture, in 1/65536 of its width and height
ONE = 1 << 16  # the whole width or height, in the units of a `Focus`
ASPECT = 0.01  # largest relative difference between the aspect ratios of a mask and its picture


def nearest(size: Size, buckets: Sequence[Size]) -> Size:
    """The bucket whose aspect ratio is nearest to that of `size` in log; on ties the larger, then the narrower."""
    best, best_over, best_under = buckets[0], 0, 0
    for bucket in buckets:
        # over / under is exp(|difference of the logs|); two such fractions are compared exactly.
        under, over = sorted((size[0] * bucket[1], bucket[0] * size[1]))
        farther = over * best_under - best_over * under if best_under else -1
        if farther < 0 or (farther == 0 and _rank(bucket) < _rank(best)):
            best, best_over, best_under = bucket, over, under
    return best


def cover(size: Size, bucket: Size) -> Placement:
    """Scales `size` just enough to cover `bucket`, rounding half up, and crops the center, rounding the offset down."""
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


def pixels_of(shape: BucketShape) -> int:
    """The pixels of a bucket's picture and of its references: what a denoiser sees of a sample at a time."""
    size, references = shape
    return sum(width * height for width, height in (size, *references))


def have_references(shapes: Iterable[BucketShape]) -> bool:
    """Whether pictures of any of these buckets have references."""
    return any(references for _, references in shapes)


def shape_document(shape: BucketShape) -> dict[str, Any]:
    """A bucket's `size`, and its `references` if it has any, as documents have them."""
    size, references = shape
    return {"size": list(size), **({"references": list(map(list, references))} if references else {})}


def shape_in(document: Mapping[str, Any]) -> BucketShape:
    """The shape that `shape_document` wrote, of a document that was checked."""
    (width, height), references = document["size"], document.get("references", ())
    return (width, height), tuple((wide, high) for wide, high in references)


def crop_loss(placement: Placement) -> float:
    """Percentage of the scaled picture's area that is cropped away."""
    (wide, high), (width, height) = placement.scaled, placement.bucket
    return 100 * (wide * high - width * height) / (wide * high)


def _rank(bucket: Size) -> tuple[int, Size]:
    """Sort key: larger area first, then narrower."""
    return -bucket[0] * bucket[1], bucket


@dataclass(frozen=True, kw_only=True, slots=True)
class Placement:
    """How a picture is fitted to its bucket: scale the whole, crop the bucket at `crop`, perhaps mirror."""

    scaled: Size  # the whole picture after resizing
    crop: tuple[int, int]  # (left, top) of the bucket, in scaled pixels
    bucket: Size
    flip: bool = False  # mirrored left to right, after cropping


def fits(mask: Size, picture: Size) -> bool:
    """Whether a mask of one size can be scaled to a picture of another: same aspect, to 1% or a pixel of the mask."""
    wanted = mask[1] * picture[0] / picture[1]  # the mask's width, at the picture's aspect ratio
    return abs(mask[0] - wanted) <= max(ASPECT * wanted, 1.0, picture[0] / picture[1])


def fits_scaled(mask: Size, scaled: Size) -> bool:
    """Like `fits`, for a scaled picture size: its rounding to whole pixels may hide a small difference."""
    (width, height), (wide, high) = mask, scaled
    return fits(mask, scaled) or abs(width * high - wide * height) <= max(width, height)
