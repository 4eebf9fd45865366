"""The lock of a cache: users together, or one alone; gone with its holder. Both ways: flock, and Windows' bytes."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import bytelocks
import pytest

from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs import lock
from prep.fs.lock import lock_directory
from prep.fs.paths import MARKER

WAYS = [
    "flock",
    pytest.param("bytes", marks=pytest.mark.skipif(not bytelocks.POSSIBLE, reason="needs the locks of open files")),
]
HOLD = (
    "import sys, time\nfrom pathlib import Path\nfrom prep.fs import lock\nfrom prep.cache.store import Cache\n"
    "if sys.argv[2] == 'bytes':\n    import bytelocks\n    lock.try_lock, lock.LOCKED = bytelocks.way, ('lock',)\n"
    "with lock.lock_directory(Cache(root=Path(sys.argv[1])).root, exclusive=sys.argv[3] == 'alone'):\n"
    "    print('held', flush=True)\n    time.sleep(60)\n"
)


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "bytes":
        monkeypatch.setattr(lock, "try_lock", bytelocks.way)
        monkeypatch.setattr(lock, "LOCKED", ("lock",))
    return str(request.param)


def holder(cache: Cache, way: str, how: str) -> subprocess.Popen[bytes]:
    """Another process that has the lock, and keeps it for a minute."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(cache.root), way, how], stdout=subprocess.PIPE,
                               cwd=Path(__file__).parents[1] / "support")
    assert process.stdout is not None and process.stdout.readline() == b"held\n"
    return process


def refused(cache: Cache, exclusive: bool) -> CacheError:
    with pytest.raises(CacheError) as caught, lock_directory(cache.root, exclusive=exclusive):
        pass
    return caught.value


def test_users_go_together(cache: Cache, way: str) -> None:
    with (lock_directory(cache.root, exclusive=False), lock_directory(cache.root, exclusive=False),
          lock_directory(cache.root, exclusive=False)):
        pass
    with lock_directory(cache.root, exclusive=True):
        pass


def test_nobody_is_alone_beside_a_user(cache: Cache, way: str) -> None:
    with lock_directory(cache.root, exclusive=False):
        found = refused(cache, exclusive=True)
    assert found.message == f"{cache.root} is in use by another process"
    assert found.hint == "wait for it to finish, then try again"
    with lock_directory(cache.root, exclusive=True):
        pass


def test_nobody_uses_it_beside_one_alone(cache: Cache, way: str) -> None:
    with lock_directory(cache.root, exclusive=True):
        assert "is being cleaned by another process" in refused(cache, exclusive=False).message
        assert "is in use by another process" in refused(cache, exclusive=True).message
    with lock_directory(cache.root, exclusive=False):
        pass


@pytest.mark.parametrize("how", ["alone", "shared"])
def test_the_lock_is_gone_with_a_killed_process(cache: Cache, way: str, how: str) -> None:
    with holder(cache, way, how) as process:
        if how == "shared":
            with lock_directory(cache.root, exclusive=False):  # beside another process
                pass
        refused(cache, exclusive=how == "shared")
        process.kill()
    with lock_directory(cache.root, exclusive=True):
        pass


def test_whoever_is_patient_waits(cache: Cache, way: str) -> None:
    holding = threading.Event()

    def clean() -> None:
        with lock_directory(cache.root, exclusive=True):
            holding.set()
            time.sleep(0.2)

    thread = threading.Thread(target=clean)
    thread.start()
    holding.wait()
    with lock_directory(cache.root, exclusive=False, patience=20):
        thread.join()


def test_more_users_than_slots_are_told(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    if not bytelocks.POSSIBLE:
        pytest.skip("needs the locks of open files")
    monkeypatch.setattr(lock, "try_lock", bytelocks.way)
    monkeypatch.setattr(lock, "SLOTS", 2)
    with lock_directory(cache.root, exclusive=False), lock_directory(cache.root, exclusive=False):
        refused(cache, exclusive=False)


def failing(number: int) -> Any:
    def way(handle: Any, alone: bool) -> None:
        raise OSError(number, "no")

    return way


def test_a_disk_without_locks_lets_users_in_and_nobody_be_alone(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "try_lock", failing(errno.ENOLCK))
    with lock_directory(cache.root, exclusive=False):
        pass
    found = refused(cache, exclusive=True)
    assert found.message.endswith("is on a disk without locks, so other processes that use it cannot be detected")
    monkeypatch.setattr(lock, "try_lock", failing(errno.EIO))
    with pytest.raises(OSError, match="no"), lock_directory(cache.root, exclusive=False):
        pass


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.ENOSPC])
def test_a_cache_that_cannot_be_written_is_shared_all_the_same(
    cache: Cache, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    plain = Path.open

    def read_only(path: Path, mode: str = "r", *rest: Any) -> Any:
        if mode != "rb":
            raise OSError(number, "no")
        return plain(path, mode, *rest)

    monkeypatch.setattr(Path, "open", read_only)
    with lock_directory(cache.root, exclusive=False):
        assert not (cache.root / "lock").exists()
        assert "is in use by another process" in refused(cache, exclusive=True).message
    with lock_directory(cache.root, exclusive=True):  # gc on a full disk
        refused(cache, exclusive=False)


def test_nothing_can_be_removed_from_a_cache_that_cannot_be_written(
    cache: Cache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    found = refused(cache, exclusive=True)
    assert found.message == f"{cache.root} cannot be written, so nothing can be removed from it"
    with lock_directory(cache.root, exclusive=False):
        pass


@pytest.mark.parametrize("how", ["alone", "shared"])
def test_deleting_the_lock_file_lets_nobody_in(cache: Cache, how: str) -> None:
    """(Windows does not delete open files.)"""
    with holder(cache, "flock", how) as process:
        for _ in range(3):
            (cache.root / "lock").unlink()
            refused(cache, exclusive=True)
            (cache.root / "lock").touch()
        process.kill()
    with lock_directory(cache.root, exclusive=True):
        pass


@pytest.mark.parametrize("exclusive", [True, False])
def test_processes_of_earlier_versions_are_respected(cache: Cache, way: str, exclusive: bool) -> None:
    """They lock CACHE/lock alone."""
    with (cache.root / "lock").open("ab") as handle:
        release = lock.try_lock(handle, not exclusive)
        assert release is not None
        refused(cache, exclusive)
        release()
    with lock_directory(cache.root, exclusive=not exclusive), (cache.root / "lock").open("ab") as handle:
        try:
            assert lock.try_lock(handle, exclusive) is None
        except OSError as error:
            assert error.errno in lock.BUSY


def test_a_file_replaced_while_it_was_locked_is_locked_again(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = cache.root / MARKER
    plain, opened = lock._opened, []

    def replaced(path: Path, exclusive: bool) -> Any:
        handle = plain(path, exclusive)
        opened.append(path.name)
        if opened.count(MARKER) == 1:
            (marker.parent / "new").write_bytes(marker.read_bytes())
            (marker.parent / "new").replace(marker)
        return handle

    monkeypatch.setattr(lock, "_opened", replaced)
    with lock_directory(cache.root, exclusive=False):
        assert opened == [MARKER, MARKER, "lock"]
        monkeypatch.undo()
        refused(cache, exclusive=True)


def test_a_file_replaced_again_and_again_is_given_up(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "is_current", lambda *_: False)
    assert "was replaced 100 times while it was being locked" in refused(cache, exclusive=False).message
