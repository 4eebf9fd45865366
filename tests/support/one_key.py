"""Keys of single rows, for tests; the product makes many at once."""

from __future__ import annotations

from prep.geometry import Placement
from prep.keys import Context, LatentKeys, MaskKeys
from prep.parse import Alpha


def latent_key(picture: str, placement: Placement, alpha: Alpha | None, context: Context) -> str:
    return LatentKeys(context).key(picture, placement, alpha)


def mask_key(origin: str, placement: Placement, context: Context) -> str:
    return MaskKeys(context).key(origin, placement)
