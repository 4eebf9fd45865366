"""The commands of manifests/scale.md that plan work as large as nobody here has: they run on a few pictures.

Those that encode on clusters and in arrays run in tests/faults; torchrun's in tests/train/parallel and tests/remote.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from pictures import draw

PAGE = (Path(__file__).parents[2] / "manifests" / "scale.md").read_text(encoding="utf-8")


def commands(section: str, program: str) -> list[list[str]]:
    """The words of a program's commands in a section."""
    text = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
    return [shlex.split(line) for line in re.findall(rf"^    {program} (.+)$", text, re.MULTILINE)]


@pytest.fixture
def here(tmp_path, tiny_model, monkeypatch):
    """A directory with `photos` and `model`, as the page has them."""
    for number, size in enumerate([(512, 512), (640, 512), (512, 640), (600, 600)] * 2):
        picture = draw(tmp_path / "photos" / f"{number}.png", size, seed=number)
        picture.with_suffix(".txt").write_text(f"picture number {number}")
    (tmp_path / "model").symlink_to(tiny_model)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_what_it_would_take(here, prep):
    command, = commands("What it would take", "prep")
    told = prep(*command)
    assert told.code == 0, told.err
    assert re.search(r"1,000,000,000 pictures", told.out) and "512" in told.out
    assert not (here / "cache").exists() and not (here / "manifest.json").exists(), "it writes nothing"


@pytest.mark.slow
def test_what_training_would_take(here, prep, train):
    assert prep("encode", "photos", "--model", "model", "--cache", "cache", "-o", "manifest.json").code == 0
    asked = commands("Training on many machines", "train")
    assert len(asked) == 2
    for words in asked:
        told = train(*words)
        assert told.code == 0, told.err
        assert "128 machines" in told.out or "128 nodes" in told.out, told.out
