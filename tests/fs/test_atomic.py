"""Whole files or none, and what happens where a system lacks links, directory syncs, or rights."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import threading
from pathlib import Path

import pytest

from prep.fs import atomic


def names(path: Path) -> list[str]:
    return sorted(inner.name for inner in path.iterdir())


def test_write_whole_replaces_and_leaves_nothing_beside(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    atomic.write_atomic(target, b"old")
    atomic.write_atomic(target, b"new")
    assert target.read_bytes() == b"new"
    assert names(tmp_path) == ["a.json"]


def test_write_whole_can_replace_what_it_protected(tmp_path: Path) -> None:
    target = tmp_path / "a.json"
    atomic.write_atomic(target, b"old", read_only=True)
    assert not target.stat().st_mode & 0o222
    atomic.write_atomic(target, b"new", read_only=True)
    assert target.read_bytes() == b"new"


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "a.json"
    atomic.write_atomic(target, b"old")

    def full(handle: object, data: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(atomic, "write", full)
    with pytest.raises(OSError, match="no space left"):
        atomic.write_atomic(target, b"new")
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["a.json"]


def test_a_file_whose_block_fails_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for data in (b"ab", b"cd"):
        with atomic.new_file(path, read_only=True) as handle:
            atomic.write(handle, data)
            atomic.write(handle, data)
        assert path.read_bytes() == data * 2 and not path.stat().st_mode & 0o222
    with pytest.raises(ConnectionError), atomic.new_file(path) as handle:
        atomic.write(handle, b"x")
        raise ConnectionError
    assert path.read_bytes() == b"cdcd" and names(tmp_path) == ["file"]


def test_a_directory_is_there_when_its_block_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it is synced before it has its name; one that is there stays, unless it is to be replaced."""
    path, synced = tmp_path / "above" / "made", list[str]()
    plain = atomic.sync_dir
    monkeypatch.setattr(atomic, "sync_dir", lambda place: (synced.append(place.name), plain(place)))
    with atomic.new_directory(path) as folder:
        (folder / "inner").mkdir()
        (folder / "inner" / "a").write_bytes(b"a")
        assert folder.parent == path.parent and not path.exists()
    assert synced == [tmp_path.name, "inner", folder.name, "above"] and names(path / "inner") == ["a"]
    with pytest.raises(OSError, match="not empty"), atomic.new_directory(path):
        pass
    with pytest.raises(ConnectionError), atomic.new_directory(path, replace=True) as folder:
        atomic.write_synced(folder / "b", b"b")
        raise ConnectionError
    assert names(path) == ["inner"] and names(path.parent) == ["made"]
    with atomic.new_directory(path, replace=True) as folder:
        atomic.write_synced(folder / "b", b"b")
    assert names(path) == ["b"] and names(path.parent) == ["made"]


def test_modes_follow_the_umask(tmp_path: Path) -> None:
    """A cache shared by a group stays shared: nothing is made as private as mkstemp makes it."""
    before = os.umask(0o002)
    try:
        atomic.write_atomic(tmp_path / "a", b"")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o664


