"""SIGKILL at every change that the commands make to the disk, and at random moments: a second run mends all of it.

The processes are real, and so is their death; only its moment is chosen, by a shim in `prep.fs.atomic`.
"""

from __future__ import annotations

import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace

import pytest
import sd_scripts
from account import account, state
from harness import ENVIRONMENT, FORKS, OPTIONS, Stage, words_of

from prep.cache.ledger.ledger import load_ledger
from prep.cache.store import Cache
from prep.fs.atomic import PRIMITIVES

pytestmark = FORKS
WHEN = ("before", "after", "half")
PARTS = 8  # of all points, so that no test is long
PART = pytest.mark.parametrize("part", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in range(PARTS))])


def of(points, part, sample):
    """The numbers of a part of all points; for None of so many, spread evenly."""
    last = len(points) - 1
    if part is None:
        return [round((number + 0.5) * last / sample) for number in range(sample)]
    return range(part, len(points), PARTS)


def kill(there, point, points, *argv):
    """Runs the commands up to `point`; the process is then dead."""
    when = WHEN[point % 3] if points[point][0] == "write" else WHEN[point % 2]
    ending = there.run(*argv, kill=point, when=when)
    assert ending["signal"] == signal.SIGKILL, words_of(ending)


def test_an_undisturbed_run_makes_the_same_calls_each_time(stage, tmp_path):
    """Else the points of the other tests would be other points in each run."""
    first, second = (there.points(there.encode()) for there in (stage, stage.at(tmp_path / "again")))
    assert [name for name, _ in first] == [name for name, _ in second]
    assert {name for name, _ in first} == set(PRIMITIVES) - {"remove_dir"}, "what has no call is not tested below"
    assert len(first) > 300
    assert state(stage.home) == state(tmp_path / "again")
    assert account(stage.home).staging == []


def test_nothing_else_changes_the_disk(stage, tmp_path):
    """One disposable file apart: else there would be points at which nothing is tested."""
    stage.run(stage.encode(), stage.verify(), watch=str(tmp_path / "seen"))
    seen = {tuple(json.loads(line)) for line in (tmp_path / "seen").read_text().splitlines()}
    assert seen == {("open", "cache/lock")}


@PART
def test_killed_at_any_change_of_the_disk(stage, tmp_path, part):
    points = stage.points(stage.encode())
    wanted, whole = state(stage.home), account(stage.home)
    for point in of(points, part, 6):
        there = stage.at(tmp_path / str(point))
        kill(there, point, points, there.encode())
        left = account(there.home)
        assert set(left.commits) <= set(whole.commits) and set(left.shards) <= set(whole.shards)
        assert not left.manifests or state(there.home)["m.json"] == wanted["m.json"]
        there.recover(wanted)
        shutil.rmtree(there.home)


