"""prep gc in a store: it removes and keeps what it removes and keeps on a disk, whoever else works there."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from pictures import draw

from prep.cache import plans
from prep.cache.commits import read_commit
from prep.cache.ledger.ledger import write_commit
from prep.cache.plans import write_plan
from prep.cache.records import Reject, Task
from prep.cache.remote.opening import open_to_encode
from prep.cache.remote.stored import refresh
from prep.cache.shard_header import read_keys
from prep.cache.store import cache_at
from prep.digest import canonical, with_checksum
from prep.encode import run as encoding
from prep.errors import CacheError
from prep.fs.lock import lock_directory
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import DIRECTORY
from prep.fs.remote.objects import list_objects
from prep.maintenance import stock
from prep.maintenance import sweep as sweeping
from prep.maintenance.sweep import Needed, find_garbage

PLAN = "has encodes that go on or were interrupted, so nothing is removed: plan abababababab, last progress 0:00:"


@pytest.fixture(scope="module")
def made(tmp_path_factory, tiny_model):
    """A cache of two manifests that share text rows alone."""
    from prep.cli.main import app

    root = tmp_path_factory.mktemp("made")
    (root / "home").mkdir()
    for number in range(3):
        draw(root / "photos" / f"{number}.png", (160, 160), seed=number).with_suffix(".txt").write_text(f"a {number}")
    for name, side in (("kept", 96), ("other", 128)):
        with pytest.raises(SystemExit) as ending:
            app(["encode", str(root / "photos"), "--model", str(tiny_model), "--cache", str(root / "home/cache"), "-o",
                 str(root / f"home/{name}.json"), "--resolution", str(side), "--quiet"])
        assert not ending.value.code
    return root / "home"


@pytest.fixture
def both(made, store, tmp_path):
    """The cache here and in the store."""
    shutil.copytree(made.parent, tmp_path / "made")
    store.upload(made)
    return tmp_path / "made/home"


def files(root):
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file() and path.name != "lock"
            and "lookup" not in path.name}


def gc(prep, cache, manifest, *options):
    done = prep("gc", cache, "--keep", manifest, "--json", *options)
    return done if done.code else done.json


def sweep(store, prep, *options):
    return gc(prep, f"{store.url}/cache", f"{store.url}/kept.json", "--older-than", "0", *options)


def test_nothing_goes_while_this_computer_uses_the_cache(both, store, prep):
    dry = sweep(store, prep)
    assert dry["removed"]["shards"]
    with lock_directory(cache_at(Bucket.parse(f"{store.url}/cache")).root, exclusive=False):
        assert sweep(store, prep) == dry
        asked = len(store.proxy.asked)
        told = sweep(store, prep, "--yes")
        assert told.code == 7 and "cache is in use by another process" in told.err
    assert not [method for method, *_ in store.proxy.asked[asked:] if method in ("DELETE", "PUT", "POST")]


def test_what_goes_and_what_stays_is_as_on_a_disk(both, store, prep):
    here = [gc(prep, both / "cache", both / "kept.json", "--older-than", "0", *more) for more in ((), ("--yes",))]
    asked = len(store.proxy.asked)
    there = sweep(store, prep)
    assert not [method for method, *_ in store.proxy.asked[asked:] if method in ("DELETE", "PUT", "POST")]
    for one, other in zip((there, sweep(store, prep, "--yes")), here, strict=True):
        mine = [{**lost, "manifest": f"{store.url}/{Path(lost['manifest']).name}"} for lost in other["others"]]
        assert one == {**other, "others": mine, "searched": [store.url]} and len(mine) == 1
    assert there["removed"]["shards"] and there["removed"]["tables"] == 2
    assert set(list_objects(store.url)) == files(both)
    assert prep("verify", f"{store.url}/kept.json").code == 0
    again = sweep(store, prep, "--yes")
    assert not any(again["removed"].values())


def test_what_is_young_stays(both, store, prep):
    before = set(list_objects(store.url))
    found = gc(prep, f"{store.url}/cache", f"{store.url}/kept.json", "--yes")
    assert not any(found["removed"].values()) and found["guarded"] > 0 and set(list_objects(store.url)) == before
    told = prep("gc", f"{store.url}/cache", "--keep", f"{store.url}/kept.json", "--older-than", "0")
    assert f"other manifests were searched for only in {store.url}; name those elsewhere with --keep" in told.out
    assert "add --yes to remove" in told.out


def test_manifests_that_would_lose_rows_are_named_first(both, store, prep, tmp_path):
    """Those beside the kept ones and beside the cache, in the store and here; and nothing more is read of others."""
    there = f"{store.url}/other.json"
    for name, data in (("notes.json", b'{"mine": 1}'), ("torn.json", (both / "other.json").read_bytes()[:300]),
                       ("empty.json", b""), ("deep/other.json", (both / "other.json").read_bytes())):
        store.server.put(f"{store.prefix}/{name}", data)
    document = json.loads((both / "other.json").read_bytes())
    del document["self"]
    for name, cache in (("here", f"{store.url}/cache"), ("another", f"{store.url}/elsewhere")):
        (tmp_path / f"{name}.json").write_bytes(canonical(with_checksum({**document, "cache": cache})))
    shutil.copy(tmp_path / "here.json", tmp_path / "kept here.json")
    asked = len(store.proxy.asked)
    lines = prep("gc", f"{store.url}/cache", "--keep", f"{store.url}/kept.json", "--older-than", 0).out.splitlines()
    needed = f"{there} uses this cache and is not kept: 1 shard and 2 tables that it needs"
    said = f"{needed} would be removed; --keep {there} keeps them"
    assert [line for line in lines if "is not kept" in line] == [said]
    samples = document["tables"]["samples"]
    assert not [path for _, path, _ in store.proxy.asked[asked:] if samples in path], "of others, the shards table only"
    found = gc(prep, f"{store.url}/cache", tmp_path / "kept here.json", "--older-than", "0")
    assert [one["manifest"] for one in found["others"]] == [f"{store.url}/kept.json"]
    assert found["searched"] == [str(tmp_path), store.url]
    found = gc(prep, f"{store.url}/cache", f"{store.url}/kept.json", "--keep", tmp_path / "kept here.json",
               "--older-than", "0")
    assert found["others"] == [] and not any(found["removed"].values())
    done = prep("gc", f"{store.url}/cache", "--keep", f"{store.url}/kept.json", "--older-than", 0, "--yes")
    said = f"{needed} are removed; delete it, or run its prep encode again"
    assert done.code == 0 and said in done.err and said in done.out


def test_manifests_here_that_others_replaced_go(both, store, prep, tmp_path):
    """As `prep encode` says when it keeps one beside a manifest on this computer, whose cache is in a store."""
    document = json.loads((both / "other.json").read_bytes())
    del document["self"]
    for name, cache in (("kept.json", "cache"), ("kept.json.replaced-" + "a" * 12, "cache"),
                        ("kept.json.replaced-" + "b" * 12, "elsewhere")):
        (tmp_path / name).write_bytes(canonical(with_checksum({**document, "cache": f"{store.url}/{cache}"})))
    replaced = [str(tmp_path / ("kept.json.replaced-" + "a" * 12))]
    for more in ((), ("--yes",)):
        assert gc(prep, f"{store.url}/cache", tmp_path / "kept.json", *more)["replaced"] == replaced
    assert sorted(path.name[-5:] for path in tmp_path.glob("kept.json*")) == [".json", "bbbbb"]


def test_names_that_no_url_can_have_are_told_if_they_are_manifests(both, store, prep):
    manifest = (both / "other.json").read_bytes()
    for name, data in (("notes%20%232.json", b"{}"), ("notes%3F.json", b"[]"), ("a%20copy%20%232.json", manifest),
                       ("a%5Cb.json", manifest), ("a/b.json", (both / "kept.json").read_bytes())):
        store.server.put(f"{store.prefix}/{name}", data)
    told = prep("gc", f"{store.url}/cache", "--keep", f"{store.url}/kept.json", "--older-than", 0)
    assert told.code == 0, told.err
    notes = [line for line in told.err.splitlines() if line.startswith("note: ")]
    assert notes == [f"note: {store.url}/{name} begins like a manifest, but has a name that no URL can have (with ?, # "
                     "or a backslash), so it was not read: rename it, then run prep gc again"
                     for name in ("a copy #2.json", "a\\b.json")]
    assert f"{store.url}/other.json uses this cache and is not kept" in told.out


def test_a_place_that_may_not_be_listed_is_told(both, store, prep):
    """As with credentials for the cache alone."""
    store.proxy.rule = lambda method, path, before: "403" if "delimiter" in path else ""
    told = prep("gc", f"{store.url}/cache", "--keep", f"{store.url}/kept.json", "--older-than", 0)
    assert told.code == 0
    assert f"note: other manifests were not searched for in {store.url}: {store.url}: the store answered " in told.err
    assert "other manifests were not searched for; name all of them with --keep" in told.out


@pytest.mark.parametrize("step", [1, *(pytest.param(step, marks=pytest.mark.slow) for step in (0, 4, 7))])
def test_an_end_at_any_removal_leaves_what_is_needed(both, store, prep, step):
    left = iter(range(1000))
    store.proxy.rule = lambda method, path, before: "403" if method in ("DELETE", "POST") and next(left) >= step else ""
    assert sweep(store, prep, "--yes").code == 7
    store.proxy.forget()
    assert prep("verify", f"{store.url}/kept.json").code == 0
    sweep(store, prep, "--yes")
    gc(prep, both / "cache", both / "kept.json", "--older-than", "0", "--yes")
    assert set(list_objects(store.url)) == files(both)


def test_with_a_plan_nothing_is_removed(both, store, prep, monkeypatch):
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    write_plan(cache, "ab" * 32, [Task(key="cd" * 32, field="text", rows=("ef" * 32,))])
    before = set(list_objects(store.url))
    told = sweep(store, prep, "--yes")
    assert told.code == 7 and f"{store.url}/cache {PLAN}" in told.err
    assert set(list_objects(store.url)) == before
    monkeypatch.setattr(sweeping, "ABANDONED", 0)
    assert sweep(store, prep, "--yes")["removed"]["plans"] == 1


@pytest.fixture
def aged(store, monkeypatch):
    """`aged(part)`: to this program, objects whose names have this part were written eight days ago, until they are
    written again."""
    def age(part, days=8):
        start = len(store.proxy.asked)

        def listed(url, **how):
            new = {path for method, path, _ in store.proxy.asked[start:] if method == "PUT"}
            found = list_objects(url, **how)
            old = {name for name in found
                   if part in f"{url}/{name}" and f"{url}/{name}".removeprefix("s3:/") not in new}
            return {name: replace(one, written=one.written - days * 86400) if name in old else one
                    for name, one in found.items()}

        monkeypatch.setattr(stock, "list_objects", listed)
        monkeypatch.setattr(plans, "list_objects", listed)

    return age


def unfinished(both, store, prep, tiny_model):
    """The words of an encode of which the first part of two was made, and its plan."""
    words = ("encode", both.parent / "photos", "--model", tiny_model, "--cache", f"{store.url}/cache", "-o",
             f"{store.url}/new.json", "--resolution", "160")
    (both.parent / "photos/0.txt").write_text("another caption")
    assert prep(*words, "--part", "0/2").code == 0
    (plan,) = list_objects(f"{store.url}/cache/plans")
    return words, plan.removesuffix(".arrow")


@pytest.mark.slow
def test_an_old_plan_that_a_run_follows_again_is_not_abandoned(both, store, prep, tiny_model, aged, monkeypatch,
                                                               tmp_path):
    """Also before the run's first commit."""
    words, plan = unfinished(both, store, prep, tiny_model)
    aged("")
    assert gc(prep, f"{store.url}/cache", f"{store.url}/kept.json")["removed"]["plans"] == 1, "as long as nobody does"
    said = []

    def collecting(ready, planned, cache, stop):
        with pytest.raises(CacheError, match=f"so nothing is removed: plan {plan[:12]}, last progress 0:00:") as told:
            find_garbage(cache, Needed(shards={}, tables=frozenset()), guard=86400.0)
        said.append(told.value)
        return run(ready, planned, cache, stop)

    run = encoding.run_tasks
    monkeypatch.setattr(encoding, "run_tasks", collecting)
    monkeypatch.setenv(DIRECTORY, str(tmp_path / "another"))
    assert prep(*words, "--part", "1/2").code == 0 and len(said) == 1
    puts = [path for method, path, _ in store.proxy.asked if method == "PUT" and plan in path]
    assert len(puts) == 2
    assert prep(*words, "--part", "1/2").code == 0
    assert len([path for method, path, _ in store.proxy.asked if method == "PUT" and plan in path]) == 2, "it is young"


