"""`make test-floors` installs the lowest versions that pyproject.toml allows."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_dependency_is_installed_at_its_floor():
    done = subprocess.run([sys.executable, ROOT / ".ci" / "floors.py"], capture_output=True, text=True, check=True)
    found = dict(line.split("==") for line in done.stdout.split())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(one.split(">=") for one in project["dependencies"])
    assert {name: version for name, version in found.items() if name in floors and name != "torch"} == {
        name: version for name, version in floors.items() if name != "torch"}
    assert set(found) == {*floors, "hypothesis", "pytest", "pytest-timeout"}


def test_the_floors_protect_from_code_of_a_model_directory():
    """diffusers before 0.38 runs mod.py of a component ["mod", "Class"] without a question."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    floors = dict(one.split(">=") for one in project["dependencies"])
    assert tuple(map(int, floors["diffusers"].split("."))) >= (0, 38)
