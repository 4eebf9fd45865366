"""Five thousand spoiled pictures, captions, tables, tars, recipes and files of other tools: each is read, or refused.

The cases run in a process of its own: decoders are C, where a mistake ends the process. One that fails is done again
with `python tests/hostile/inputs.py DIR KIND:SEED:1`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import seeds
from inputs import KINDS
from walking import walk_tar

from prep.findings import Finding
from prep.fs.blob import blob_at
from prep.images.decode import decode_picture
from prep.images.formats.parts import BadPicture
from prep.sources.item import Item
from prep.sources.table_files import rows_of

SCRIPT = Path(__file__).parent / "inputs.py"
# How many in the ordinary suite (1 to 5 ms each, of whole scans a second), and how many with `slow`.
FEW = {"picture": 150, "caption": 150, "table": 150, "tar": 150, "recipe": 75, "other": 75, "scan": 1}
MANY = dict.fromkeys(KINDS, 5000) | {"scan": 60}
# Codes that some of five thousand must have: or else nothing of that kind is spoiled any more.
SEEN = {"picture": {"truncated", "corrupt-data", "unreadable", "not-an-image", "too-many-pixels", "bad-checksum",
                    "exif-invalid", "invalid-profile", "odd-colours", "mask-size-mismatch", "trailing-data"},
        "caption": {"caption-encoding", "caption-json", "caption-control-characters", "empty-caption"},
        "table": {"bad-table", "table-without-picture"},
        "tar": {"corrupt-data", "not-an-archive", "truncated", "path-traversal", "special-file", "duplicate-key",
                "packed-archive", "empty-file"}}  # fmt: skip


def spoiled(root: Path, jobs: list[str], timeout: float) -> dict[str, dict[str, int]]:
    """What was told in each kind of cases, all of which went well; how often each code."""
    done = subprocess.run([sys.executable, "-X", "faulthandler", SCRIPT, root / "bench", *jobs], capture_output=True,
                          text=True, errors="replace", timeout=timeout)
    seen = done.stdout.replace("\r", "\n").splitlines()
    assert done.returncode == 0, "\n".join([*seen[-60:], done.stderr[-3000:]])
    told = {}
    for kind in {job.partition(":")[0] for job in jobs}:
        (line,) = [line for line in seen if line.startswith(f"{kind}: ")]
        count, refused = (int(word) for word in line.partition(" refused")[0].split() if word.isdecimal())
        assert 0.3 * count < refused and (kind == "scan" or refused < 0.97 * count), line
        (codes,) = [line.partition(" told: ")[2] for line in seen if line.startswith(f"{kind} told: ")]
        told[kind] = json.loads(codes)
    return told


@pytest.mark.slow
def test_a_sample_of_each_kind(tmp_path):
    assert set(FEW) == set(MANY) == set(KINDS)
    spoiled(tmp_path, [f"{kind}:0:{count}" for kind, count in FEW.items()], 600)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_five_thousand(tmp_path, kind):
    told = spoiled(tmp_path, [f"{kind}:10000:{MANY[kind]}"], 3600)[kind]
    assert set(told) >= SEEN.get(kind, set())


# ---- the harness -----------------------------------------------------------------------------------------------------


def test_what_is_not_spoiled_is_sound(tmp_path):
    """Every seed is a file as its tools write it."""
    for extension, data in seeds.pictures():
        try:
            assert min(decode_picture(data, alpha="white").size) > 30, extension
        except BadPicture as error:
            assert error.detail.startswith("color mode is LAB"), (extension, error.detail)
    for name, data in seeds.tables():
        (tmp_path / name).write_bytes(data)
        assert name == "metadata.parquet" or len(list(rows_of(blob_at(tmp_path / name)))) >= 3
    for number, data in enumerate(seeds.tars()):
        path = tmp_path / f"{number}.tar"
        path.write_bytes(data)
        found = list(walk_tar(path))
        assert any(isinstance(one, Item) for one in found) or any(
            one.code in ("packed-archive", "special-file", "corrupt-data") for one in found if isinstance(one, Finding))


CRIMES = """
import sys, time
sys.path.insert(0, sys.argv[1])
import inputs
from prep.findings import Finding

kinds = iter(range(7))

def crime(bench, rng):
    kind = next(kinds)
    with bench.watch.look():
        if kind == 0:
            raise KeyError("crime")
        if kind == 1:
            (bench.root / "outside.png").read_bytes()
        if kind == 2:
            time.sleep(2)
        if kind == 3:
            bench.hoard = b"x" * (700 << 20)
        if kind == 6:
            b"x" * (1200 << 20)
        if kind == 4:
            inputs.sound([Finding(path="a", code="nonsense", severity="error", detail="x")])
        if kind == 5:
            inputs.sound([Finding(path="\\ud800", code="blank", severity="error", detail="x")])
    return True

inputs.SECONDS, inputs.GROWTH, inputs.warm = 1, 1 << 30, lambda bench: None
inputs.KINDS = {"crime": crime}
sys.exit(inputs.main(inputs.Path(sys.argv[2]), ["crime:0:7"]))
"""


@pytest.mark.slow
def test_a_case_that_goes_wrong_is_told(tmp_path):
    """A reader that breaks, looks outside, takes too long, hoards or says nonsense is found out."""
    done = subprocess.run([sys.executable, "-c", CRIMES, SCRIPT.parent, tmp_path / "bench"], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    for says in ("KeyError: 'crime'", "AssertionError: opened or run: [\"open ", "TooLong", "code='nonsense'",
                 "UnicodeEncodeError"):
        assert says in done.stdout, says
    assert " failed: memory grew by " in done.stdout
    if sys.platform == "linux":
        assert "crime failed: 7" in done.stdout and " MB are left behind" in done.stdout