@pytest.mark.parametrize("times", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_killed_again_while_mending(stage, tmp_path, times):
    points = stage.points(stage.encode())
    wanted, draw, twice = state(stage.home), random.Random(times), 0
    for number in range(times):
        there = stage.at(tmp_path / str(number))
        point = draw.randrange(len(points) // 2)
        kill(there, point, points, there.encode())
        ending = there.run(there.encode(), kill=draw.randrange(len(points) // 3), when=WHEN[number % 2])
        twice += ending["signal"] == signal.SIGKILL
        account(there.home)
        there.recover(wanted)
        shutil.rmtree(there.home)
    assert twice == times


@PART
def test_killed_while_a_damaged_shard_is_mended(stage, tmp_path, part):
    """No good row is made again, however often it is tried."""
    assert stage.run(stage.encode())["code"] == 0
    shards = load_ledger(Cache(root=stage.cache)).shards
    shard = max((one for one in shards if (stage.cache_shard(one) / "latent").is_dir()), key=lambda one: one.rows)
    assert shard.rows == 2
    flip(stage.cache_shard(shard) / "latent" / "c.0.0.0.0")
    assert stage.run(stage.verify())["code"] == 7
    base = shutil.copytree(stage.home, tmp_path / "base")
    points = stage.points(stage.encode())
    wanted = state(stage.home)
    for point in of(points, part, 2):
        there = stage.at(shutil.copytree(base, tmp_path / str(point)))
        kill(there, point, points, there.encode())
        account(there.home)
        assert sum(there.recover(wanted)["encoded"].values()) <= 1
        shutil.rmtree(there.home)


class Importing(Stage):
    """A stage whose `encode` imports what sd-scripts cached."""

    def at(self, home):
        home.mkdir(exist_ok=True)
        return replace(self, home=home)

    def encode(self, *options, name="m.json"):
        return ["import", str(self.pictures), "--from", "kohya-npz", "--model", str(self.model), "--cache",
                str(self.cache), "-o", str(self.home / name), "--mask", "sidecar", "--verify", "0", *OPTIONS[4:]]


@PART
def test_killed_while_latents_are_imported(stage, tmp_path, part):
    pictures = shutil.copytree(stage.pictures, tmp_path / "pictures")
    vae = sd_scripts.load_vae(stage.model)
    for path in sorted(pictures.glob("?.png")):
        sd_scripts.cache_latents(path, vae, "sd", sd_scripts.buckets(96, 16))
    stage = Importing(launch=stage.launch, pictures=pictures, model=stage.model, home=stage.home)
    points = stage.points(stage.encode())
    wanted, whole = state(stage.home), account(stage.home)
    for point in of(points, part, 2):
        there = stage.at(tmp_path / str(point))
        kill(there, point, points, there.encode())
        left = account(there.home)
        assert set(left.commits) <= set(whole.commits) and set(left.shards) <= set(whole.shards)
        assert not left.manifests or state(there.home)["m.json"] == wanted["m.json"]
        assert there.recover(wanted)["samples"]["train"] == 5
        shutil.rmtree(there.home)


@PART
def test_killed_while_cleaning_up(stage, tmp_path, part):
    """The kept manifest is whole at any moment, and a second run removes the rest."""
    assert stage.run(stage.encode(), stage.encode("--resolution", 64, name="other.json"))["code"] == 0
    (stage.home / "other.json").unlink()
    base = shutil.copytree(stage.home, tmp_path / "base")
    points = stage.points(stage.clean())
    wanted = state(stage.home)
    assert len(wanted) < len(state(base))
    for point in of(points, part, 2):
        there = stage.at(shutil.copytree(base, tmp_path / str(point)))
        kill(there, point, points, there.clean())
        account(there.home)
        ending = there.run(there.verify(), there.clean(), there.verify())
        assert ending["codes"] == [0, 0, 0], words_of(ending)
        assert state(there.home) == wanted and account(there.home).staging == []
        shutil.rmtree(there.home)


@PART
def test_killed_while_shards_are_joined(stage, tmp_path, part):
    """The old manifest is whole at any moment; joined in the end, all is as if it had been done in one go."""
    assert stage.run(stage.encode())["code"] == 0
    base = shutil.copytree(stage.home, tmp_path / "base")
    points = stage.points(stage.compact())
    after = (stage.compact(), stage.encode(), stage.clean(), stage.verify())
    assert stage.run(*after)["codes"] == [0, 0, 0, 0]
    wanted = state(stage.home)
    assert len(account(stage.home).shards) < len(account(base).shards)
    for point in of(points, part, 2):
        there = stage.at(shutil.copytree(base, tmp_path / str(point)))
        kill(there, point, points, there.compact())
        account(there.home)
        ending = there.run(there.verify(), there.compact(), there.encode(), there.clean(), there.verify())
        assert ending["codes"] == [0, 0, 0, 0, 0], words_of(ending)
        assert state(there.home) == wanted and account(there.home).staging == []
        shutil.rmtree(there.home)


@PART
def test_killed_while_prompts_are_replaced(stage, tmp_path, part):
    """The manifest is the old or the new one at any moment, and whole; a second run makes the new one with its rows."""
    assert stage.run(stage.encode())["code"] == 0
    base, old = shutil.copytree(stage.home, tmp_path / "base"), stage.manifest.read_bytes()
    (tmp_path / "prompts.txt").write_text("a red cat --n a dog\na blue house\n")

    def prompts(there):
        return ["prompts", str(tmp_path / "prompts.txt"), "--manifest", str(there.manifest), "--device", "cpu",
                "--quiet"]

    points = stage.points(prompts(stage))
    wanted, new, rows = state(stage.home), stage.manifest.read_bytes(), len(account(base).shards)
    assert new != old and len(account(stage.home).shards) > rows and len(points) > 30
    seen = set()
    for point in of(points, part, 5):
        there = stage.at(shutil.copytree(base, tmp_path / str(point)))
        kill(there, point, points, prompts(there))
        left = account(there.home)
        assert left.manifests == ["m.json"] and set(account(base).shards) <= set(left.shards)
        seen.add(there.manifest.read_bytes())
        ending = there.run(there.verify(), prompts(there), there.verify())
        assert ending["codes"] == [0, 0, 0], words_of(ending)
        assert state(there.home) == wanted
        shutil.rmtree(there.home)
    assert seen <= {old, new}


@pytest.mark.parametrize("plan", [
    pytest.param({"plain": True}, id="no hard links and no syncs of directories"),
])
def test_killed_where_the_system_lacks_something(stage, tmp_path, plan):
    """macOS and Windows on strange disks: a commit is renamed into place, directories are not synced."""
    points = stage.points(stage.encode(), **plan)
    wanted = state(stage.home)
    for point in of(points, None, 2):
        there = stage.at(tmp_path / str(point))
        ending = there.run(there.encode(), kill=point, when=WHEN[point % 2], **plan)
        assert ending["signal"] == signal.SIGKILL, words_of(ending)
        account(there.home)
        there.recover(wanted, **plan)


@pytest.mark.parametrize("times", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_at_a_random_moment(stage, tmp_path, times):
    begun = time.monotonic()
    assert stage.run(stage.encode())["code"] == 0
    seconds, wanted, draw, dead = time.monotonic() - begun, state(stage.home), random.Random(times), 0
    while dead < times:
        there = stage.at(tmp_path / "killed")
        delay = draw.uniform(0.05, 1) * seconds
        ending = stage.launch({**there.one(there.encode()), "kill_after": delay})[0]
        if ending["signal"] == signal.SIGKILL:
            dead += 1
        else:
            seconds = delay  # it was quicker than the first
        account(there.home)
        there.recover(wanted)
        shutil.rmtree(there.home)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))
def test_the_program_itself_killed_at_a_random_moment(stage, tmp_path, part):
    """As a user starts it, with threads, without a shim: fifty times in all."""
    begun = time.monotonic()
    assert program(stage).wait() == 0
    seconds, wanted, draw, dead = time.monotonic() - begun, state(stage.home), random.Random(part), 0
    while dead < 10:
        there = stage.at(tmp_path / "killed")
        process = program(there)
        delay = draw.uniform(0.5, 1) * seconds  # before, it imports
        time.sleep(delay)
        process.kill()
        if process.wait() == -signal.SIGKILL:
            dead += 1
        else:
            seconds = delay
        account(there.home)
        there.recover(wanted, task_rows=256)
        shutil.rmtree(there.home)


def program(there):
    code = "from prep.cli.main import main; main()"
    return subprocess.Popen([sys.executable, "-c", code, *there.encode("--jobs", 2)], stdout=subprocess.DEVNULL,
                            env=ENVIRONMENT)


def flip(path):
    data = bytearray(path.read_bytes())
    data[10] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)
    path.chmod(0o444)