@pytest.mark.parametrize("rejected", [False, True])
def test_what_was_left_of_a_task_is_progress_of_its_plan(both, store, prep, aged, rejected):
    """The rest of a partly finished task is a task of its own: the plan does not name its commit."""
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    refresh(cache)
    task = next(iter(cache.names("commits")))
    key = bytes(read_keys(cache, read_commit(cache, task).shard.digest)[0]).hex()
    if rejected:
        key = "12" * 32
        write_commit(cache, Task(key="34" * 32, field="text", rows=(key,)), None,
                     [Reject(key=key, code="not-finite", detail="")], {})
    write_plan(cache, "ab" * 32, [Task(key="cd" * 32, field="text", rows=tuple(sorted((key, "ff" * 32))))])
    aged("")
    assert gc(prep, f"{store.url}/cache", f"{store.url}/kept.json")["removed"]["plans"] == 1, "all of it is old"
    for days in (8, 3):  # also of a plan that is young enough without that progress, the error states it
        aged("/plans/", days)
        told = gc(prep, f"{store.url}/cache", f"{store.url}/kept.json")
        assert told.code == 7 and f"{store.url}/cache {PLAN}" in told.err


def test_a_run_that_follows_an_abandoned_plan_while_it_is_removed_is_seen(both, store, prep, aged):
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    write_plan(cache, "ab" * 32, [Task(key="cd" * 32, field="text", rows=("ef" * 32,))])
    aged("/plans/")
    begun = []

    def begin(method, path, before):
        if method in ("DELETE", "POST") and not begun:
            begun.append(path)
            aged("another")
        return ""

    shards = {name for name in list_objects(store.url) if "/shards/" in name}
    store.proxy.rule = begin
    told = sweep(store, prep, "--yes")
    assert told.code == 7 and PLAN in told.err and begun
    assert shards <= set(list_objects(store.url)), "commits went, rows did not"


