"""README is true: every command, option, code and file it names exists, and the reverse."""

from __future__ import annotations

import importlib
import re
import tomllib
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.main import get_command

from prep.errors import Problem
from prep.findings import CODES, ScanOptions

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
COMMANDS = {f"{package} {name}": command for package in ("prep", "train")
            for name, command in get_command(importlib.import_module(f"{package}.cli.main").app).commands.items()}


def options_of(command) -> set[str]:
    return {name for one in command.params if one.param_type_name == "option"
            for name in (*one.opts, *one.secondary_opts) if name != "--help"}


def section(name: str) -> str:
    """What README has below the bold name of a command."""
    found = re.search(rf"^\*\*`{name}`\*\*.*?(?=^\*\*`|^## )", README, re.MULTILINE | re.DOTALL)
    assert found, f"README has no part on {name}"
    return found[0]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_in_readme_and_the_reverse(name):
    told = set(re.findall(r"`(--?[a-z-]+)`", section(name).split("|---|---|")[1]))
    assert told == options_of(COMMANDS[name])


def test_every_command_that_readme_shows_exists_with_its_options():
    lines = re.findall(r"^(?:\$ |    )((?:prep|train) .*)$", README, re.MULTILINE)
    lines += re.findall(r"`((?:prep|train) [a-z]+[^`]*)`", README)
    assert len(lines) > 15
    for line in lines:
        words = line.split("#")[0].split()
        name = " ".join(words[:2])
        assert name in COMMANDS or words[1].endswith("/"), line
        for word in words[2:]:
            if re.fullmatch(r"--?[a-z-]+", word):
                assert word in options_of(COMMANDS[name]) | {"--help"}, line


def test_every_command_has_help():
    for name, command in COMMANDS.items():
        assert command.help, name
        for one in command.params:
            assert getattr(one, "help", None), f"{name} {one.name}"


def test_every_scan_code_is_in_the_table_and_the_reverse():
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (error|warning|info) \| (.*?) \| (.*?) \|$", README, re.MULTILINE)
    assert {row[0]: row[1:] for row in rows} == CODES


def test_every_exit_code_is_in_the_table():
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", README, re.MULTILINE)}
    assert told == {0, 1, 70, 130} | {kind.exit_code for kind in Problem.__subclasses__()}


def test_every_file_in_the_tree_exists_and_make_target_too():
    tree = README.split("## How it is built")[1].split("## Limits")[0]
    for block, folder in ((tree.split("    train/")[0], "prep"), (tree.split("    train/")[1], "train")):
        for name in re.findall(r"\b([a-z]+\.py)\b", block):
            assert list((ROOT / folder).rglob(name)) or list((ROOT / "prep").rglob(name)), name
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_example_settings_have_every_key_with_its_default():
    from train.config.load import load_config

    path = ROOT / "manifests" / "train.toml"
    assert load_config(path) == load_config(None)
    given, known = tomllib.loads(path.read_text()), asdict(load_config(None))
    for key, value in known.items():
        if isinstance(value, dict):
            assert set(given[key]) | {"size"} >= set(value), key
        elif key != "epochs":
            assert key in given


def test_the_example_recipe_has_every_key():
    from prep.captions.options import CaptionOptions
    from prep.recipe.schema import ImageOptions, ModelOptions, Source

    given = tomllib.loads((ROOT / "manifests" / "dataset.toml").read_text())
    for name, kind in (("model", ModelOptions), ("image", ImageOptions), ("caption", CaptionOptions),
                       ("scan", ScanOptions)):
        assert set(given[name]) == set(kind.__dataclass_fields__)
    assert set(given["source"][0]) == set(Source.__dataclass_fields__)
    defaults = ImageOptions()
    image = {name: tuple(value) if isinstance(value, list) else value for name, value in given["image"].items()}
    assert image == {name: getattr(defaults, name) for name in ImageOptions.__dataclass_fields__}
