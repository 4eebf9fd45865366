"""Every setting of a recipe: its bounds and words hold in a file and as an option of a command, alike."""

from __future__ import annotations

import json

import pytest

from prep.errors import ConfigError
from prep.recipe.load import load_recipe
from prep.recipe.options import RECIPE_OPTIONS, SOURCES, overriding
from prep.recipe.schema import OWN, SETTINGS, setting_of

# What a value needs beside it.
WITH = {"image.views": {"image": {"crop": "random"}}, "image.step": {"image": {"resolution": 16384}},
        "image.buckets": {"image": {"sizes": ["512x512"]}}}
OPTIONS = {setting_of(one.key).name: one.key for one in RECIPE_OPTIONS if one.key != SOURCES}
BOUNDED = [row for row in SETTINGS.values() if row.spec.bounds is not None]


@pytest.fixture
def taken(tmp_path):
    """`taken(name, value, as_option)`: whether a recipe takes it, in its file or as an option above the file."""
    (tmp_path / "photos").mkdir()

    def go(name, value, *, as_option=False):
        section, _, key = name.partition(".")
        needs = value == "list" if name == "image.buckets" else value != SETTINGS[name].default
        beside = WITH.get(name, {}) if needs else {}
        table = {"source": {"path": "photos"}, **{part: dict(keys) for part, keys in beside.items()}}
        if not as_option:
            table.setdefault(section, {})[key] = value
        lines = []
        for part, keys in table.items():
            lines.append("[[source]]" if part == "source" else f"[{part}]")
            lines += [f"{inner} = {json.dumps(each)}" for inner, each in keys.items()]
        (tmp_path / "dataset.toml").write_text("\n".join(lines))
        try:
            found = load_recipe(tmp_path / "dataset.toml",
                                choices=overriding({OPTIONS[name]: value}) if as_option else {})
        except ConfigError as error:
            assert f"{name if section != 'source' else f'source[0].{key}'} " in error.message
            return False
        record = found.sources[0] if section == "source" else getattr(found, section, None)
        field = next((one.field for one in OWN.values() if one.name == name), "")
        assert value == (getattr(found, field) if field else getattr(record, key))
        return True

    return go


@pytest.mark.parametrize("row", BOUNDED, ids=lambda row: row.name)
def test_each_bound_holds_in_a_file_and_as_an_option(taken, row):
    low, high = row.spec.bounds
    step = 1 if isinstance(row.value, int) else 0.001
    for value, fits in ((low, True), (high, True), (row.default, True), (low - step, False), (high + step, False)):
        value = type(row.value)(value)
        fits = fits or value == row.default
        assert taken(row.name, value) is fits, value
        if row.name in OPTIONS:
            assert taken(row.name, value, as_option=True) is fits, value


@pytest.mark.parametrize("row", [row for row in SETTINGS.values() if row.spec.choices], ids=lambda row: row.name)
def test_each_word_is_taken_and_no_other(taken, row):
    for word in (*row.spec.choices, "no such word"):
        fits = word != "no such word"
        if word == "center" or (row.name == "mask.from" and not fits):  # stored as "centre"; may be a directory
            continue
        assert taken(row.name, word) is fits, word
        if row.name in OPTIONS:
            assert taken(row.name, word, as_option=True) is fits, word


def test_each_setting_has_help_and_takes_its_default():
    for row in SETTINGS.values():
        assert row.spec.help and not row.spec.help.endswith("."), row.name
        if row.default is not None and row.name != "scan.severity":
            assert row.spec.check(list(row.default) if row.default == () else row.default, row.name) == row.default
