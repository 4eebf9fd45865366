"""Several `prep encode` at once on one cache, some of whom die, and `prep gc` beside them: every manifest is right."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections import defaultdict

import numpy as np
import pytest
from account import account, state
from harness import FORKS, words_of

from prep.cache.reader import Reader
from prep.cache.store import Cache
from prep.manifest.document import read_manifest
from prep.manifest.tables import SAMPLES, SHARDS, read_table

pytestmark = FORKS
ROWS = 11  # 5 latents, 2 masks, 4 texts


def report(ending):
    return json.loads(ending["out"])


def only_races(trace, *, deaths=False):
    """Tasks that were made more than once; each of them by those who looked before anybody had finished it.

    With `deaths`, a task may have been begun and never committed: others adopt the shard that the dead left.
    """
    missing, committed = defaultdict(list), defaultdict(list)
    for line in trace.read_text().splitlines():
        what, key, when = json.loads(line)
        {"missing": missing, "committed": committed, "finished": defaultdict(list)}[what][key].append(when)
    assert committed and set(missing) >= set(committed) and (deaths or set(missing) == set(committed))
    for key, times in committed.items():
        assert max(missing[key]) < min(times), f"task {key} was finished when it was begun again"
    return [key for key, times in committed.items() if len(times) > 1]


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_writers_of_one_recipe(stage, tmp_path, count):
    assert stage.run(stage.encode(), task_rows=1)["codes"] == [0]
    alone, there = stage.manifest.read_bytes(), stage.at(tmp_path / "shared")
    endings = stage.launch(*there.writers(count, task_rows=1))
    assert [ending["codes"] for ending in endings] == [[0]] * count, words_of(endings)
    raced = only_races(there.trace)
    made = sum(sum(report(ending)["encoded"].values()) for ending in endings)
    assert ROWS <= made <= ROWS + (count - 1) * len(raced)
    left = account(there.home)
    assert left.staging == [] and left.plans == [] and len(left.shards) == ROWS
    for number in range(count):
        assert (there.home / f"{number}.json").read_bytes() == alone
    assert there.run(there.verify("0.json"))["codes"] == [0]


@pytest.mark.parametrize("count", [3, pytest.param(8, marks=pytest.mark.slow)])
def test_writers_some_of_whom_die(stage, tmp_path, count):
    """Those who die hold the lock, a plan, half of a shard; the others do not wait for them, and do their work."""
    points = len(stage.points(stage.encode(), task_rows=1))
    wanted, there = stage.manifest.read_bytes(), stage.at(tmp_path / "shared")
    runs = there.writers(count, task_rows=1)
    for number in range(0, count, 3):
        runs[number]["shim"]["kill"] = points * (number + 1) // (3 * count)
    endings = stage.launch(*runs)
    for number, ending in enumerate(endings):
        if ending["signal"] != signal.SIGKILL:  # who was to die may have found too little left to do
            assert ending["codes"] == [0], words_of(ending)
            assert (there.home / f"{number}.json").read_bytes() == wanted
    dead = [number for number, ending in enumerate(endings) if ending["signal"] == signal.SIGKILL]
    assert 0 in dead and not [number for number in dead if number % 3]
    only_races(there.trace, deaths=True)
    begun = time.monotonic()
    ending = there.run(there.encode(name="1.json"), there.verify("1.json"))
    assert ending["codes"] == [0, 0] and time.monotonic() - begun < 20
    left = account(there.home)
    assert left.staging == [] and left.plans == []


@pytest.fixture
def recipes(stage, tmp_path):
    """Four ways to encode the same pictures, as commands for a stage: smaller, without masks, with other captions."""
    other = shutil.copytree(stage.pictures, tmp_path / "others")
    (other / "1.txt").write_text("another picture")
    (other / "3.txt").unlink()

    def commands(there):
        elsewhere = type(stage)(launch=stage.launch, pictures=other, model=stage.model, home=there.home)
        return {"plain.json": there.encode(name="plain.json"),
                "small.json": there.encode("--resolution", 64, name="small.json"),
                "bare.json": there.encode("--mask", "none", name="bare.json"),
                "other.json": elsewhere.encode("--missing-caption", "filename", name="other.json")}

    return commands


def rows(manifest):
    """Each sample's name with the values of its rows."""
    opened = read_manifest(manifest)
    cache, found = Cache(root=opened.cache_root), {}
    shards = [row.hex() for row in read_table(cache, opened.document["tables"]["shards"], SHARDS)["digest"].to_pylist()]
    reader = Reader(cache)
    for sample in read_table(cache, opened.document["tables"]["samples"], SAMPLES).to_pylist():
        view, text = sample["views"][0], sample["texts"][0]
        places = {"latent": (view["latent_shard"], view["latent_row"]), "hidden": (text["shard"], text["row"]),
                  "mask": (view["mask_shard"], view["mask_row"])}
        found[sample["name"]] = {name: row_of(reader, shards[shard], name, row)
                                 for name, (shard, row) in places.items() if shard >= 0}
    reader.close()
    return found