def test_write_new_keeps_the_first(tmp_path: Path) -> None:
    assert atomic.create_exclusive(tmp_path / "a", b"first")
    assert not atomic.create_exclusive(tmp_path / "a", b"second")
    assert (tmp_path / "a").read_bytes() == b"first"
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("links", [True, False])
def test_write_new_has_one_winner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, links: bool) -> None:
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", lacking_links)
    won: list[bytes] = []
    start = threading.Barrier(4)

    def race(data: bytes) -> None:
        start.wait()
        if atomic.create_exclusive(tmp_path / "a", data):
            won.append(data)

    threads = [threading.Thread(target=race, args=(bytes([number]) * 100,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (tmp_path / "a").read_bytes() in won
    assert len(won) == 1 or not links
    assert names(tmp_path) == ["a"]


def lacking_links(self: Path, target: Path) -> None:
    raise OSError(errno.EPERM, "no links on this file system")


def test_write_new_without_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "hardlink_to", lacking_links)
    assert atomic.create_exclusive(tmp_path / "a", b"first")
    assert not atomic.create_exclusive(tmp_path / "a", b"second")
    assert names(tmp_path) == ["a"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL])
def test_directories_that_cannot_be_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Windows does not open directories (EACCES); some network file systems do not sync them (EINVAL)."""
    plain_open, plain_sync = os.open, os.fsync

    def open_no_directory(path: Path, flags: int, *rest: int) -> int:
        if number == errno.EACCES and Path(path).is_dir():
            raise OSError(number, "no")
        return plain_open(path, flags, *rest)

    def sync_no_directory(descriptor: int) -> None:
        if number == errno.EINVAL and stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, "no")
        plain_sync(descriptor)

    monkeypatch.setattr(os, "open", open_no_directory)
    monkeypatch.setattr(os, "fsync", sync_no_directory)
    atomic.write_atomic(tmp_path / "a", b"x")
    assert atomic.create_exclusive(tmp_path / "b", b"x")


def test_a_failing_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(descriptor: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="input/output error"):
        atomic.sync_dir(tmp_path)


@pytest.fixture(params=["by descriptor", "by path"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How trees are removed: by path where directories cannot be opened, as on Windows."""
    if request.param == "by path":
        monkeypatch.setattr(atomic, "HAS_DIR_FD", False)
    elif not atomic.HAS_DIR_FD:
        pytest.skip("needs directories that can be opened")
    return str(request.param)


def test_remove_tree_takes_read_only_files(tmp_path: Path, way: str) -> None:
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "a").write_bytes(b"x")
    atomic.protect(tmp_path / "tree" / "inner" / "a")
    (tmp_path / "tree" / "inner").chmod(0o555)
    atomic.remove_tree(tmp_path / "tree")
    atomic.remove_tree(tmp_path / "tree")
    assert names(tmp_path) == []
    (tmp_path / "a").write_bytes(b"x")
    atomic.remove_tree(tmp_path / "a")
    assert names(tmp_path) == []


def test_remove_tree_follows_no_link(tmp_path: Path, way: str) -> None:
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_bytes(b"x")
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    for link in ("tree/link", "tree/inner/link", "alone"):
        (tmp_path / link).symlink_to(tmp_path / "kept", target_is_directory=True)
    atomic.remove_tree(tmp_path / "tree")
    atomic.remove_tree(tmp_path / "alone")
    assert names(tmp_path) == ["kept"] and names(tmp_path / "kept") == ["a"]


@pytest.mark.skipif(not atomic.HAS_DIR_FD, reason="needs directories that can be opened")
@pytest.mark.parametrize("place", ["tree", "tree/inner"])
def test_a_link_put_in_the_place_of_a_directory_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Whoever may write in a shared tmp/ can put a link there after we looked, and before we open."""
    (tmp_path / "kept").mkdir()
    (tmp_path / "kept" / "a").write_bytes(b"x")
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    plain = atomic._open_dir

    def swapped(path: Path, dir_fd: int | None) -> int | None:
        if path.name == place.rpartition("/")[2]:
            (tmp_path / place).rename(tmp_path / "aside")
            (tmp_path / place).symlink_to(tmp_path / "kept", target_is_directory=True)
        return plain(path, dir_fd)

    monkeypatch.setattr(atomic, "_open_dir", swapped)
    atomic.remove_tree(tmp_path / "tree")
    assert names(tmp_path) == ["aside", "kept"] and names(tmp_path / "kept") == ["a"]


@pytest.mark.skipif(not atomic.HAS_DIR_FD, reason="needs directories that can be opened")
def test_a_directory_that_is_moved_elsewhere_ends_the_removal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way up from it leads out of the tree."""
    (tmp_path / "tree" / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "kept" / "tree").mkdir(parents=True)
    plain = atomic._level

    def moved(root: Path, name: str, descriptor: int) -> atomic._Level:
        found = plain(root, name, descriptor)
        if name == "inner":
            (tmp_path / "tree" / "outer" / "inner").rename(tmp_path / "kept" / "inner")
        return found

    monkeypatch.setattr(atomic, "_level", moved)
    with pytest.raises(OSError, match="was moved while it was being removed"):
        atomic.remove_tree(tmp_path / "tree")
    assert names(tmp_path / "kept") == ["inner", "tree"]


def test_remove_tree_of_any_depth(tmp_path: Path, way: str) -> None:
    """Deeper than Python calls functions, and than a process may have files open; by path, as long as paths may be."""
    limits = None
    if way == "by descriptor":
        import resource

        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (100, limits[1]))
    before = Path.cwd()
    (tmp_path / "tree").mkdir()
    try:
        os.chdir(tmp_path / "tree")
        for _ in range(3000 if limits else 1200):
            Path("d").mkdir()
            os.chdir("d")
        os.chdir(before)
        atomic.remove_tree(tmp_path / "tree")
    finally:
        os.chdir(before)
        if limits is not None:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert names(tmp_path) == []


