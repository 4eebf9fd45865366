"""Fits the reference pictures of a view: each by the rule of its family, to the view's own crop, or not at all.

Everything is in exact integers, so that the same picture has the same rows on every machine.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from prep.geometry import PAIR, Fit, Placement, Size, cover


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRules:
    """How the reference pictures of a recipe are fitted."""

    fit: Fit
    step: int  # pixels that all sides must be multiples of
    resolution: int  # side in pixels, for `place`
    place: Callable[[Size, int], Placement | None]  # the family's rule; see `prep.models.family.References`
    most: int  # of one sample

    def alone(self, size: Size) -> Placement | None:
        """How a reference of a prompt is fitted, which has no view: `bucket` and `pair` are as `family`. `None` as
        `placement`."""
        return (replace(self, fit="family") if self.fit in ("bucket", PAIR) else self)._placed(size, None)

    def placement(self, size: Size, view: Placement) -> Placement | None:
        """How a reference of this size is fitted for a view of its target; `None` if it is too small.

        It is mirrored if the view is. Crops of the target are its own, unless the fit is `bucket`.
        """
        placed = self._placed(size, view)
        return placed if placed is None or not view.flip else replace(placed, flip=True)

    def _placed(self, size: Size, view: Placement | None) -> Placement | None:
        if self.fit == "family":
            return self.place(size, self.resolution)
        if self.fit == "bucket" and view is not None:
            return _as_view(cover(size, view.bucket), view)
        bucket = (size[0] // self.step * self.step, size[1] // self.step * self.step)
        crop = ((size[0] - bucket[0]) // 2, (size[1] - bucket[1]) // 2)
        return Placement(scaled=size, crop=crop, bucket=bucket) if min(bucket) else None


def _as_view(centered: Placement, view: Placement) -> Placement:
    """`centered`, cropped where `view` is: as far along what the scaled picture has to spare on each side."""
    spares = zip(centered.scaled, view.scaled, view.crop, centered.crop, view.bucket, strict=True)
    left, top = (at if whole == cut else (2 * offset * (own - cut) + whole - cut) // (2 * (whole - cut))
                 for own, whole, offset, at, cut in spares)
    return replace(centered, crop=(left, top))
