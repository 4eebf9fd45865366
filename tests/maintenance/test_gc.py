"""`prep gc`: what no kept manifest names goes, when asked to; what one names, or somebody works on, never."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
from pictures import draw
from real_manifest import build
from small_manifest import write_small

from prep.cache.store import open_cache
from prep.errors import CacheError
from prep.fs.lock import lock_directory
from prep.maintenance import sweep
from prep.maintenance.gc import collect_garbage
from prep.manifest.document import read_manifest, write_manifest

SMALL = ("--resolution", 96, "--step", 16, "--dtype", "float32", "--device", "cpu", "--json")
NOTHING = {"commits": 0, "shards": 0, "tables": 0, "plans": 0, "damaged": 0, "staging": 0}


@pytest.fixture
def encode(prep, photos, tiny_model, tmp_path):
    def go(name="m.json", cache="cache", *options):
        result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / cache, "-o", tmp_path / name,
                      *SMALL, *options)
        assert result.code == 0, result.err
        return result.json

    return go


@pytest.fixture
def gc(prep, tmp_path):
    """`prep gc` on the cache, with every age guard off."""
    return lambda *options: prep("gc", tmp_path / "cache", "--older-than", "0", *options)


def files_below(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and path.name != "lock"}


def test_old_rows_go_and_the_kept_manifest_stays_whole(prep, train, encode, gc, photos, tmp_path):
    encode("old.json", "cache", "--mask", "sidecar")
    encode("new.json", "cache", "--mask", "none")
    cache, keep = tmp_path / "cache", ("--keep", tmp_path / "new.json")
    before = files_below(cache)
    assert prep("gc", cache, *keep, "--json").json["removed"] == NOTHING  # all is younger than a day
    dry = gc(*keep, "--json").json
    assert (dry["format"], dry["version"], dry["dry_run"]) == ("latentry/gc", 1, True)
    assert dry["removed"]["shards"] >= 1 and dry["removed"]["commits"] >= 1 and dry["removed"]["tables"] >= 2
    assert dry["kept"]["manifests"] == 1 and dry["guarded"] == 0
    assert files_below(cache) == before
    done = gc(*keep, "--yes", "--json").json
    assert {**done, "dry_run": True} == dry
    after = files_below(cache)
    assert after.items() < before.items()
    lost = sum(len(before[name]) for name in before.keys() - after.keys())
    assert done["bytes"] == lost == sum(done["sizes"].values())
    assert prep("verify", tmp_path / "new.json").code == 0 and prep("verify", tmp_path / "old.json").code == 7
    assert train("check", tmp_path / "new.json").code == 0
    assert not any(encode("new.json", "cache", "--mask", "none")["encoded"].values())
    assert gc(*keep, "--yes", "--json").json["removed"] == NOTHING


def test_several_manifests_are_kept_by_one_pattern(prep, encode, gc, photos, tmp_path):
    encode("a.json")
    (photos / "0.txt").write_text("another caption")
    encode("b.json")
    both = gc("--keep", tmp_path / "a.json", tmp_path / "b.json", "--json").json
    assert both["removed"] == NOTHING and both["kept"]["manifests"] == 2
    one = gc("--keep", tmp_path / "a.json", "--json").json
    assert one["removed"]["shards"] == 1
    assert gc("--keep", tmp_path / "a.json", "--keep", tmp_path / "b.json", "--json").json == both


def test_what_people_read(encode, gc, photos, tmp_path):
    encode("old.json")
    (photos / "0.txt").write_text("another caption")
    encode("new.json")
    (tmp_path / "cache" / "tmp").mkdir(exist_ok=True)
    (tmp_path / "cache" / "tmp" / "left").write_bytes(b"123")
    keep = ("--keep", tmp_path / "old.json")
    lines = gc(*keep).out.splitlines()
    assert lines[0].startswith("would remove 1 commit: ") and lines[1].startswith("would remove 1 shard: ")
    assert "would remove 1 leftover: 3 bytes" in lines
    assert lines[-1].endswith("would be freed; nothing was removed: add --yes to remove")
    assert "for 1 manifest" in lines[-2]
    guarded = gc(*keep, "--older-than", "7d").out
    assert "are kept only because they are newer than 7d" in guarded
    assert gc(*keep, "--yes").out.splitlines()[-1].endswith(" freed")
    assert gc(*keep, "--yes").out.startswith("nothing to remove\n")


def test_a_manifest_is_needed(gc, encode, tmp_path):
    encode()
    before = files_below(tmp_path)
    for options in ((), (tmp_path / "m.json",)):
        result = gc(*options, "--yes")
        assert result.code == 2
        assert result.err.startswith("error: no manifest to keep was named, expected --keep MANIFEST at least once\n"
                                     "hint: prep gc CACHE --keep MANIFEST shows")
    assert files_below(tmp_path) == before


@pytest.mark.parametrize("text", ["1", "-1h", "3 weeks", "1.5h", "h", "9999999999d", "٣d"])
def test_times_that_are_none(gc, encode, tmp_path, text):
    result = gc("--keep", tmp_path / "m.json", f"--older-than={text}")
    assert result.code == 2
    assert f"--older-than is '{text}', expected 0, or a whole number with s, m, h or d: 30m, 12h, 7d" in result.err


def test_times():
    from prep.cli.options import seconds_of

    assert [seconds_of(text, "") for text in ("0", "90s", "30m", "12h", "7d", "0h")] == [0, 90, 1800, 43200, 604800, 0]


def spoil_manifest(tmp_path):
    data = bytearray((tmp_path / "m.json").read_bytes())
    data[200] ^= 1
    (tmp_path / "m.json").write_bytes(data)
    return 4, "m.json"


def lose_manifest(tmp_path):
    (tmp_path / "m.json").unlink()
    return 4, "cannot read manifest"


def other_cache(tmp_path):
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")
    document = dict(read_manifest(tmp_path / "m.json").document)
    write_manifest(tmp_path / "m.json", {**document, "cache": "copy"})
    return 7, f"is a manifest of the cache {tmp_path}/copy, expected one of {tmp_path}/cache"


def spoil_table(name):
    def go(tmp_path):
        digest = read_manifest(tmp_path / "m.json").document["tables"][name]
        path = tmp_path / "cache" / "tables" / digest[:2] / f"{digest}.arrow"
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:-1])
        return 7, f"table {digest}"

    return go


def lose_shard(tmp_path):
    shard = next((tmp_path / "cache" / "shards").glob("*/*"))
    shutil.rmtree(shard)
    return 7, f"m.json needs shard {shard.name}, which is missing, so nothing is removed"


def truncate_shard(tmp_path):
    data = next((tmp_path / "cache" / "shards").glob("*/*/latent/c*"))
    data.chmod(0o644)
    data.write_bytes(data.read_bytes()[:-1])
    return 7, "so nothing is removed\nhint: to repair, run prep encode again as it was first run"


@pytest.mark.parametrize("spoil", [spoil_manifest, lose_manifest, other_cache, spoil_table("samples"),
                                   spoil_table("shards"), spoil_table("findings"), lose_shard, truncate_shard])
@pytest.mark.parametrize("yes", [(), ("--yes",)])
def test_nothing_goes_when_a_kept_manifest_is_not_whole(gc, tmp_path, spoil, yes):
    root = tmp_path
    write_small(root).rename(root / "m.json")
    open_cache(root / "cache", create=False).stage()
    code, said = spoil(root)
    before = files_below(root)
    result = gc("--keep", root / "m.json", *yes)
    assert result.code == code and said in result.err
    assert files_below(root) == before and (root / "cache" / "tmp").is_dir()


def test_a_cache_is_not_cleaned_while_it_is_used(gc, tmp_path):
    path = write_small(tmp_path)
    cache = open_cache(tmp_path / "cache", create=False)
    left = cache.stage()
    with lock_directory(cache.root, exclusive=False):
        result = gc("--keep", path, "--yes")
        assert result.code == 7 and left.exists()
        assert result.err.startswith(f"error: {cache.root} is in use by another process\nhint: wait")
        assert gc("--keep", path).code == 0  # looking harms nobody
    assert gc("--keep", path, "--yes").code == 0 and not left.exists()


def test_a_dead_user_of_the_cache_blocks_nobody(gc, tmp_path):
    path = write_small(tmp_path)
    program = ("import sys, time\nfrom pathlib import Path\nfrom prep.fs.lock import lock_directory\n"
               "from prep.cache.store import Cache\n"
               "with lock_directory(Cache(root=Path(sys.argv[1])).root, exclusive=False):\n"
               "    print('held', flush=True)\n    time.sleep(60)")
    with subprocess.Popen([sys.executable, "-c", program, tmp_path / "cache"], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"held\n"
        assert gc("--keep", path, "--yes").code == 7
        process.kill()
    assert gc("--keep", path, "--yes").code == 0


def test_training_keeps_its_cache(train, prep, gc, tiny_model, tmp_path, monkeypatch):
    """gc, asked for in the midst of a step, finds the cache in use; after the run it finds rubbish."""
    made = build(tmp_path, tiny_model)
    cache = open_cache(tmp_path / "cache", create=False)
    asked: list[int] = []

    def held_by_us(setup, storage, log, *rest):
        with (pytest.raises(CacheError, match="is in use by another process"),
              lock_directory(cache.root, exclusive=True)):
            pass
        asked.append(1)
        storage.folder.mkdir(exist_ok=True)
        log.rewind(0)
        log("end", 1, result="lora.safetensors")

    monkeypatch.setattr("train.loop.train", held_by_us)
    result = train("run", made.path, "-o", tmp_path / "run", "--steps", 1, "--precision", "fp32", "--device", "cpu",
                   "--quiet")
    assert result.code == 0 and asked, result.err
    assert gc("--keep", made.path, "--yes").code == 0


def test_training_looks_again_when_it_has_the_cache(train, tiny_model, tmp_path, monkeypatch):
    made = build(tmp_path, tiny_model)
    plain = lock_directory

    def cleaned_before(cache, **options):
        shutil.rmtree(next((tmp_path / "cache" / "shards").glob("*/*")))
        return plain(cache, **options)

    monkeypatch.setattr("prep.fs.lock.lock_directory", cleaned_before)
    result = train("run", made.path, "-o", tmp_path / "run", "--steps", 1, "--precision", "fp32", "--device", "cpu",
                   "--quiet")
    assert result.code == 7 and "is missing" in result.err and not (tmp_path / "run" / "run.json").exists()


def test_the_work_of_an_interrupted_encode_is_safe(prep, encode, gc, photos, tiny_model, tmp_path, monkeypatch):
    """Also with the guard off: the plan says that somebody will go on with it."""
    encode("old.json")
    for number in range(8):
        (photos / f"{number}.txt").write_text(f"a new caption {number}")
        draw(photos / f"{number}.png", (96, 96), seed=50 + number)
    from prep.encode.engines import commit

    plain = commit.write_commit
    made: list[str] = []

    def one_and_no_more(*args, **options):
        if made:
            raise KeyboardInterrupt
        made.append(args[1].key)
        return plain(*args, **options)

    monkeypatch.setattr(commit, "write_commit", one_and_no_more)
    result = prep("encode", photos, "--model", tiny_model, "--cache", tmp_path / "cache", "-o", tmp_path / "new.json",
                  *SMALL, "--mask", "none")
    assert result.code == 130 and made
    monkeypatch.undo()
    done = gc("--keep", tmp_path / "old.json", "--yes", "--json").json
    assert done["removed"]["shards"] == 0 and done["kept"]["plans"] == 1
    assert (tmp_path / "cache" / "commits" / made[0][:2] / f"{made[0]}.json").exists()
    again = encode("new.json", "cache", "--mask", "none")
    assert sum(again["encoded"].values()) <= 8  # of 16; the second task's shard is taken over where it was finished
    then = time.time() - sweep.ABANDONED - 60
    for path in (tmp_path / "cache").rglob("*"):
        os.utime(path, (then, then))
    assert gc("--keep", tmp_path / "old.json", "--json").json["removed"]["shards"] > 0


def test_gc_and_encoders_take_turns(prep, encode, photos, tmp_path):
    """An encoder waits for gc to leave, and then finds what is left."""
    encode()
    holding = threading.Event()

    def clean():
        with lock_directory(tmp_path / "cache", exclusive=True):
            holding.set()
            time.sleep(0.3)

    thread = threading.Thread(target=clean)
    thread.start()
    holding.wait()
    assert not any(encode()["encoded"].values())
    thread.join()


# ---- manifests that are not kept -------------------------------------------------------------------------------------


def test_manifests_that_would_lose_rows_are_named_first(prep, encode, gc, photos, tmp_path):
    """Those beside the kept ones, and beside the cache; copies and links of kept ones are no others."""
    encode("old.json")
    (photos / "0.txt").write_text("another caption")
    encode("new.json")
    (tmp_path / "same.json").symlink_to(tmp_path / "new.json")
    shutil.copy(tmp_path / "new.json", tmp_path / "copy.json")
    (tmp_path / "notes.json").write_text('{"mine": 1}')
    (tmp_path / "torn.json").write_bytes((tmp_path / "old.json").read_bytes()[:300])
    (tmp_path / "folder.json").mkdir()
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe.json")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "link.json").symlink_to(tmp_path / "new.json")
    for keep in (tmp_path / "new.json", tmp_path / "elsewhere" / "link.json"):
        (one,) = gc("--keep", keep, "--json").json["others"]
        assert one == {"manifest": str(tmp_path / "old.json"), "shards": 0, "tables": 2}, "the findings are the same"
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    text = "1 shard and 2 tables that it needs would be removed; --keep"
    lines = gc("--keep", old).out.splitlines()
    assert f"other manifests were searched for only in {tmp_path}; name those elsewhere with --keep" in lines
    places = gc("--keep", old, tmp_path / "elsewhere" / "link.json", "--json").json["searched"]
    assert places == [str(tmp_path), str(tmp_path / "elsewhere")]
    assert [f"{name} uses this cache and is not kept: {text} {name} keeps them"
            for name in (tmp_path / "copy.json", new)] == [line for line in lines if "is not kept" in line]
    assert gc("--keep", new, old, "--json").json["others"] == []
    assert prep("gc", tmp_path / "cache", "--keep", old, "--json").json["others"] == [], "all is young"
    done = gc("--keep", old, "--yes")
    said = f"{new} uses this cache and is not kept: 1 shard and 2 tables that it needs are removed; delete it, or run"
    assert done.code == 0 and said in done.err and said in done.out
    assert gc("--keep", old, "--json").json["others"] == [], "what it needs is gone already"


def test_others_are_named_before_anything_is_removed(encode, photos, tmp_path):
    encode("old.json")
    (photos / "0.txt").write_text("another caption")
    encode("new.json")
    before, seen = files_below(tmp_path / "cache"), []

    def notice(text):
        assert files_below(tmp_path / "cache") == before
        seen.append(text)

    collect_garbage(tmp_path / "cache", [tmp_path / "new.json"], guard=0, older_than="0", dry_run=False,
                    progress=lambda *_: nullcontext(lambda _: None), notice=notice)
    assert len(seen) == 1 and files_below(tmp_path / "cache") != before


def test_manifests_of_other_caches_are_no_others(encode, gc, photos, tmp_path):
    encode("old.json")
    shutil.copytree(tmp_path / "cache", tmp_path / "another")
    (photos / "0.txt").write_text("another caption")
    encode("other.json", "another")
    encode("old.json")
    assert gc("--keep", tmp_path / "old.json", "--json").json["others"] == []
