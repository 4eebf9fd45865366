"""Where things lie, what a cache is, and how objects are put in place."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from prep.cache import damage, publish, store
from prep.cache.ledger.ledger import write_commit
from prep.cache.plans import write_plan
from prep.cache.records import Shard, Task
from prep.cache.store import Cache, open_cache
from prep.digest import canonical, digest_bytes, with_checksum
from prep.errors import CacheError, PathError
from prep.fs import atomic
from prep.fs.lock import lock_directory
from prep.fs.paths import MARKER

A = "ab" * 32


def test_a_new_cache_can_be_opened_again(tmp_path: Path) -> None:
    made = open_cache(tmp_path / "deep" / "cache", create=True)
    assert open_cache(tmp_path / "deep" / "cache", create=False) == made
    assert open_cache(tmp_path / "deep" / "cache", create=True) == made


def test_an_empty_directory_becomes_a_cache_also_after_a_crash(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp" / ".0123.partial").write_bytes(b"half")
    (tmp_path / ".DS_Store").touch()
    open_cache(tmp_path, create=True)


def test_two_at_once_make_one_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was quicker has emptied tmp/ while the other staged its marker there: nobody holds the lock yet."""
    plain = atomic.link

    def late(source: Path, target: Path) -> None:
        monkeypatch.setattr(atomic, "link", plain)
        publish.clear_leftovers(open_cache(tmp_path, create=True))
        plain(source, target)

    monkeypatch.setattr(atomic, "link", late)
    open_cache(tmp_path, create=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["latentry.json"]


def test_a_directory_that_was_there_is_synced_when_it_becomes_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run may have been killed after it had made the directory, and before that was on the disk."""
    (tmp_path / "cache").mkdir()
    plain, synced = atomic.sync_dir, []
    monkeypatch.setattr(atomic, "sync_dir", lambda path: (synced.append(path), plain(path)))
    open_cache(tmp_path / "cache", create=True)
    assert tmp_path in synced


def test_rubbish_that_cannot_be_removed_stays(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache.staging() / "another's").write_bytes(b"x")

    def refuse(path: Path, **options: int) -> None:
        raise PermissionError(errno.EPERM, "not yours")

    monkeypatch.setattr(atomic, "remove", refuse)
    publish.clear_leftovers(cache)
    assert (cache.root / "tmp" / "another's").exists()


def test_pictures_are_never_made_a_cache(tmp_path: Path) -> None:
    (tmp_path / "cat.png").write_bytes(b"x")
    with pytest.raises(PathError, match=r"is not empty and not a cache: it has no latentry.json") as caught:
        open_cache(tmp_path, create=True)
    assert caught.value.hint == "name a new or empty directory with --cache"


@pytest.mark.parametrize("inner", ["inner", "tmp/inner", "shards/00/inner", "link/inner", "../linked/inner"])
def test_no_cache_is_made_in_another(cache: Cache, tmp_path: Path, inner: str) -> None:
    """One that is there already is opened: it was made by an earlier version."""
    (tmp_path / "linked").symlink_to(cache.root, target_is_directory=True)
    (cache.root / "link").symlink_to(cache.root / "tables", target_is_directory=True)
    with pytest.raises(PathError, match="would be a cache in another cache") as caught:
        open_cache(cache.root / inner, create=True)
    assert caught.value.message.endswith(f", {cache.root}") and caught.value.hint == "name a place outside that one"
    assert not (cache.root / inner).exists()
    place = cache.root / "earlier"
    place.mkdir()
    (place / MARKER).write_bytes(store.new_marker())
    assert open_cache(place, create=True).root == place


def test_no_cache(tmp_path: Path) -> None:
    with pytest.raises(CacheError, match=r"there is no cache in .*: it has no latentry.json") as caught:
        open_cache(tmp_path, create=False)
    assert caught.value.hint == "prep encode SOURCE --cache DIR creates one"


def test_a_file_is_no_cache(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    with pytest.raises(PathError, match="is a file, expected a cache directory"):
        open_cache(tmp_path / "a", create=True)


def test_another_version(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_bytes(canonical(with_checksum({"format": "latentry/cache", "version": 2})))
    with pytest.raises(CacheError, match=r"is 'latentry/cache' version 2, expected 'latentry/cache' version 1"):
        open_cache(tmp_path, create=True)


def test_a_torn_marker(tmp_path: Path) -> None:
    (tmp_path / MARKER).write_bytes(b'{"format":')
    with pytest.raises(CacheError, match=r"cannot be read: .* is not JSON"):
        open_cache(tmp_path, create=True)


def test_places() -> None:
    cache = Cache(root=Path("C"))
    assert cache.shard(A) == Path("C/shards/ab") / A
    assert cache.table(A) == Path("C/tables/ab") / f"{A}.arrow"
    assert cache.commit(A) == Path("C/commits/ab") / f"{A}.json"
    assert cache.plan(A) == Path("C/plans") / f"{A}.arrow"
    assert cache.damaged(A) == Path("C/damaged") / f"{A}.json"


@pytest.mark.parametrize("name", ["", "..", "/etc/passwd", "AB" * 32, "ab" * 31, "ab" * 33, "ab" * 31 + "/x", 5, None])
def test_only_digests_become_paths(name: object) -> None:
    cache = Cache(root=Path("C"))
    for place in (cache.shard, cache.table, cache.commit, cache.plan, cache.damaged):
        with pytest.raises(CacheError, match="expected 64 lower-case hex digits"):
            place(name)  # type: ignore[arg-type]


def test_names_pass_over_what_is_not_ours(cache: Cache) -> None:
    (cache.root / "commits" / "ab").mkdir(parents=True)
    for name in (f"{A}.json", "notes.json", f"{A}.txt", f".{A}.json.12.partial"):
        (cache.root / "commits" / "ab" / name).write_bytes(b"")
    assert list(cache.names("commits")) == [A]
    assert list(cache.names("plans")) == []


def test_publishing_a_table_twice_and_over_a_damaged_one(cache: Cache) -> None:
    digest = publish.publish_table(cache, lambda: [b"rows"])
    assert digest == digest_bytes(b"rows")
    assert publish.publish_table(cache, lambda: [b"rows"]) == digest
    cache.table(digest).chmod(0o644)
    cache.table(digest).write_bytes(b"rots")
    publish.publish_table(cache, lambda: [b"rows"])
    assert cache.table(digest).read_bytes() == b"rows"
    assert not cache.table(digest).stat().st_mode & 0o222


def test_retire_takes_the_damage_record_along(cache: Cache, shard: object) -> None:
    (digest,) = cache.shards()
    atomic.make_dirs(cache.damaged(digest).parent)
    cache.damaged(digest).write_bytes(b"")
    publish.retire_shard(cache, digest)
    publish.retire_shard(cache, digest)
    assert list(cache.shards()) == []
    assert not cache.damaged(digest).exists()
    assert list((cache.root / "tmp").iterdir()) == []


def test_clear_leftovers(cache: Cache) -> None:
    (cache.stage() / "a").write_bytes(b"")
    publish.clear_leftovers(cache)
    assert not (cache.root / "tmp").exists()


def test_settling_syncs_every_directory_that_changed_lately(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    for kind, fan in (("shards", "ab"), ("shards", "cd"), ("commits", "ab")):
        (cache.root / kind / fan).mkdir(parents=True)
    (cache.root / "commits" / "note").touch()
    os.utime(cache.root / "shards" / "cd", (0, 0))
    synced: list[str] = []
    monkeypatch.setattr(atomic, "sync_dir", lambda path: synced.append(path.relative_to(cache.root).as_posix()))
    publish.sync_recent_directories(cache)
    assert synced == [".", "shards", "commits", "shards/ab", "commits/ab"]


# ---- shared by several users -----------------------------------------------------------------------------------------

POSIX = pytest.mark.skipif(os.name != "posix", reason="permissions as POSIX has them")


@POSIX
@pytest.mark.parametrize(("shared", "of_dirs", "of_files"), [(0o777, 0o777, 0o666), (0o2770, 0o2770, 0o660),
                                                             (0o700, 0o700, 0o600), (0o755, 0o755, 0o644)])
def test_what_is_in_a_cache_has_the_permissions_of_the_cache(
    tmp_path: Path, draw: Any, put: Any, latent: Any, shared: int, of_dirs: int, of_files: int
) -> None:
    """Whatever umask a user has: a directory that others cannot list ends their runs."""
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache").chmod(shared)
    before = os.umask(0o077)
    try:
        cache = open_cache(tmp_path / "cache", create=True)
        made = put(cache, "latent", [latent], draw([latent], 3))
        task = Task(key=A, field="latent", rows=("cd" * 32,))
        write_commit(cache, task, made, [], {})
        write_plan(cache, A, [task])
        publish.publish_table(cache, lambda: [b"table"])
        damage.record(cache, [damage.Damage(shard=A, field=None, array=None, row=None, what="gone")])
        with lock_directory(cache.root, exclusive=False):
            pass
    finally:
        os.umask(before)
    found = [path for path in cache.root.rglob("*") if path != cache.root / "tmp"]
    modes = {path.relative_to(cache.root).as_posix(): path.stat().st_mode & 0o7777 for path in found}
    assert {mode for name, mode in modes.items() if (cache.root / name).is_dir()} == {of_dirs}
    assert {mode for name, mode in modes.items() if (cache.root / name).is_file()} == {of_files, of_files & 0o444}
    assert {"latentry.json", "lock", "damaged/lock", f"plans/{A}.arrow"} <= set(modes)


def test_directories_of_others_are_skipped(cache: Cache, shard: Shard, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of another user with a umask of 077 and an earlier version; a test as root could list them."""
    plain, scandir = os.access, os.scandir
    hidden = cache.shard(shard.digest).parent

    def refuse(path: Any) -> Any:
        if path == hidden:
            raise PermissionError(errno.EACCES, "no", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != hidden and plain(path, mode))
    monkeypatch.setattr(os, "scandir", refuse)
    assert list(cache.shards()) == [] and cache.closed("shards") == [hidden]
    assert cache.closed("commits") == []
