"""The pages are true: commands, options, files, names and links that they show exist, and generated pages are fresh."""

from __future__ import annotations

import importlib
import re
import shutil
import tomllib
from pathlib import Path

import pytest
from typer.main import get_command

from prep.errors import Problem
from prep.findings import CODES
from prep.recipe.schema import SETTINGS
from tests.docs import recipe
from tests.docs.reference import PAGE, PROGRAMS, reference

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "manifests").glob("*.md"))]
TEXTS = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in PAGES}
COMMANDS = {f"{program} {name}": command for program in PROGRAMS
            for name, command in get_command(importlib.import_module(f"{program}.cli.main").app).commands.items()}
MOST_LINES = 300  # of README: it is read in one sitting


def options_of(command) -> set[str]:
    return {name for one in command.params if one.param_type_name == "option"
            for name in (*one.opts, *one.secondary_opts)} | {"--help"}


def test_the_reference_is_fresh():
    assert TEXTS[PAGE] == reference(), "run `make docs` and commit manifests/reference.md"


def test_the_reference_has_every_command_option_exit_code_and_finding_code():
    for name, command in COMMANDS.items():
        section = TEXTS[PAGE].split(f"\n## {name}\n")[1].split("\n## ")[0]
        told = set(re.findall(r"^\| ((?:`--?[a-z-]+`(?:, )?)+)", section, re.MULTILINE))
        assert {flag for cell in told for flag in re.findall(r"`([^`]+)`", cell)} == options_of(command) - {"--help"}
    told = {int(code) for code in re.findall(r"^\| (\d+) \|", TEXTS[PAGE], re.MULTILINE)}
    assert told == {0, 1, 70, 130} | {kind.exit_code for kind in Problem.__subclasses__()}
    rows = re.findall(r"^\| `([a-z0-9-]+)` \| (error|warning|info) \| (.*?) \| (.*?) \|$", TEXTS[PAGE], re.MULTILINE)
    assert {row[0]: row[1:] for row in rows} == CODES


def test_readme_fits_a_sitting():
    assert len(TEXTS["README.md"].splitlines()) < MOST_LINES


@pytest.mark.parametrize("page", TEXTS)
def test_every_command_that_a_page_shows_exists_with_its_options(page):
    text = TEXTS[page]
    lines = re.findall(r"^(?:\$ |    )((?:prep|train) .*)$", text, re.MULTILINE)
    lines += re.findall(r"`((?:prep|train) [a-z]+(?: [^`]*)?)`", text)
    for line in lines:
        words = line.split("#")[0].split()
        name = " ".join(words[:2])
        assert name in COMMANDS, line
        for word in words[2:]:
            if re.fullmatch(r"--?[a-z-]+", word):
                assert word in options_of(COMMANDS[name]), line


def test_the_lines_for_your_own_pictures_run(prep, train, photos, tiny_model, monkeypatch):
    """Each by itself, after those before it; without what serves pages, and the run."""
    shown = TEXTS["README.md"].split("## Your own pictures\n")[1].split("\n## ")[0]
    lines = [line.split("#")[0].split() for line in re.findall(r"^    ((?:prep|train) .*)$", shown, re.MULTILINE)]
    monkeypatch.chdir(photos.parent)
    monkeypatch.setenv("LATENTRY_USER_CACHE", str(photos.parent / "user"))
    shutil.copytree(tiny_model, "models/sd15")
    for words in lines:
        if words[1] not in ("view", "run"):
            done = {"prep": prep, "train": train}[words[0]](*words[1:])
            assert done.code == 0, (words, done.err)
    assert lines[-1] == ["train", "run", "photos.json", "-c", "train.toml"] and Path("train.toml").is_file()
    assert "2000 steps = " in done.out, "train check is the last, and says what steps are in epochs"


def test_every_command_and_option_has_help():
    for name, command in COMMANDS.items():
        assert command.help, name
        for one in command.params:
            assert getattr(one, "help", None), f"{name} {one.name}"


@pytest.mark.parametrize("page", TEXTS)
def test_every_link_leads_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", TEXTS[page]):
        if target.startswith(("http://", "https://")):
            continue
        file, _, anchor = target.partition("#")
        path = (ROOT / page).parent / file if file else ROOT / page
        assert path.exists(), target
        if anchor:
            heads = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}, target


def test_the_architecture_page_names_every_package_and_only_what_exists():
    text = TEXTS["manifests/architecture.md"]
    named = set(re.findall(r"`((?:prep|train|tests|manifests)/[\w./]*)`", text))
    for path in named:
        assert (ROOT / path).exists() or path.endswith("*.py"), path
    packages = {path.parent.relative_to(ROOT).as_posix() for top in ("prep", "train")
                for path in (ROOT / top).glob("**/__init__.py")} - {"prep", "train"}
    assert packages <= {path.rstrip("/") for path in named}


def test_the_architecture_page_finds_definitions_where_it_says():
    text = TEXTS["manifests/architecture.md"].split("## Where is")[1].split("## How to add")[0]
    places = re.findall(r"`(\w+)`(?: and its subclasses)? in `([\w./]+\.py)`", text)
    assert len(places) >= 8
    for name, path in places:
        assert re.search(rf"^(?:def|class) {name}\b|^{name}\b.*=", (ROOT / path).read_text(), re.MULTILINE), name


def test_every_make_target_that_a_page_names_exists():
    makefile = (ROOT / "Makefile").read_text()
    for text in TEXTS.values():
        for target in re.findall(r"(?:^    |`)make ([a-z-]+)", text, re.MULTILINE):
            assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_the_example_recipe_has_every_key_as_the_code_says_it():
    assert (ROOT / recipe.PAGE).read_text() == recipe.recipe(), "stale; python -m tests.docs writes it"
    given = tomllib.loads(recipe.recipe())
    given["source"] = given["source"][0]
    assert {f"{section}.{key}" for section, table in given.items() for key in table} == {
        *SETTINGS, "source.path"} - {"edits.from"}
    for name, row in SETTINGS.items():
        section, _, key = name.partition(".")
        if row.spec.example is None and name not in ("edits.from", "source.caption"):
            found = row.spec.check(given[section][key], name)
            assert found == row.default, name
