"""An empty current directory, and the recipe that prep init writes there."""

from __future__ import annotations

import pytest

from prep.recipe.load import load_recipe


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current directory, empty."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


@pytest.fixture
def written(folder, prep):
    """`written(*args)` runs prep init and gives the recipe, read again; `written.text` is the file."""
    def go(*args):
        result = prep("init", *args)
        assert result.code == 0, result.err
        go.result, go.text = result, (folder / "dataset.toml").read_text()
        go.recipe = load_recipe(folder / "dataset.toml", choices={})
        return go.recipe

    return go
