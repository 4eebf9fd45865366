"""Pictures that are assumed where there are none yet, so that what they would take can be planned.

They are at least as large as their buckets. Their aspect ratios lie evenly between upright and landscape 1:2, of which
each has as many pictures, and each picture has a caption of its own. No file is read or written.
"""

from __future__ import annotations

from math import sqrt
from pathlib import Path

from prep.dataset.ingest import Ingested, KnownItem
from prep.digest import digest_strings
from prep.fs.blob import Blob
from prep.geometry import Size
from prep.recipe.schema import Recipe
from prep.sources.item import Item

RATIOS = 40  # aspect ratios; a whole multiple of so many pictures has as many of each
STRIDE = 17  # from one picture's ratio to the next one's, so that a few pictures have very different ones
WIDEST = 2  # to 1, and upright
CAPTION = 100  # characters


def assumed_pictures(recipe: Recipe, count: int) -> Ingested:
    """So many pictures, with masks if the recipe names where they are."""
    sizes = [_size(number, 2 * max(recipe.image.resolutions)) for number in range(RATIOS)]
    masks = {"none": "", "auto": "", "alpha": "alpha"}.get(str(recipe.mask), "file")
    items = tuple(_picture(number, sizes[number * STRIDE % RATIOS], masks) for number in range(count))
    return Ingested(items=items, findings=(), masks=count if masks == "file" else 0)


def _size(number: int, side: int) -> Size:
    """The size of a picture of the aspect ratio with this number, with about the area of a square of `side`."""
    ratio = WIDEST ** (2 * (number + 0.5) / RATIOS - 1)
    return round(side * sqrt(ratio)), round(side / sqrt(ratio))


def _picture(number: int, size: Size, masks: str) -> KnownItem:
    name, file = f"{number // 1000:06}/{number:012}.jpg", masks == "file"
    mask = Blob(file=f"pictures/{name}-masklabel.png") if file else None
    return KnownItem(
        item=Item(name=name, label=name, source=0, picture=Blob(file=str(Path("pictures") / name)), caption=None,
                  mask=mask),
        picture=digest_strings(["picture", str(number)]), size=size, has_alpha=masks == "alpha",
        captions=((f"picture number {number} ".ljust(CAPTION, "."), 1.0),),
        mask=digest_strings(["mask", str(number)]) if file else None)
