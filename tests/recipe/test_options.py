"""The table of options: recipes take every word that commands offer, and offer those words for a wrong one."""

from __future__ import annotations

import pytest

from prep.errors import ConfigError
from prep.recipe.load import load_recipe
from prep.recipe.options import RECIPE_OPTIONS

WITH = {("image.buckets", "list"): {"image.sizes": ("512x512",)}}  # what a word needs beside it
WORDS = [(one, word) for one in RECIPE_OPTIONS for word in one.choices]


@pytest.fixture
def recipe(tmp_path):
    """`recipe(choices)`: that of a directory, with these above it."""
    (tmp_path / "photos").mkdir()
    return lambda **choices: load_recipe(tmp_path / "photos", choices=choices)


@pytest.mark.parametrize(("option", "word"), WORDS, ids=[f"{one.key}-{word}" for one, word in WORDS])
def test_recipes_take_the_words_of_the_table(recipe, option, word):
    found = recipe(**{option.key: word}, **WITH.get((option.key, word), {}))
    section, _, key = option.key.partition(".")
    value = getattr(getattr(found, section), key) if key else getattr(found, section)
    assert value == {"center": "centre"}.get(word, word)


@pytest.mark.parametrize("option", [one for one in RECIPE_OPTIONS if one.choices], ids=lambda one: one.key)
def test_a_wrong_word_is_told_the_words_of_the_table(recipe, option):
    with pytest.raises(ConfigError) as caught:
        recipe(**{option.key: "nothing of the kind"})
    said = caught.value.message.replace("centre", "center")
    assert all(word in said for word in option.choices), said
