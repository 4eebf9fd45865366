"""The power goes: what was not synced is lost, or half there. Whatever has a name is whole even so, and what was
finished is there. And: take the syncs away, and these tests fail.
"""

from __future__ import annotations

import json
import shutil
import signal

import pytest
from account import account, state
from harness import FORKS, words_of

pytestmark = FORKS
PARTS = 4
PART = pytest.mark.parametrize("part", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in range(PARTS))])


def cut(there, point, seed, *argv, **plan):
    """Runs the commands until the power goes after `point` calls; -1: at their end."""
    ending = there.run(*(argv or [there.encode()]), power=point, seed=seed, **plan)
    assert ending["signal"] == signal.SIGKILL, words_of(ending)


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
    sample = [round((number + 1) * count / 3) for number in range(3)]
    for point in sample if part is None else range(1 + part, count + 1, PARTS):
        there = stage.at(tmp_path / str(point))
        cut(there, point, point if point % 4 else None)
        holds(there, wanted)
        there.recover(wanted)
        shutil.rmtree(there.home)


@pytest.mark.parametrize("seeds", [1, pytest.param(25, marks=pytest.mark.slow)])
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


@pytest.mark.parametrize("some", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_a_power_cut_after_a_kill_and_a_second_run(stage, tmp_path, some):
    """The first process died between a rename and the sync that makes it last; the second finds the name there."""
    points = stage.points(stage.encode())
    wanted = state(stage.home)
    named = [number for number, (name, path) in enumerate(points)
             if name in ("rename", "link", "make_dir") and not path.startswith("cache/tmp/")]
    for point in named[len(named) // (2 * some) :: max(1, len(named) // some)]:
        there, kept = stage.at(tmp_path / str(point)), str(tmp_path / f"{point}.kept")
        ending = there.run(there.encode(), kill=point + 1, when="before", follow=kept)
        assert ending["signal"] == signal.SIGKILL, words_of(ending)
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
    for point in range(1, count + 1, max(1, count // 2)):
        there = stage.at(shutil.copytree(base, tmp_path / str(point)))
        cut(there, point, point, there.clean())
        assert json.loads(there.manifest.read_text())["self"] == wanted
        ending = there.run(there.verify(), there.clean(), there.verify())
        assert ending["codes"] == [0, 0, 0], words_of(ending)
        account(there.home)
        shutil.rmtree(there.home)


@pytest.mark.parametrize("dropped", ["sync", "sync_dir"])
def test_without_syncs_it_does_not_hold(stage, tmp_path, dropped):
    """The tests above see what they are meant to see."""
    stage.points(stage.encode())
    wanted, there = state(stage.home), stage.at(tmp_path / dropped)
    cut(there, -1, 3, drop=[dropped])
    with pytest.raises(AssertionError):
        holds(there, wanted)
        assert (there.home / "m.json").exists() and not there.recover(wanted)["encoded"]["latent"]


# Each by the path of what is synced. Not among them: plans, which are made again; commits, without which a shard is
# adopted; and what is removed.
NEEDED = {
    "rows": ("sync", r"cache/tmp/\w+/\w+/c[.0]+"), "documents": ("sync", r"cache/tmp/\w+/.*zarr\.json"),
    "commits, tables, manifest": ("sync", r"cache/tmp/\.\w+\.partial"),
    "names in a shard": ("sync_dir", r"cache/tmp/\w+/\w+"), "names in a staged shard": ("sync_dir", r"cache/tmp/\w+"),
    "shards": ("sync_dir", r"cache/shards/.."), "directories of shards": ("sync_dir", "cache/shards"),
    "tables": ("sync_dir", r"cache/tables/.."), "directories of tables": ("sync_dir", "cache/tables"),
    "all in the cache": ("sync_dir", "cache"), "the manifest": ("sync_dir", r"\."),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", NEEDED)
def test_no_sync_can_be_spared(stage, tmp_path, what):
    dropped, path = NEEDED[what]
    stage.points(stage.encode())
    wanted, there = state(stage.home), stage.at(tmp_path / "there")
    cut(there, -1, None, drop=[dropped], where=path)
    with pytest.raises(AssertionError):
        holds(there, wanted)
        assert (there.home / "m.json").exists() and not sum(there.recover(wanted)["encoded"].values())