@pytest.mark.slow
def test_a_plan_that_nobody_can_finish_is_given_up_by_its_name(both, store, prep, tiny_model):
    """One part of two, then another caption, then the rest: the plan of the first part stays, and none other goes."""
    photos, words = both.parent / "photos", ("--model", tiny_model, "--cache", f"{store.url}/cache", "-o",
                                             f"{store.url}/new.json", "--resolution", "160")
    (photos / "0.txt").write_text("a first caption")
    for part in ("0/2", "1/2"):
        assert prep("encode", photos, *words, "--part", part, "--shard-mib", 1).code == 0
        (photos / "0.txt").write_text("a second caption")
    assert prep("encode", photos, *words).code == 0
    (old,) = list_objects(f"{store.url}/cache/plans")
    cache = open_to_encode(Bucket.parse(f"{store.url}/cache"), create=False)
    write_plan(cache, "ab" * 32, [Task(key="cd" * 32, field="text", rows=("ef" * 32,))])
    keep = ("gc", f"{store.url}/cache", "--keep", f"{store.url}/new.json", "--keep", f"{store.url}/kept.json")
    told = prep(*keep, "--yes")
    assert told.code == 7 and f"plan {old[:12]}, last progress 0:0" in told.err and "plan abababababab" in told.err
    assert f"--abandon {old[:12]}" in told.err and "--abandon abababababab" in told.err
    told = prep(*keep, "--abandon", old[:12], "--yes")
    assert told.code == 7 and old[:12] not in told.err and PLAN in told.err
    assert len(list_objects(f"{store.url}/cache/plans")) == 2, "nothing goes while another plan may go on"
    for wrong in ("abababa", "ab" * 33, "cd" * 4, "AB" * 6):
        told = prep(*keep, "--abandon", wrong, "--yes")
        assert told.code == 2 and f"--abandon is '{wrong}', expected a plan of {store.url}/cache: " in told.err
        assert old[:12] in told.err and "abababababab" in told.err
    both_plans = ("--abandon", old[:12], "--abandon", "ab" * 32)
    assert prep(*keep, *both_plans, "--json").json["removed"]["plans"] == 2
    assert len(list_objects(f"{store.url}/cache/plans")) == 2
    done = prep(*keep, *both_plans, "--yes", "--json").json
    assert done["removed"]["plans"] == 2 and done["removed"]["shards"] == 0, "young rows stay"
    assert not list_objects(f"{store.url}/cache/plans")
    assert prep("verify", f"{store.url}/new.json").code == 0
    assert prep(*keep, "--older-than", 0, "--yes").code == 0
    assert prep("verify", f"{store.url}/new.json").code == 0


