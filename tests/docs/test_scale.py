"""Each command of manifests/scale.md is run by a test; here are those that plan work as large as nobody here has: they
run on a few pictures."""

from __future__ import annotations

import re
import shlex

import pytest
from page_commands import ROOT, commands
from pictures import draw

# By section and first words, the tests that take the command from the page; or why none does.
RUN = {
    ("One machine", "prep encode"): "tests/faults/test_parts.py",
    ("Ray", "export RAY_AUTH_MODE=token"): "tests/faults/test_ray_pages.py",
    ("Ray", "ray get-auth-token"): "tests/faults/test_ray_pages.py",
    ("Ray", "ray start"): "tests/faults/test_ray_pages.py",
    ("Ray", "prep encode"): "tests/faults/test_ray_pages.py",
    ("Ray", "prep scan"): "tests/faults/test_ray_pages.py",
    ("Job arrays", "prep encode"): "tests/faults/test_parts.py",
    ("Job arrays", "prep seal"): "tests/faults/test_parts.py",
    ("Job arrays", "PARTS=3 bash"): "tests/faults/test_parts.py",
    ("What it would take", "prep encode"): "tests/docs/test_scale.py",
    ("Training on many machines", "torchrun --nnodes"): "tests/remote/test_pages.py",
    ("Training on many machines", "train check"): "tests/docs/test_scale.py",
}
LEFT_OUT = {
    ("Job arrays", "kubectl apply"): "there is no Kubernetes; tests/faults/test_parts.py runs what the Jobs run",
    ("Job arrays", "kubectl wait"): "as above",
}


def test_every_command_is_run_or_left_out_for_a_reason():
    text = (ROOT / "manifests" / "scale.md").read_text(encoding="utf-8")
    shown = {(section, " ".join(line.split()[:2])) for section in re.findall(r"^## (.+)$", text, re.MULTILINE)
             for line in commands("scale.md", section)}
    assert shown == RUN.keys() | LEFT_OUT.keys()
    for path in RUN.values():
        assert re.search(r"scale\.md", (ROOT / path).read_text(encoding="utf-8")), path
    assert sum(len(commands("scale.md", section)) for section in {section for section, _ in shown}) == len(
        commands("scale.md")), "none before the first section"


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
    (line,) = [line for line in commands("scale.md", "What it would take") if line.startswith("prep ")]
    told = prep(*shlex.split(line)[1:])
    assert told.code == 0, told.err
    assert re.search(r"samples|rows", told.out)
    assert not (here / "cache").exists() and not (here / "manifest.json").exists(), "it writes nothing"


@pytest.mark.slow
def test_what_training_would_take(here, prep, train):
    assert prep("encode", "photos", "--model", "model", "--cache", "cache", "-o", "manifest.json").code == 0
    asked = [line for line in commands("scale.md", "Training on many machines") if line.startswith("train ")]
    assert len(asked) == 2
    for line in asked:
        told = train(*shlex.split(line)[1:])
        assert told.code == 0, told.err
        assert "128 machines" in told.out or "128 nodes" in told.out, told.out