def test_remove_tree_beside_another_that_removes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    (tmp_path / "tree" / "outer" / "inner").mkdir(parents=True)
    for name in "abc":
        (tmp_path / "tree" / "outer" / "inner" / name).write_bytes(b"x")
    plain = atomic.remove

    def quicker(path: Path, **options: int) -> None:
        shutil.rmtree(tmp_path / "tree", ignore_errors=True)
        plain(path, **options)

    monkeypatch.setattr(atomic, "remove", quicker)
    atomic.remove_tree(tmp_path / "tree")
    assert names(tmp_path) == []


def test_write_whole_stages_on_the_same_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A manifest on another disk than its cache: nothing is renamed from one to the other."""
    (tmp_path / "tmp").mkdir()
    plain, seen = atomic.rename, []

    def rename(source: Path, target: Path) -> None:
        seen.append(source.parent)
        if source.parent != target.parent:
            raise OSError(errno.EXDEV, "another file system")
        plain(source, target)

    monkeypatch.setattr(atomic, "rename", rename)
    atomic.write_atomic(tmp_path / "a", b"x", staging=tmp_path / "tmp")
    assert seen == [tmp_path / "tmp", tmp_path]
    assert names(tmp_path) == ["a", "tmp"] and names(tmp_path / "tmp") == []


def test_write_new_stages_on_the_same_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tmp").mkdir()
    plain = Path.hardlink_to

    def hardlink_to(self: Path, target: Path) -> None:
        if self.parent != target.parent:
            raise OSError(errno.EXDEV, "another file system")
        plain(self, target)

    monkeypatch.setattr(Path, "hardlink_to", hardlink_to)
    assert atomic.create_exclusive(tmp_path / "a", b"x", staging=tmp_path / "tmp")
    assert not atomic.create_exclusive(tmp_path / "a", b"y", staging=tmp_path / "tmp")
    assert (tmp_path / "a").read_bytes() == b"x"
    assert names(tmp_path) == ["a", "tmp"] and names(tmp_path / "tmp") == []


def test_a_directory_that_cannot_take_its_place_leaves_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                   ) -> None:
    path = tmp_path / "made"
    path.mkdir()
    (path / "old").write_bytes(b"old")
    plain = atomic.rename

    def rename(source: Path, target: Path) -> None:
        if target == path and (source / "new").exists():
            raise OSError(errno.EIO, "the disk failed")
        plain(source, target)

    monkeypatch.setattr(atomic, "rename", rename)
    with pytest.raises(OSError, match="the disk failed"), atomic.new_directory(path, replace=True) as folder:
        atomic.write_synced(folder / "new", b"new")
    assert names(path) == ["old"] and names(tmp_path) == ["made"]


def test_a_file_that_cannot_be_removed_keeps_its_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_bytes(b"shared")
    (tmp_path / "a").chmod(0o444)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "the directory is read-only")

    monkeypatch.setattr(os, "unlink", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(PermissionError):
        atomic.remove(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o444


def test_a_file_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        with pytest.raises(NotADirectoryError):
            atomic.make_dirs(path)


def test_make_dirs_makes_parents_and_is_content_with_what_is_there(tmp_path: Path) -> None:
    atomic.make_dirs(tmp_path / "a" / "b" / "c")
    atomic.make_dirs(tmp_path / "a" / "b" / "c")
    assert (tmp_path / "a" / "b" / "c").is_dir()


@pytest.mark.parametrize("kind", ["file", "directory"])
@pytest.mark.parametrize("before", [False, True])
def test_a_name_that_cannot_be_synced_is_unused_again_if_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                                                kind: str, before: bool) -> None:
    staged, target = tmp_path / "staged", tmp_path / "target"
    if kind == "directory":
        staged.mkdir()
        (staged / "inner").write_bytes(b"new")
    else:
        staged.write_bytes(b"new")
        if before:
            target.write_bytes(b"old")

    def failing(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error", str(path))

    with monkeypatch.context() as patch:
        patch.setattr(atomic, "sync_dir", failing)
        with pytest.raises(OSError, match="Input/output"):
            atomic.publish(staged, target)
        assert target.exists() is (before and kind == "file") and not staged.exists()
        if kind == "file":  # what others may rely on stays
            staged.write_bytes(b"new")
            with pytest.raises(OSError, match="Input/output"):
                atomic.publish(staged, target, undo=False)
            assert target.read_bytes() == b"new"
