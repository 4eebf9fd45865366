"""What the packages import is what pyproject.toml declares: nothing is there only because something else brings it."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest
from sources_parsed import PATHS, ROOT, nodes_of, tree_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
# Whose libraries some module imports if installed.
EXTRAS = ("heic", "jxl", "rembg", "bnb", "optimizers", "tensorboard", "wandb", "remote", "ray", "view", "datasets",
          "gguf", "kolors", "tagger")
# Imports that need no line of their own: `markupsafe` is the type of Jinja's own strings.
WITH_ANOTHER = {"markupsafe": "jinja2"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared() -> set[str]:
    """The distributions that an installation with these extras asks for."""
    lines = [*PROJECT["dependencies"], *(line for extra in EXTRAS for line in PROJECT["optional-dependencies"][extra])]
    return {normalized(re.match(r"[\w.-]+", line)[0]) for line in lines}


def imported(path: Path) -> set[str]:
    """The top-level packages that a file imports, in functions and for types, too."""
    names: set[str] = set()
    for node in nodes_of(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names - set(sys.stdlib_module_names) - {"prep", "train", "__future__"}


@pytest.fixture(scope="module")
def foreign() -> dict[str, list[str]]:
    """Every package that is imported, and the distributions that bring it."""
    names = {name for path in PATHS for name in imported(path)}
    bringing = packages_distributions()
    return {name: bringing.get(name, [name.replace("_", "-")]) for name in sorted(names)}


def test_every_import_is_declared(foreign):
    wanted = declared()
    assert len(foreign) > 20
    for name, found in foreign.items():
        assert any(normalized(one) in wanted for one in (*found, WITH_ANOTHER.get(name, ""))), (
            f"{name} comes with {found}, expected one of them among the dependencies of pyproject.toml")


def test_every_dependency_is_imported(foreign):
    """What nothing imports should go; rembg may not be installed here."""
    brought = {normalized(one) for found in foreign.values() for one in found}
    assert declared() - brought == {"rembg"} - brought


def test_every_dependency_has_a_version_that_is_tested():
    pinned = {normalized(line.partition("==")[0]) for line in
              (ROOT / ".ci/constraints.txt").read_text(encoding="utf-8").splitlines() if "==" in line}
    assert {one for one in declared() if one not in pinned} <= {"rembg", "wandb", "gguf"}  # which bring many
