"""The views of a picture at its bucket: where the bucket is cut out of the scaled picture, and which are mirrored.

All in exact integers, so that the same picture has the same rows on every machine.
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
MEANING = 1  # raised when the same picture, bucket and view would get another random crop
_MIRRORED = {"none": (False,), "both": (False, True), "always": (True,)}
_DRAW = json_template({"kind": "crop", "meaning": MEANING, "bucket": HOLE, "picture": HOLE, "view": HOLE})


@dataclass(frozen=True, kw_only=True, slots=True)
class Framing:
    """Which views a picture gets."""

    crop: Crop = "centre"
    views: int = 1  # cuts of a picture, as far as there are different ones; only `random` has more than one
    flip: Flip = "none"  # both: each cut as it is, and mirrored

    @property
    def plain(self) -> bool:
        """Whether `bucket.place` says it all."""
        return self.crop == "centre" and self.flip == "none"


def views_of(placement: Placement, picture: str, framing: Framing, focus: Focus | None = None) -> tuple[Placement, ...]:
    """The views of the picture with digest `picture`, which `placement` cuts in the centre; no two are the same.

    `focus` is where its mask is; without one it is cut in the centre.
    """
    crops = [placement.crop]
    if framing.crop == "random":
        crops = random_crops(placement, picture, framing.views)
    elif framing.crop == "focus" and focus is not None:
        crops = [focus_crop(placement, focus)]
    return tuple(replace(placement, crop=crop, flip=flip) for crop in crops for flip in _MIRRORED[framing.flip])


def random_crops(placement: Placement, picture: str, count: int) -> list[tuple[int, int]]:
    """`count` different (left, top), or all where there are fewer; the first ones are the same for any `count`.

    A shuffle of all offsets (Fisher and Yates) as far as it is needed; each draw is the SHA-256 of picture, bucket and
    view, so that more views later leave the rows of the first ones as they are.
    """
    across, down = (whole - cut for whole, cut in zip(placement.scaled, placement.bucket, strict=True))
    places = (across + 1) * (down + 1)
    first, second, third, last = _DRAW
    head = f"{first}{integers(placement.bucket)}{second}{string(picture)}{third}"
    moved: dict[int, int] = {}
    found: list[tuple[int, int]] = []
    for view in range(min(count, places)):
        drawn = view + int(digest_spelled(f"{head}{view:d}{last}"), 16) % (places - view)
        place = moved.get(drawn, drawn)
        moved[drawn] = moved.get(view, view)
        found.append((place % (across + 1), place // (across + 1)))
    return found


def focus_crop(placement: Placement, focus: Focus) -> tuple[int, int]:
    """The (left, top) that has `focus` as near to the middle of the bucket as the picture allows, rounding half up."""
    left, top = ((2 * at * whole - cut * ONE + ONE) // (2 * ONE)
                 for at, whole, cut in zip(focus, placement.scaled, placement.bucket, strict=True))
    (wide, high), (width, height) = placement.scaled, placement.bucket
    return min(max(left, 0), wide - width), min(max(top, 0), high - height)
