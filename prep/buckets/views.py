"""The views of a picture in its bucket: where the bucket is cropped from the scaled picture, and which are mirrored.

Everything is in exact integers, so that the same picture has the same rows on every machine.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from prep.digest import HOLE, digest_spelled, integers, json_template, string
from prep.geometry import ONE, Focus, Placement

Crop = Literal["centre", "random", "focus"]
Flip = Literal["none", "both", "always"]

CROPS: tuple[Crop, ...] = ("centre", "random", "focus")
FLIPS: tuple[Flip, ...] = ("none", "both", "always")
MEANING = 1  # raise it when the same picture, bucket and view would get another random crop
_MIRRORED = {"none": (False,), "both": (False, True), "always": (True,)}
_DRAW = json_template({"kind": "crop", "meaning": MEANING, "bucket": HOLE, "picture": HOLE, "view": HOLE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """The choice of views for a picture."""

    crop: Crop = "centre"
    views: int = 1  # crops per picture, as far as they differ; only `random` has more than one
    flip: Flip = "none"  # both: each crop as it is, and mirrored

    @property
    def plain(self) -> bool:
        """Whether the centered crop is the only view."""
        return self.crop == "centre" and self.flip == "none"


def views_of(placement: Placement, picture: str, framing: Framing, focus: Focus | None = None) -> tuple[Placement, ...]:
    """The views of the picture with digest `picture`, whose centered crop is `placement`; all different.

    `focus` is the mask's center of mass; without one the crop is centered.
    """
    crops = [placement.crop]
    if framing.crop == "random":
        crops = random_crops(placement, picture, framing.views)
    elif framing.crop == "focus" and focus is not None:
        crops = [focus_crop(placement, focus)]
    return tuple(replace(placement, crop=crop, flip=flip) for crop in crops for flip in _MIRRORED[framing.flip])


def random_crops(placement: Placement, picture: str, count: int) -> list[tuple[int, int]]:
    """`count` different (left, top), or all if there are fewer; a larger `count` only appends.

    A partial Fisher-Yates shuffle of all offsets; each draw is the SHA-256 of picture, bucket and view, so that adding
    views later keeps the rows of the first ones.
    """
    across, down = (whole - cut for whole, cut in zip(placement.scaled, placement.bucket, strict=True))
    places = (across + 1) * (down + 1)
    first, second, third, last = _DRAW
    head = f"{first}{integers(placement.bucket)}{second}{string(picture)}{third}"
    swaps: dict[int, int] = {}
    crops: list[tuple[int, int]] = []
    for view in range(min(count, places)):
        drawn = view + int(digest_spelled(f"{head}{view:d}{last}"), 16) % (places - view)
        place = swaps.get(drawn, drawn)
        swaps[drawn] = swaps.get(view, view)
        crops.append((place % (across + 1), place // (across + 1)))
    return crops


def focus_crop(placement: Placement, focus: Focus) -> tuple[int, int]:
    """The (left, top) that brings `focus` nearest to the middle of the bucket, rounding half up."""
    left, top = ((2 * at * whole - cut * ONE + ONE) // (2 * ONE)
                 for at, whole, cut in zip(focus, placement.scaled, placement.bucket, strict=True))
    (wide, high), (width, height) = placement.scaled, placement.bucket
    return min(max(left, 0), wide - width), min(max(top, 0), high - height)
