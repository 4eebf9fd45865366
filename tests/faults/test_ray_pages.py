"""The commands of the section on Ray in manifests/scale.md, as they are written: two nodes that `ray start` starts."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest
from harness import FORKS, PATIENCE
from page_commands import commands

pytest.importorskip("ray")
from started_ray import StartedRay

pytestmark = [FORKS, pytest.mark.slow]

SECTION = commands("scale.md", "Ray")
SMALL = "--resolution 96 --step 16 --dtype float32"


@pytest.fixture(scope="module")
def ray():
    """The cluster of the page: its lines for one node, and its line for all others."""
    found = StartedRay()
    try:
        for line in SECTION:
            if line.startswith(("export ", "ray ")):
                found.run(line)
        yield found
    finally:
        found.close()


@pytest.fixture
def run(ray, setting, tmp_path):
    """`run(line)` runs a command in a directory with `photos` and `model`; what it prints."""
    for name, target in zip(("photos", "model"), setting, strict=True):
        (tmp_path / name).symlink_to(target)

    def go(line, code=0):
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=PATIENCE, cwd=tmp_path,
                              env={**ray.environment, "LATENTRY_USER_CACHE": str(tmp_path / "user")}, check=False)
        assert done.returncode == code, done.stderr
        shutil.rmtree(tmp_path / "user")
        return done.stdout

    return go


def test_encode(run, tmp_path):
    line, = (line for line in SECTION if line.startswith("prep encode "))
    assert " --engine ray --address auto" in line
    made = []
    for each in (line, line.replace("--engine ray --address auto", "--device cpu")):
        report = json.loads(run(f"{each} {SMALL} --json"))
        assert sum(report["encoded"].values()) == 11, report
        made.append((tmp_path / "manifest.json").read_bytes())
        shutil.rmtree(tmp_path / "cache")
    assert made[0] == made[1]


def test_scan(run):
    line, = (line for line in SECTION if line.startswith("prep scan "))
    assert line.endswith(" --engine ray --address auto")
    told = run(f"{line} --json")
    assert told == run(f"{line.removesuffix(' --engine ray --address auto')} --json")
    assert json.loads(told)["pictures"] == 5
