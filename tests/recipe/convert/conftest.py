"""Files of other trainers, written for these tests from what their documentation says of each key."""

from __future__ import annotations

import json

import pytest

from prep.formatting import printable
from prep.recipe.convert.detect import convert
from prep.recipe.write import render_recipe

PLACES = ("photos/sub", "more", "masks", "reg")


@pytest.fixture
def convert_text(tmp_path, monkeypatch):
    """`convert_text(text)`: what that file comes to; the directories of `PLACES` are beside it."""
    for name in PLACES:
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")  # where nothing is

    def go(text: str, name: str = "theirs"):
        (tmp_path / name).write_text(text, encoding="utf-8")
        found = convert(tmp_path / name)
        spelled = render_recipe(found.recipe, base=tmp_path, remarks=found.remarks)
        comments = "".join(line.strip("# ") for line in spelled.splitlines()).replace(" ", "")
        lost = [one.text for one in found.notes if printable(one.text).replace(" ", "") not in comments]
        assert not lost, "every note stands in the recipe"
        return found

    return go


@pytest.fixture
def convert_json(convert_text):
    return lambda document: convert_text(json.dumps(document))
