"""The lock of a cache: writers together, or one alone; gone with its holder."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from prep.cache.lock import hold
from prep.cache.store import Cache
from prep.errors import CacheError


def test_writers_go_together(cache: Cache) -> None:
    with hold(cache, alone=False), hold(cache, alone=False):
        pass


def test_nobody_is_alone_beside_a_writer(cache: Cache) -> None:
    with (
        hold(cache, alone=False),
        pytest.raises(CacheError, match="is used by another program, expected to have it") as caught,
        hold(cache, alone=True),
    ):
        pass
    assert caught.value.hint == "wait for it to end, and try again"
    with hold(cache, alone=True):
        pass


def test_nobody_writes_beside_one_alone(cache: Cache) -> None:
    with (
        hold(cache, alone=True),
        pytest.raises(CacheError, match="is being cleaned by another program"),
        hold(cache, alone=False),
    ):
        pass


def test_the_lock_is_gone_with_a_killed_process(cache: Cache) -> None:
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom prep.cache.lock import hold\n"
        "from prep.cache.store import Cache\n"
        "with hold(Cache(root=Path(sys.argv[1])), alone=True):\n    print('held', flush=True)\n    time.sleep(60)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(cache.root)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        with pytest.raises(CacheError, match="is being cleaned"), hold(cache, alone=False):
            pass
        process.kill()
    with hold(cache, alone=True):
        pass


def test_windows_has_no_such_lock(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    with hold(cache, alone=False):
        pass
    with pytest.raises(CacheError, match="this system has no lock"), hold(cache, alone=True):
        pass


def test_whoever_is_patient_waits(cache: Cache) -> None:
    holding = threading.Event()

    def clean() -> None:
        with hold(cache, alone=True):
            holding.set()
            time.sleep(0.2)

    thread = threading.Thread(target=clean)
    thread.start()
    holding.wait()
    with hold(cache, alone=False, patience=20):
        thread.join()
