"""What an ordinary user meets in a cache that is somebody else's: what cannot be read, and what cannot be written.

As root these tests would prove nothing: they become another user where they can, in a process of their own.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pictures import draw, draw_mask

pytestmark = [pytest.mark.skipif(os.name == "nt", reason="rights are others there"), pytest.mark.slow]
NOBODY = 65534
SMALL = ("--resolution", "96", "--step", "16", "--dtype", "float32", "--device", "cpu", "--mask", "sidecar")
TRAIN = ("--steps", "1", "--device", "cpu", "--quiet", "--set", "sample.every=0", "--set", "validation.every=0")
CASES = ("sound", "flipped", "unreadable", "closed", "no table")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[100] ^= 1
    path.chmod(0o644)
    path.write_bytes(data)


def latents(home: Path) -> list[Path]:
    return sorted(home.glob("cache/shards/*/*/latent/c.*"))


def spoil(home: Path, case: str) -> None:
    """What is special about a case; then nothing below its cache can be written by anybody."""
    if case == "flipped":
        for path in latents(home):
            flip(path)
    if case == "unreadable":
        latents(home)[0].chmod(0)
    if case == "no table":
        for path in home.glob("cache/tables/*/*"):
            path.unlink()
    for path in [*home.rglob("cache/**/*"), home / "cache"]:
        if path.is_dir():
            path.chmod(0o555)
    if case == "closed":
        latents(home)[0].parents[1].chmod(0)


@pytest.fixture(scope="module")
def ended(tiny_model: Path) -> Iterator[dict[str, list[tuple[int, str, str]]]]:
    """How the commands of each case ended, run by an ordinary user."""
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch)
        root.chmod(0o755)
        shutil.copytree(tiny_model, root / "model")
        for path in (root / "model").rglob("*"):
            path.chmod(0o755 if path.is_dir() else 0o644)
        for number in range(4):
            draw(root / "photos" / f"{number}.png", (96, 96), seed=number).with_suffix(".txt").write_text(f"{number}")
            draw_mask(root / "photos" / f"{number}-masklabel.png", (96, 96))
        (root / "runs").mkdir()
        (root / "runs").chmod(0o777)
        yield run_all(root)
        for path in root.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)


def run_all(root: Path) -> dict[str, list[tuple[int, str, str]]]:
    def commands(home: Path, run: str) -> list[list[str]]:
        manifest = str(home / "m.json")
        return [["prep", "verify", manifest, "--json"], ["prep", "verify", manifest, "--quick"],
                ["prep", "inspect", manifest], ["train", "check", manifest],
                ["train", "run", manifest, "-o", str(root / "runs" / run), *TRAIN]]

    def encode(home: Path) -> list[str]:
        return ["prep", "encode", str(root / "photos"), "--model", str(root / "model"), "--cache", str(home / "cache"),
                "-o", str(home / "m.json"), *SMALL]

    whole = root / "whole"
    whole.mkdir()
    user = NOBODY if os.getuid() == 0 else 0
    with subprocess.Popen([sys.executable, Path(__file__).parents[1] / "support" / "as_ordinary_user.py", str(user)],
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps([encode(whole), *commands(whole, "warm")]), file=process.stdin, flush=True)
        assert process.stdout.readline() == "ready\n"
        for case in CASES:
            shutil.copytree(whole, root / case)
            spoil(root / case, case)
            (root / case).chmod(0o777)
        cases = {case: [*commands(root / case, case), encode(root / case)] for case in CASES}
        print(json.dumps(cases), file=process.stdin, flush=True)
        return json.loads(process.stdout.readline())


VERIFY, QUICK, INSPECT, CHECK, TRAINED, ENCODE = range(6)


def codes(results):
    return [code for code, _, _ in results]


def test_everything_works_in_a_cache_that_cannot_be_written(ended):
    """Also encode, where there is nothing to encode."""
    assert codes(ended["sound"]) == [0] * 6, ended["sound"]


def test_damage_is_told_where_it_cannot_be_remembered(ended):
    assert codes(ended["flipped"]) == [7, 0, 0, 0, 7, 0], ended["flipped"]
    document = json.loads(ended["flipped"][VERIFY][1])
    assert [one["row"] for one in document["damaged"]] == [0] and document["repair"] == {"latent": 1}
    assert "row 0: is damaged" in ended["flipped"][TRAINED][2] and "(needed for '" in ended["flipped"][TRAINED][2]
    assert len(document["unrecorded"]) == 1 and " --recheck --cache " in ended["flipped"][TRAINED][2]


def test_a_file_that_cannot_be_read_is_no_damage_that_encode_mends(ended):
    for case in ("unreadable", "closed"):
        results = ended[case]
        assert codes(results)[:5] == [7, 7, 0, 7, 7], results
        document = json.loads(results[VERIFY][1])
        assert document["repair"] == {} and "Permission denied" in document["damaged"][0]["what"]
        assert document["notes"] == ["unreadable files may be intact: check permissions and the disk, then verify "
                                     "again"]
        assert "no rows will be re-encoded" in results[QUICK][1]
        assert "Permission denied" in results[CHECK][2]
    assert " latent rows) cannot be read: Permission denied" in ended["closed"][CHECK][2]
    assert "hint: check permissions and the disk" in ended["closed"][CHECK][2]


def test_a_table_that_is_missing_where_it_cannot_be_written(ended):
    assert codes(ended["no table"]) == [7, 7, 7, 7, 7, 7], ended["no table"]
    assert "Permission denied" in ended["no table"][ENCODE][2]


def test_every_error_is_one(ended):
    for case, results in ended.items():
        for code, _, err in results:
            assert err.count("error: ") == (code != 0 and "error" in err), (case, err)
            assert "Traceback" not in err, (case, err)
