"""`prep encode` over a cache that somebody has prepared: what records claim is not believed; the manifest is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from victims import replaced, sealed

from prep.cache import damage, plans
from prep.cache.commits import read_commit
from prep.cache.damage import Damage
from prep.cache.records import Task
from prep.cache.store import Cache
from prep.digest import digest_json
from prep.encode import plan as encoding

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu", "--mask", "sidecar")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A cache and its manifest, kept for all tests of this file."""
    return tmp_path_factory.mktemp("whole")


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path, whole):
    """`encode()`: how the command ended, over a copy of the cache that was made first."""

    def go():
        return prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "m.json",
                    *SMALL, "--json")

    if not (whole / "m.json").exists():
        first = go()
        assert first.code == 0, first.err
        shutil.copytree(tmp_path / "cache", whole / "cache")
        shutil.copy(tmp_path / "m.json", whole / "m.json")
    else:
        shutil.copytree(whole / "cache", tmp_path / "cache")
    return go


@pytest.fixture
def same(prep, encode, whole, tmp_path):
    """`same()`: encodes, and the manifest is that of an undisturbed run; how many rows were made."""

    def go() -> int:
        result = encode()
        assert result.code == 0, result.err
        assert (tmp_path / "m.json").read_bytes() == (whole / "m.json").read_bytes()
        assert prep("verify", tmp_path / "m.json").code == 0
        return sum(result.json["encoded"].values())

    return go


def commits(cache: Cache, field: str) -> list[Path]:
    return [cache.commit(task) for task in cache.names("commits") if read_commit(cache, task).field == field]


@pytest.mark.parametrize("change", [{"field": "text"}, {"rows": 1 << 23}, {"bytes": 1 << 50}, {"shard": "ab" * 32},
                                    {"task": "ab" * 32}, {"rejects": [{}]}], ids=lambda change: next(iter(change)))
def test_commits_that_lie(same, tmp_path, change):
    for path in commits(Cache(root=tmp_path / "cache"), "latent"):
        replaced(path, sealed({**json.loads(path.read_bytes()), **change}))
    same()


def test_a_commit_that_rejects_what_is_wanted_hides_nothing_that_is_there(same, tmp_path):
    cache = Cache(root=tmp_path / "cache")
    keys = [bytes(key).hex() for path in commits(cache, "latent") for key in keys_of(cache, path)]
    path = commits(cache, "text")[0]
    rejects = [{"key": key, "code": "truncated", "detail": "not really"} for key in keys]
    replaced(path, sealed({**json.loads(path.read_bytes()), "rejects": rejects}))
    assert same() == 0


def keys_of(cache: Cache, commit: Path):
    from prep.cache.shard_header import read_keys

    return read_keys(cache, json.loads(commit.read_bytes())["shard"])


def test_a_plan_that_mixes_everything(prep, encode, tmp_path, monkeypatch):
    """Rows of all fields and shapes in one task, keys of nobody, a task's key that is another's, rows twice."""
    cache = Cache(root=tmp_path / "cache")
    keys = sorted({bytes(key).hex() for field in ("latent", "mask", "text") for path in commits(cache, field)
                   for key in keys_of(cache, path)})
    tasks = [task(field, keys) for field in ("latent", "nothing", "text")]
    tasks += [task("mask", keys[at:at + 1]) for at in range(len(keys))] * 2 + [task("latent", ["ff" * 32])]
    tasks += [Task(key=tasks[0].key, field="text", rows=(key,)) for key in keys]
    for folder in ("commits", "shards"):
        shutil.rmtree(cache.root / folder)
    (cache.root / "lookup.arrow").unlink(missing_ok=True)
    seen = []
    real = plans.read_plan

    def read_plan(cache, wanted):
        seen.append(wanted)
        if len(seen) == 1:
            plans.write_plan(cache, wanted, tasks)
        return real(cache, wanted)

    monkeypatch.setattr(encoding, "read_plan", read_plan)
    result = encode()
    assert result.code == 0 and sum(result.json["encoded"].values()) == len(keys) and seen, result.err
    assert prep("verify", tmp_path / "m.json").code == 0
    assert sum(encode().json["encoded"].values()) == 0


def test_commits_that_say_that_a_task_is_finished(same, tmp_path):
    """All tasks are said to have made the first one's shard, or to have rejected something."""
    cache = Cache(root=tmp_path / "cache")
    paths = [path for field in ("latent", "mask", "text") for path in commits(cache, field)]
    first = json.loads(paths[0].read_bytes())
    for number, path in enumerate(paths[1:]):
        own = json.loads(path.read_bytes())
        claim = {**first, "task": own["task"], "field": first["field"] if number % 2 else own["field"]}
        if number % 3 == 2:
            claim |= {"shard": None, "rows": 0, "bytes": 0, "rejects": []}
        replaced(path, sealed(claim))
        shutil.rmtree(cache.shard(own["shard"]))
    assert same() > 0 and same() == 0


def task(field: str, keys: list[str]) -> Task:
    return Task(key=digest_json({"kind": "task", "field": field, "rows": keys}), field=field, rows=tuple(keys))


def test_damage_that_is_none(same, tmp_path):
    cache = Cache(root=tmp_path / "cache")
    for shard in cache.shards():
        damage.record(cache, [Damage(shard=shard, field="x", array="../../y", row=row, what="\x1b[31m")
                              for row in (0, 1, 1 << 20)])
    same()


def test_links_to_elsewhere_are_not_written_through(encode, tmp_path):
    """The shards of a cache lie in somebody's home: nothing is made there, nothing removed."""
    home = tmp_path / "home"
    home.mkdir()
    (home / "letter").write_text("dear")
    for name in ("shards", "commits", "tmp"):
        path = tmp_path / "cache" / name
        path.rename(tmp_path / name)
        path.symlink_to(home)
        result = encode()
        assert result.code == 7 and f"{name} is a link, expected" in result.err
        assert "a link to the whole cache" in result.err and [one.name for one in home.iterdir()] == ["letter"]
        path.unlink()
        (tmp_path / name).rename(path)
    assert encode().code == 0
