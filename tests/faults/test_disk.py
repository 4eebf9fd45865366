"""A disk that is full, fails, or may not be written any more: one clear error, and what is finished stays."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest
from account import account, state
from harness import FORKS, words_of

pytestmark = FORKS
NOBODY = 65534
GROWING = ("create", "write", "link", "make_dir")


def refused(there, ending, words, code=7):
    """The run ended with one error and one hint, and left nothing half there."""
    assert ending["codes"] == [code], ending["err"]
    told = re.fullmatch(r"error: (.*)\nhint: (.*)\n", ending["err"])
    assert told and words in told[1] and str(there.home) in told[1], ending["err"]
    assert "finished work is kept" in told[2] or code != 7
    return account(there.home)


@pytest.mark.parametrize("some", [2, pytest.param(60, marks=pytest.mark.slow)])
def test_a_full_disk(stage, tmp_path, some):
    """With room for so many bytes, the whole range over."""
    stage.run(stage.encode())
    wanted, size = state(stage.home), sum(path.stat().st_size for path in stage.home.rglob("*") if path.is_file())
    finished = []
    for number in range(some):
        there = stage.at(tmp_path / str(number))
        ending = there.run(there.encode(), quota=round(number * size / some * 0.9))
        finished.append(len(refused(there, ending, "No space left on device").commits))
        done = there.recover(wanted)
        assert sum(done["encoded"].values()) + sum(done["reused"].values()) == 11
        assert bool(sum(done["reused"].values())) == bool(finished[-1]), "what is finished is kept"
        shutil.rmtree(there.home)
    assert finished == sorted(finished) and finished[-1] > 2


@pytest.mark.parametrize(("name", "words"), [
    ("EDQUOT", "uota exceeded"), ("EIO", "Input/output error"),
    pytest.param("EROFS", "Read-only file system", marks=pytest.mark.slow),
    pytest.param("EACCES", "Permission denied", marks=pytest.mark.slow),
])
@pytest.mark.parametrize("some", [1, pytest.param(40, marks=pytest.mark.slow)])
def test_a_disk_that_fails_from_some_moment_on(stage, tmp_path, name, words, some):
    points = stage.points(stage.encode())
    wanted = state(stage.home)
    numbers = [number for number, (call, path) in enumerate(points)
               if path.startswith("cache/") and (call in GROWING or name != "EDQUOT")]
    for point in numbers[len(numbers) // (2 * some) :: max(1, len(numbers) // some)]:
        there = stage.at(tmp_path / str(point))
        ending = there.run(there.encode(), fail=point, errno=name)
        # Before it is a cache it is a path like any other, as is the manifest's.
        inside = (there.cache / "latentry.json").exists() and str(there.cache) in ending["err"]
        refused(there, ending, words, code=7 if inside or name == "EDQUOT" else 5)
        there.recover(wanted)
        shutil.rmtree(there.home)


@pytest.fixture
def small_disk(tmp_path):
    """`small_disk(kib)`: a mounted file system of so many KiB; called again, it is resized."""
    disk = tmp_path / "disk"

    def mount(kib):
        there = disk.exists()
        disk.mkdir(exist_ok=True)
        options = f"size={kib}k,{'remount' if there else 'nr_inodes=4096'}"
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
        tried = subprocess.run(command, capture_output=True, text=True)
        if tried.returncode:
            pytest.skip(f"no file system can be mounted here: {tried.stderr.strip()}")
        return disk

    if not shutil.which("mount"):
        pytest.skip("no mount here")
    yield mount
    subprocess.run(["umount", str(disk)], capture_output=True)


@pytest.mark.parametrize("kib", [140, *(pytest.param(size, marks=pytest.mark.slow) for size in range(4, 300, 12))])
def test_a_small_disk_of_its_own(stage, small_disk, kib):
    """A real one: SQLite's file, the lock and the look-up table are on it, too."""
    stage.run(stage.encode())
    wanted = state(stage.home)
    there = stage.at(small_disk(kib))
    ending = there.run(there.encode())
    if kib < 200 or ending["codes"] != [0]:
        refused(there, ending, "No space left on device")
    small_disk(4096)
    there.recover(wanted)


@pytest.fixture
def open_stage(stage):
    """The same where any user may look; a process of `nobody` writes below its home."""
    root = Path(tempfile.mkdtemp())
    try:
        root.chmod(0o755)
        for place in (stage.pictures, stage.model):
            shutil.copytree(place, root / place.name, copy_function=shutil.copyfile)
        (root / "home").mkdir()
        there = type(stage)(launch=stage.launch, pictures=root / stage.pictures.name, model=root / stage.model.name,
                            home=root / "home")
        if os.getuid() == 0:
            os.chown(root / "home", NOBODY, NOBODY)
        yield there
    finally:
        subprocess.run(["chmod", "-R", "u+w", str(root)], check=True)
        shutil.rmtree(root)


USER = NOBODY if hasattr(os, "getuid") and os.getuid() == 0 else None


@pytest.mark.parametrize("share", [0.2, *(pytest.param(share, marks=pytest.mark.slow) for share in (0.5, 0.9))])
def test_permission_lost_midway(open_stage, share):
    there, whole = open_stage, open_stage.at(open_stage.home.parent / "whole")
    count = len(whole.points(whole.encode()))
    refused(there, there.run(there.encode(), deny=round(share * count), user=USER), "Permission denied")
    subprocess.run(["chmod", "-R", "u+w", str(there.home)], check=True)
    ending = there.run(there.encode(), there.verify(), user=USER)
    assert ending["codes"] == [0, 0], words_of(ending)
    assert state(there.home) == state(whole.home) and account(there.home).staging == []


def test_a_cache_that_may_only_be_read(open_stage):
    """Where all is there, a manifest can still be written elsewhere; where not, that is one error."""
    there = open_stage
    assert there.run(there.encode(), user=USER)["codes"] == [0]
    subprocess.run(["chmod", "-R", "a-w", str(there.cache)], check=True)
    wanted = there.manifest.read_bytes()
    there.manifest.unlink()
    ending = there.run(there.encode(), there.verify(), user=USER)
    assert ending["codes"] == [0, 0], words_of(ending)
    assert there.manifest.read_bytes() == wanted
    refused(there, there.run(there.encode("--resolution", 64), user=USER), "Permission denied")
    assert there.manifest.read_bytes() == wanted
