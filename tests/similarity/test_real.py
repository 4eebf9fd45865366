"""Real photos, by an embedding that nothing was learned for: colors, and the low frequencies of the gray picture.

It stands in for DINOv2 and the like, whose weights are not here: this shows that the rules tell copies from other
photos of a subject with numbers of a real distribution, not that their constants are right for those models.
"""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from prep.similarity.analysis import analyze
from prep.similarity.options import SimilarityOptions
from prep.similarity.shares import Picture

pytestmark = pytest.mark.real_data
LOW = 8  # frequencies each way


def stand_in(picture):
    """[LOW² + 64]: half of it low frequencies, of which each has about the same variance, half the roots of a color
    histogram (whose products are Bhattacharyya's coefficient)."""
    gray = np.asarray(picture.convert("L").resize((32, 32), Image.Resampling.BOX), float)
    places = np.arange(32)
    cosines = np.cos(np.pi * (2 * places[None] + 1) * np.arange(LOW)[:, None] / 64)
    down, across = np.mgrid[:LOW, :LOW]
    low = (cosines @ (gray - gray.mean()) @ cosines.T * np.hypot(down, across)).reshape(-1)
    colors = np.asarray(picture.resize((64, 64), Image.Resampling.BOX)).reshape(-1, 3) // 64
    counts = np.bincount(colors @ (16, 4, 1), minlength=64)
    return np.concatenate([low / np.linalg.norm(low), np.sqrt(counts / counts.sum())]) / np.sqrt(2)


def copies(picture):
    """As photos are copied: smaller, compressed, brighter."""
    stream = io.BytesIO()
    picture.resize((picture.width // 3, picture.height // 3)).save(stream, "JPEG", quality=50)
    yield "small", Image.open(stream).convert("RGB")
    yield "bright", ImageEnhance.Brightness(picture).enhance(1.08)


@pytest.fixture(scope="module")
def photos(real_data):
    found = {}
    for entry in json.loads((real_data / "photos_index.json").read_text(encoding="utf-8"))["photos"]:
        with Image.open(real_data / entry["file"]) as picture:
            picture.draft("RGB", (400, 400))
            found[entry["file"].removeprefix("photos/")] = picture.convert("RGB")
    return found


def analyzed(photos, roles):
    rows = np.array([stand_in(picture) for picture in photos.values()]).astype(np.float16)
    return analyze([Picture(name=name, size=picture.size, role=roles.get(name, "train")) for name, picture in
                   photos.items()], rows, SimilarityOptions())


def test_copies_are_found_and_other_photos_are_not(photos):
    alone = analyzed(photos, {})
    assert alone.threshold == pytest.approx(0.928, abs=0.005) and alone.findings == ()
    some = dict(list(photos.items())[::4])
    made = {f"copies of/{kind}/{name}": copy for name, picture in some.items() for kind, copy in copies(picture)}
    found = analyzed(photos | made, {})
    groups = [{each.kept, *(name for name, _ in each.others)} for each in found.look_alikes]
    wanted = [{name, *(f"copies of/{kind}/{name}" for kind in ("small", "bright"))} for name in some]
    assert all(any(group <= true for true in wanted) for group in groups)
    assert len(some) == len(groups) == 16 and sum(map(len, wanted)) - sum(map(len, groups)) == 1  # a bright clock
    assert {each.code for each in found.findings} == {"semantic-duplicate"}


def test_a_held_out_copy_leaks(photos):
    name, picture = list(photos.items())[8]
    small, _ = copies(picture)
    found = analyzed({**photos, "held out": small[1]}, {"held out": "validation"})
    assert [(each.path, each.code, each.other) for each in found.findings if each.other] == [
        ("held out", "validation-leak", name)]
