"""The power goes: what was not synced is lost, or half there. Whatever has a name is whole even so, and what was
finished is there. And: take the syncs away, and these tests fail.
"""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest
from account import account, state

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here, and no SIGKILL")
PARTS = 4
PART = pytest.mark.parametrize("part", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in range(PARTS))])


def cut(there, point, seed, *argv, **plan):
    """Runs the commands until the power goes after `point` calls; -1: at their end."""
    ending = there.run(*(argv or [there.encode()]), power=point, seed=seed, **plan)
    assert ending["signal"] == signal.SIGKILL, ending


def holds(there, wanted):
    """What must hold before anything is mended."""
    left = account(there.home)
    for name in left.manifests:
        assert state(there.home)[name] == wanted[name]
        assert there.run(there.verify(name))["codes"] == [0], "a manifest is there, and not what it names"


@PART
def test_a_power_cut_anywhere(stage, tmp_path, part):
    count = len(stage.points(stage.encode()))
    wanted = state(stage.home)
    sample = [round((n + 1) * count / 5) for n in range(5)]
    for point in sample if part is None else range(1 + part, count + 1, PARTS):
        there = stage.at(tmp_path / str(point))
        cut(there, point, point if point % 4 else None)
        holds(there, wanted)
        there.recover(wanted)
        shutil.rmtree(there.home)


@pytest.mark.parametrize("seeds", [2, pytest.param(25, marks=pytest.mark.slow)])
def test_a_power_cut_after_the_end_takes_nothing(stage, tmp_path, seeds):
    stage.points(stage.encode())
    wanted = state(stage.home)
    for seed in range(seeds):
        there = stage.at(tmp_path / str(seed))
        cut(there, -1, seed or None)
        holds(there, wanted)
        assert (there.home / "m.json").exists()
        assert sum(there.recover(wanted)["encoded"].values()) == 0
        shutil.rmtree(there.home)


@pytest.mark.parametrize("some", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_a_power_cut_after_a_kill_and_a_second_run(stage, tmp_path, some):
    """The first process died between a rename and the sync that makes it last; the second finds the name there."""
    points = stage.points(stage.encode())
    wanted = state(stage.home)
    named = [number for number, (name, path) in enumerate(points)
             if name in ("rename", "link", "make_dir") and not path.startswith("cache/tmp/")]
    for point in named[:: max(1, len(named) // some)]:
        there, kept = stage.at(tmp_path / str(point)), str(tmp_path / f"{point}.kept")
        ending = there.run(there.encode(), kill=point + 1, when="before", follow=kept)
        assert ending["signal"] == signal.SIGKILL, ending
        cut(there, -1, None, **{"from": kept})
        holds(there, wanted)
        assert (there.home / "m.json").exists(), points[point]
        assert sum(there.recover(wanted)["encoded"].values()) == 0
        shutil.rmtree(there.home)


def test_a_power_cut_while_a_damaged_shard_is_mended_or_rubbish_removed(stage, tmp_path):
    assert stage.run(stage.encode(), stage.encode("--resolution", 64, name="other.json"))["code"] == 0
    (stage.home / "other.json").unlink()
    wanted = json.loads(stage.manifest.read_text())["self"]
    base = shutil.copytree(stage.home, tmp_path / "base")
    count = len(stage.points(stage.clean()))
    for point in range(1, count + 1, max(1, count // 5)):
        there = stage.at(shutil.copytree(base, tmp_path / str(point)))
        cut(there, point, point, there.clean())
        assert json.loads(there.manifest.read_text())["self"] == wanted
        ending = there.run(there.verify(), there.clean(), there.verify())
        assert ending["codes"] == [0, 0, 0], ending
        account(there.home)
        shutil.rmtree(there.home)


@pytest.mark.parametrize("dropped", ["sync", "sync_dir"])
def test_without_syncs_it_does_not_hold(stage, tmp_path, dropped):
    """The tests above see what they are meant to see."""
    stage.points(stage.encode())
    wanted, broken = state(stage.home), 0
    for seed in range(1, 6):
        there = stage.at(tmp_path / str(seed))
        cut(there, -1, seed, drop=[dropped])
        try:
            holds(there, wanted)
            assert (there.home / "m.json").exists() and not there.recover(wanted)["encoded"]["latent"]
        except AssertionError:
            broken += 1
        shutil.rmtree(there.home)
    assert broken >= 4
