"""Files of other trainers, written for these tests from what their documentation says of each key."""

from __future__ import annotations

import json

import pytest

from prep.convert.formats import convert

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
        return convert(tmp_path / name)

    return go


@pytest.fixture
def convert_json(convert_text):
    return lambda document: convert_text(json.dumps(document))
