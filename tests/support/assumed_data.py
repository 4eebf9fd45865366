"""Real pictures like those that a plan without pictures assumes, for a comparison of the two."""

from __future__ import annotations

from pathlib import Path

from pictures import draw, draw_mask

from prep.dataset.assumed import assumed_pictures
from prep.recipe.load import assumed_recipe


def write_assumed(root: Path, count: int, resolution: int, *, masks: bool = False) -> Path:
    """The directory with so many of them, of the same names, sizes and captions."""
    recipe = assumed_recipe("sd15", resolution, choices={"mask": "sidecar" if masks else None})
    for number, known in enumerate(assumed_pictures(recipe, count).items):
        picture = draw(root / known.item.name, known.size, seed=number)
        picture.with_suffix(".txt").write_text(known.captions[0][0])
        if masks:
            draw_mask(picture.with_name(f"{picture.stem}-masklabel.png"), known.size)
    return root
