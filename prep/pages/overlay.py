"""Pictures with crops and masks over them. The macro `overlay` of `templates/overlay.html` draws them on every page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Overlay:
    """A box over a picture, in percent of its sides, and a shade that is stretched over the box."""

    left: float = 0.0
    top: float = 0.0
    width: float = 100.0
    height: float = 100.0
    shade: str = ""  # address of a picture that is red where the mask excludes
    flip: bool = False  # the shade belongs to the mirrored box
    outlined: bool = False
    coarse: bool = False  # the shade's pixels are latent cells


@dataclass(frozen=True, kw_only=True, slots=True)
class Shot:
    """A picture on a page, or text instead."""

    name: str
    address: str  # "" for none
    instead: str = "no preview"
    lazy: bool = False  # loaded when it comes into sight
    size: tuple[int, int] | None = None  # of the picture; required for overlays
    overlays: tuple[Overlay, ...] = ()


def crop_overlay(view: Mapping[str, Any], bucket: Sequence[int], shade: str) -> Overlay:
    """Makes the box of a described view's crop over the whole picture, with the address of its mask's shade."""
    (wide, high), (left, top), (width, height) = view["scaled"], view["crop"], bucket
    return Overlay(left=100 * left / wide, top=100 * top / high, width=100 * width / wide, height=100 * height / high,
                   shade=shade, flip=view["flip"], outlined=True, coarse=True)