def row_of(reader, shard, name, row):
    spec, _ = reader.array_info(shard, name)
    out = np.empty(spec.row_bytes, np.uint8)
    reader.read_into(out, shard, name, row)
    return out.view(spec.dtype)


def same_rows(one, two):
    """Same samples, same rows, but for the last bits: they depend on what else was in a batch."""
    one, two = rows(one), rows(two)
    assert one.keys() == two.keys()
    for name, arrays in one.items():
        assert arrays.keys() == two[name].keys()
        for array, value in arrays.items():
            np.testing.assert_allclose(value, two[name][array], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_writers_of_several_recipes(stage, tmp_path, recipes, each):
    there = stage.at(tmp_path / "shared")
    commands = recipes(there)
    endings = stage.launch(*there.writers(0, *list(commands.values()) * each, task_rows=1))
    assert [ending["err"][-2000:] for ending in endings if ending["codes"] != [0]] == []
    only_races(there.trace)
    alone = recipes(stage)
    assert stage.run(*alone.values())["codes"] == [0] * 4
    assert there.run(*map(there.verify, alone))["codes"] == [0] * 4
    for name in alone:
        same_rows(there.home / name, stage.home / name)
    assert account(there.home).plans == []


@pytest.mark.parametrize("each", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_writers_while_gc_runs_again_and_again(stage, tmp_path, recipes, each):
    """What is old and needed by nobody goes; nothing goes that a kept manifest or a writer needs."""
    there = stage.at(tmp_path / "shared")
    commands = recipes(there)
    kept = there.encode("--resolution", 80, name="kept.json")
    assert there.run(kept, there.encode("--resolution", 48, name="gone.json"))["codes"] == [0, 0]
    (there.home / "gone.json").unlink()
    old = time.time() - 3 * 86400
    for path in there.cache.rglob("*"):
        os.utime(path, (old, old))
    shards, needed = set(account(there.home).shards), state(there.home)["kept.json"]
    clean = ["gc", str(there.cache), "--keep", str(there.home / "kept.json"), "--older-than", "24h", "--yes"]
    writers = there.writers(0, *list(commands.values()) * each, task_rows=1)
    *endings, cleaner = stage.launch(*writers, {**there.one(clean), "beside": True})
    assert [ending["err"][-2000:] for ending in endings if ending["codes"] != [0]] == []
    assert set(cleaner["codes"]) <= {0, 7} and len(cleaner["codes"]) > 1
    assert there.run(clean)["codes"] == [0], "nobody is in the way any more"
    assert state(there.home)["kept.json"] == needed and shards - set(account(there.home).shards)
    verified = there.run(*(there.verify(name) for name in (*commands, "kept.json")))
    assert verified["codes"] == [0] * 5, verified


def test_how_runs_ended_is_shown_with_all_that_they_wrote():
    ending = {"codes": [7], "code": 7, "signal": None, "out": "{}\n" * 200, "err": "error: the last word\n"}
    assert words_of([ending, ending]).count("error: the last word\n" + "{}\n" * 200) == 2
    assert words_of(ending).startswith("run 1 of 1 ended with [7], signal None, and wrote\nerror: ")