def test_an_encoder_that_begins_meanwhile_is_seen(both, store, prep):
    def begin(method, path, before):
        if method in ("DELETE", "POST"):
            store.server.put(f"{store.prefix}/cache/plans/{'ab' * 32}.arrow", b"a plan")
        return ""

    shards = {name for name in list_objects(store.url) if "/shards/" in name}
    store.proxy.rule = begin
    told = sweep(store, prep, "--yes")
    assert told.code == 7 and PLAN in told.err
    assert shards <= set(list_objects(store.url)), "commits went, rows did not"
    assert prep("verify", f"{store.url}/other.json").code == 0


def test_a_manifest_that_is_replaced_meanwhile_is_seen(both, store, prep):
    def replace(method, path, before):
        if method in ("DELETE", "POST"):
            store.server.put(f"{store.prefix}/kept.json", (both / "other.json").read_bytes())
        return ""

    store.proxy.rule = replace
    told = sweep(store, prep, "--yes")
    assert told.code == 7
    assert f"{store.url}/kept.json was replaced while prep gc ran, so nothing more is removed" in told.err
    assert prep("verify", f"{store.url}/kept.json").code == 0


@pytest.mark.slow
def test_an_encoder_sees_that_its_shards_go(both, store, prep, tiny_model):
    """It wanted no row, so it has no plan."""
    commits = list(list_objects(f"{store.url}/cache/commits"))

    def collect(method, path, before):
        if method == "PUT" and path.endswith("/new.json"):
            for name in commits:
                store.server.delete(f"{store.prefix}/cache/commits/{name}")
        return ""

    words = ("encode", both.parent / "photos", "--model", tiny_model, "--cache", f"{store.url}/cache", "-o",
             f"{store.url}/new.json", "--resolution", "96")
    store.proxy.rule = collect
    told = prep(*words)
    assert told.code == 7 and f"{store.url}/new.json was written, but {store.url}/cache has no commits for " in told.err
    store.proxy.forget()
    assert prep(*words).code == 0
    assert prep("verify", f"{store.url}/new.json").code == 0


def test_what_is_refused(both, store, prep):
    told = gc(prep, f"{store.url}/cache", both / "kept.json", "--older-than", "0", "--yes")
    assert told.code == 7 and f"is a manifest of the cache {both / 'cache'}, expected one of {store.url}" in told.err
    for name in [name for name in list_objects(f"{store.url}/cache/shards") if "/latent/" in name]:
        store.server.delete(f"{store.prefix}/cache/shards/{name}")
    told = sweep(store, prep, "--yes")
    assert told.code == 7 and f"{store.url}/kept.json needs shard " in told.err
    assert ", so nothing is removed" in told.err
    told = prep("gc", f"{store.url}/none", "--keep", f"{store.url}/manifest.json")
    assert told.code == 7 and f"there is no cache in {store.url}/none: it has no latentry.json" in told.err
    assert prep("gc", f"{store.url}/cache").code == 2
