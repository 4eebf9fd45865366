"""A picture that two sources have, and every other choice between two things, is told by scan and by encode."""

from __future__ import annotations

import pytest
from pictures import draw
from tarred import member, tar_of

from prep.dataset.listing import walk_recipe
from prep.findings import CHOSEN, Finding
from prep.recipe.load import load_recipe


@pytest.fixture
def root(tmp_path):
    for name in ("photos/a.png", "photos/sub/b.png", "others/c.png"):
        draw(tmp_path / name, (96, 96), seed=len(name)).with_suffix(".txt").write_text("x")
    data = (tmp_path / "photos" / "a.png").read_bytes()
    for name in ("one", "two"):
        (tmp_path / f"{name}.tar").write_bytes(tar_of([member("0.png", data), member("0.txt")]))
    (tmp_path / "link").symlink_to("photos")
    return tmp_path


def recipe_of(root, *sources):
    (root / "r.toml").write_text("".join(f"[[source]]\npath = '{path}'\n{more}\n" for path, more in sources))
    return root / "r.toml"


@pytest.mark.parametrize(("first", "second", "told"), [
    (("photos", ""), ("photos", ""), "2 pictures of it are in ROOT/photos, too, and train as a sample of each: a.png, "
     "sub/b.png"),
    (("photos", ""), ("photos/sub", ""), "1 picture of it is in ROOT/photos, too, and trains as a sample of each: "
     "b.png"),
    (("photos/sub", ""), ("photos", ""), "1 picture of it is in ROOT/photos/sub, too, and trains as a sample of each: "
     "sub/b.png"),
    (("photos", ""), ("link", "role = 'validation'"), "2 pictures of it are in ROOT/photos, too, and train as a sample "
     "of each: a.png, sub/b.png"),
    (("one.tar", ""), ("*.tar", ""), "1 picture of it is in ROOT/one.tar, too, and trains as a sample of each: "
     "one.tar/0.png"),
    (("photos", "include = ['a.png']"), ("photos", "exclude = ['a.png']"), None),
    (("photos", ""), ("others", ""), None), (("one.tar", ""), ("two.tar", ""), None)])
def test_a_file_in_two_sources_is_told(root, first, second, told):
    recipe = load_recipe(recipe_of(root, first, second), choices={})
    found = [one.detail for one in walk_recipe(recipe) if isinstance(one, Finding) and one.code == "shared-source"]
    assert found == ([] if told is None else [told.replace("ROOT", str(root))])


def test_what_is_chosen_is_told_before_it_is_encoded(prep, root, tiny_model):
    """Scan lists it, bucket and encode say it; what a recipe ignores is not said."""
    draw(root / "photos" / "a.jpg", (96, 96), seed=5)
    (root / "others" / "metadata.jsonl").write_text('{"file_name": "d.png", "text": "x"}\n' * 3)
    draw(root / "others" / "d.png", (96, 96), seed=6)
    recipe = recipe_of(root, ("photos", ""), ("photos", ""), ("others", ""))
    codes = {one["code"] for one in prep("scan", recipe, "--json").json["findings"]} & CHOSEN
    assert codes == {"stem-collision", "shared-source", "duplicate-row"}
    for result in (prep("bucket", recipe, "--resolution", 64),
                   prep("encode", recipe, "--model", tiny_model, "--cache", root / "cache", "-o", root / "m.json",
                        "--resolution", 64, "--dry-run")):
        said = [line for line in result.err.splitlines() if line.startswith("warning: ")]
        assert len(said) == 3, (result.code, result.err, result.out)
        assert any(": duplicate-row: line 2: d.png has a row before" in line and "and 1 more, which prep scan lists"
                   in line for line in said)
    recipe.write_text("[scan]\nignore = ['duplicate-row']\n" + recipe.read_text())
    assert "duplicate-row" not in prep("bucket", recipe, "--resolution", 64).err


def test_a_table_that_takes_captions_away_is_named(prep, root, tiny_model):
    (root / "photos" / "metadata.jsonl").write_text('{"file_name": "new.png", "text": "x",}\n')
    draw(root / "photos" / "new.png", (96, 96), seed=9)
    recipe = recipe_of(root, ("photos", ""))
    asked = ("--model", tiny_model, "--cache", root / "cache", "--resolution", 64, "--dry-run")
    stopped = prep("encode", recipe, *asked, "--missing-caption", "stop")
    assert stopped.code == 3 and "pictures without a caption (1): new.png; metadata.jsonl: line 1 is not JSON" in (
        stopped.err)
    result = prep("encode", recipe, *asked, "--missing-caption", "reject", "--json")
    rejected = {one["path"]: one["detail"] for one in result.json["rejected"]}
    assert rejected["new.png"] == "no caption file, and no row in metadata.jsonl"
