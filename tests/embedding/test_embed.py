"""`prep embed`: rows as the library makes them, for pictures before they are encoded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from vision_models import KINDS, library_rows

from prep.cache.store import open_cache
from prep.dataset.facts import open_facts
from prep.embedding.rows import embeddings_in
from prep.embedding.survey import open_vision, survey
from prep.recipe.load import load_recipe


def rows_in(cache: Path, source: Path, model: Path, **choices):
    """The names, rows and mask of a source's pictures, as a cache has them."""
    recipe, facts = load_recipe(source, choices=choices), open_facts()
    found = survey(recipe, open_vision(str(model), facts), facts, jobs=1)
    return [picture.name for picture in found.pictures], *embeddings_in(open_cache(cache, create=False), found), found


def cropped(path: Path, placement) -> np.ndarray:
    """A picture at its placement over white, by Pillow alone."""
    picture = Image.open(path)
    if picture.mode == "RGBA":
        below = Image.new("RGBA", picture.size, "white")
        picture = Image.alpha_composite(below, picture)
    (left, top), (width, height) = placement.crop, placement.bucket
    scaled = picture.convert("RGB").resize(placement.scaled, Image.Resampling.LANCZOS)
    return np.asarray(scaled.crop((left, top, left + width, top + height)))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_library(prep, photos, vision, tmp_path, kind):
    cache = tmp_path / "cache"
    made = prep("embed", photos, "--model", vision[kind], "--cache", cache, "--resolution", 64, "--step", 8, "--json")
    assert made.code == 0, made.err
    assert (made.json["made"], made.json["reused"], made.json["pictures"]) == (8, 0, 8)
    names, rows, there, found = rows_in(cache, photos, vision[kind], **{"image.resolution": 64, "image.step": 8})
    assert there.all() and rows.dtype == np.float16 and names == sorted(names)
    np.testing.assert_allclose(np.linalg.norm(rows.astype(np.float32), axis=1), 1, atol=2e-3)
    placed = {target.key: target.placement for target in found.targets.embeddings.values()}
    wanted = library_rows(vision[kind], [cropped(photos / picture.name, placed[picture.key])
                                         for picture in found.pictures])
    np.testing.assert_allclose(rows.astype(np.float32), wanted, atol=0.01)
    assert np.abs(rows[0].astype(np.float32) - rows[1]).max() > 0.05  # pictures differ
