"""References in a scan: each is examined once, as a picture is, and findings name the pictures that have it."""

from __future__ import annotations

from contextlib import contextmanager

import numpy as np
import pytest
from pictures import draw, saved, swapped_profile
from PIL import Image, ImageFilter

from prep.dataset.listing import list_recipe, walk_recipe
from prep.fs import memo
from prep.recipe.load import load_recipe
from prep.recipe.options import choices_of
from prep.scan.examiner import Examiner
from prep.scan.references import count_items
from prep.scan.run import ScanCall, recall_scan, run_scan


@pytest.fixture(autouse=True)
def memories(tmp_path, monkeypatch):
    """An empty memory, which trusts every stamp."""
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(tmp_path / "caches"))
    monkeypatch.setattr(memo, "REST_NS", 0)


@pytest.fixture
def main(tmp_path):
    """Three pictures in directories of their own, which share the reference control/0.png; then words of a command."""
    for number, name in enumerate(("a", "b", "c")):
        draw(tmp_path / "main" / name / "0.png", (128, 96), seed=number).with_suffix(".txt").write_text(f"a {name}")
    draw(tmp_path / "control" / "0.png", (96, 128), seed=8)
    return [tmp_path / "main", "--references", tmp_path / "control"]


@pytest.fixture
def examined(monkeypatch):
    """The files that a worker examined."""
    files = []
    examine = Examiner.examine
    monkeypatch.setattr(Examiner, "examine", lambda self, items: files.extend(
        item.picture.name for item in items) or examine(self, items))
    return files


def turned(picture: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = 6
    return saved(picture, "JPEG", exif=exif)


def photo(size=(128, 96)) -> Image.Image:
    coarse = np.random.default_rng(3).integers(0, 250, (24, 32, 3), np.uint8)
    return Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC)


SPOILED = {
    "wrong-extension": lambda: turned(photo()),
    "non-srgb-profile": lambda: saved(photo(), icc_profile=swapped_profile()),
    "has-alpha": lambda: saved(Image.merge("RGBA", [*photo().split(), Image.linear_gradient("L").resize((128, 96))])),
    "truncated": lambda: saved(photo(), "JPEG")[:-200],
    "too-small": lambda: saved(photo((60, 90))),
    "blank": lambda: saved(Image.new("RGB", (128, 96), "red")),
    "empty-file": lambda: b"",
    "not-an-image": lambda: b"no picture",
}


def test_a_reference_is_checked_as_a_picture_is(prep, main, tmp_path, examined):
    for code, make in SPOILED.items():
        draw(tmp_path / "main" / f"{code}.png", (128, 96), seed=len(code)).with_suffix(".txt").write_text("words")
        (tmp_path / "control" / f"{code}.png").write_bytes(make())
    for name in ("a", "b", "c"):
        (tmp_path / "main" / name / "0.png").rename(tmp_path / "main" / name / "truncated.png")
        (tmp_path / "main" / name / "0.txt").rename(tmp_path / "main" / name / "truncated.txt")
    found = prep("scan", *main, "--json")
    said = [one for one in found.json["findings"] if one["code"] in SPOILED]
    shared = [(f"{name}/truncated.png", "truncated") for name in ("a", "b", "c")]
    assert [(one["path"], one["code"]) for one in said] == sorted(
        [*shared, *((f"{code}.png", code) for code in SPOILED)])
    assert all(one["detail"].startswith(f"its reference control/{one['code']}.png: ") for one in said)
    broken = {one["path"] for one in said if one["severity"] == "error"}
    assert {name for name, _ in shared} < broken and "too-small.png" not in broken
    assert (found.json["pictures"], found.json["samples"], found.code) == (11, 11 - len(broken), 1)
    assert len(examined) == 11 + len(SPOILED) and examined.count("truncated.png") == 5, "four pictures, one reference"
    again = prep("scan", *main, "--json")
    assert again.json == found.json and len(examined) == 11 + len(SPOILED), "all is remembered, references, too"


def test_a_condition_may_be_what_a_picture_should_not(prep, main, tmp_path):
    conditions = [photo().convert("L"), photo().convert("1"), photo((800, 160)), Image.new("L", (128, 96), 0),
                  photo((640, 512)).filter(ImageFilter.GaussianBlur(9))]
    for number, picture in enumerate(conditions, 1):
        draw(tmp_path / "main" / f"{number}.png", (128, 96), seed=20 + number).with_suffix(".txt").write_text("words")
        (tmp_path / "control" / f"{number}.png").write_bytes(saved(picture))
    found = prep("scan", *main, "--json").json["findings"]
    assert [(one["path"], one["code"]) for one in found] == [("4.png", "blank")]


def test_a_missing_reference_and_one_without_a_picture_are_told(prep, main, tmp_path):
    draw(tmp_path / "main" / "other.png", (128, 96), seed=6).with_suffix(".txt").write_text("words")
    draw(tmp_path / "control" / "orphan.png", (128, 96), seed=7)
    found = prep("scan", *main, "--json").json
    assert [(one["path"], one["code"]) for one in found["findings"]] == [
        ("control/orphan.png", "orphan-reference"), ("other.png", "missing-reference")]
    assert (found["pictures"], found["samples"]) == (4, 3)
    lenient = prep("scan", *main, "--missing-reference", "none", "--json")
    assert [one["code"] for one in lenient.json["findings"]] == ["orphan-reference"]
    assert (lenient.json["samples"], lenient.code) == (4, 0)


def test_a_reference_may_be_like_its_picture_and_be_a_picture_itself(prep, tmp_path):
    for place, brighter in (("before", 0), ("after", 6)):
        path = tmp_path / place / "0.png"
        path.parent.mkdir()
        path.write_bytes(saved(photo((256, 192)).point(lambda level, more=brighter: min(255, level + more))))
        path.with_suffix(".txt").write_text(place)
    recipe = tmp_path / "dataset.toml"
    pair, more = '[[source]]\npath = "after"\nreferences = ["before"]\n', '[[source]]\npath = "before"\n'
    for text, codes in ((pair, []), (pair + more, []), ('[[source]]\npath = "after"\n' + more, ["near-duplicate"])):
        recipe.write_text(text)
        found = prep("scan", recipe, "--json").json
        assert [one["code"] for one in found["findings"]] == codes
        assert found["samples"] == text.count("path")


def test_pages_recall_what_a_scan_found_in_references(prep, main, tmp_path):
    (tmp_path / "control" / "0.png").write_bytes(saved(photo(), "JPEG")[:-200])
    recipe = load_recipe(main[0], choices=choices_of({"references": [main[2]]}))
    items = list_recipe(recipe).items
    assert recall_scan(recipe, items) == ((), 4)
    found = {(one["path"], one["code"], one["detail"]) for one in prep("scan", *main, "--json").json["findings"]}
    recalled, unseen = recall_scan(recipe, items)
    assert unseen == 0 and {(one.path, one.code, one.detail) for one in recalled} == found


def test_progress_counts_each_reference_once(main):
    counted: dict[str, list[int]] = {}

    @contextmanager
    def progress(title, total, _what):
        yield counted.setdefault(title, []).append

    recipe = load_recipe(main[0], choices=choices_of({"references": [main[2]]}))
    run_scan(ScanCall(recipe=recipe, jobs=1, model=None, select=(), ignore=(), show=None, rehash=False,
                      progress=progress))
    assert sum(counted["scanning"]) == count_items(walk_recipe(recipe)) == 4
