"""Ten thousand attacks on each kind of record, sealed again as the attacker would: an answer, or a clean error.

The attacks run in a process of their own, which may not grow: Arrow is C++, where a mistake ends the process. One that
fails is done again with `python tests/hostile/fuzz.py DIR KIND:SEED:1`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from fuzz import KINDS

SCRIPT = Path(__file__).parent / "fuzz.py"
SILENT = {"damage", "plan"}  # read as what is known of a cache, or as nothing: nothing is refused
# How many in the ordinary suite (about 2 to 40 ms each), and how many with `slow`.
FEW = {"manifest": 75, "manifest_bytes": 8, "table_values": 40, "table_bytes": 40, "shard": 6, "marker": 15,
       "commit": 50, "damage": 6, "plan": 50, "links": 10}
MANY = dict.fromkeys(KINDS, 10_000) | {"manifest_bytes": 2000, "shard": 4000, "marker": 2000, "damage": 3000,
                                        "links": 3000}


def attacked(root: Path, jobs: list[str], timeout: float) -> None:
    done = subprocess.run([sys.executable, "-X", "faulthandler", SCRIPT, root / "victim", *jobs], capture_output=True,
                          text=True, errors="replace", timeout=timeout)
    seen = done.stdout.replace("\r", "\n").splitlines()
    assert done.returncode == 0, "\n".join([*seen[-30:], done.stderr[-3000:]])
    for kind in {job.partition(":")[0] for job in jobs if ":" in job} - SILENT:
        (told,) = [line for line in seen if line.startswith(f"{kind}: ")]
        assert not told.endswith(" 0 refused"), told


def test_some_attacks_of_each_kind(tmp_path):
    assert set(FEW) == set(MANY) == set(KINDS)
    attacked(tmp_path, [f"{kind}:0:{count}" for kind, count in FEW.items()], 900)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_attacks(tmp_path, kind):
    attacked(tmp_path, [f"{kind}:1000:{MANY[kind]}"], 7200)


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_attacks_on_an_ordinary_user_who_cannot_write(tmp_path):
    """As root, rights prove nothing. Damage that is found cannot be recorded, locks cannot be made."""
    with tempfile.TemporaryDirectory() as scratch:  # pytest's own are closed to others
        root = Path(scratch)
        root.chmod(0o755)
        jobs = [f"{kind}:0:6" for kind in ("manifest", "table_values", "table_bytes", "damage", "links")]
        attacked(root, [*jobs, "--as", "65534"], 900)


CRIMES = """
import subprocess, sys
sys.path.insert(0, sys.argv[1])
import fuzz

root = fuzz.Path(sys.argv[2])
target = fuzz.victim(root)
watch = fuzz.Watch(root)
seed = 0
def caught(crime):
    global seed
    seed += 1
    fuzz.look_at = lambda *_, **__: [crime()][:0]
    try:
        fuzz.attack(target, watch, "marker", seed)
    except Exception as error:
        watch.seen.clear()
        return f"{type(error).__name__} {error}"

print(caught(lambda: {}["crime"]))
print(caught(lambda: open("/etc/passwd").close()))
print(caught(lambda: subprocess.run(["true"])))
print(caught(lambda: eval("1 + 1")))
print(caught(lambda: (root / "made").mkdir()))
(root / "cache" / "link").symlink_to("/etc/passwd")
print(caught(lambda: (root / "cache" / "link").read_bytes()))
(root / "cache" / "link").unlink()
fuzz.SECONDS = 1
print(caught(lambda: list))
hoard = []
looks = []
def look_at(*_, **__):
    looks.append(1)
    if len(looks) > 25:
        hoard.append(b"x" * (300 << 20))
    return []
fuzz.look_at = look_at
fuzz.main(root / "other", ["marker:0:40"])
"""


@pytest.mark.slow
def test_an_attack_that_succeeds_is_told(tmp_path):
    """The harness itself: a reader that believes, opens, runs or hoards is found out, and an honest one is not."""
    done = subprocess.run([sys.executable, "-c", CRIMES, SCRIPT.parent, tmp_path / "victim"], capture_output=True,
                          text=True, timeout=300)
    assert done.returncode == 1, done.stderr[-2000:]
    found = "AssertionError opened or run: "
    wanted = ["KeyError 'crime'", f"{found}[\"open '/etc/passwd'", found, f"{found}[\"compile", "None", found, "None"]
    for line, begins in zip(done.stdout.splitlines(), wanted, strict=False):
        assert line.startswith(begins), (line, begins)
    # Which of the two limits a hoarder meets first depends on how much address space the libraries took.
    assert ": memory grew by " in done.stdout or "MemoryError" in done.stdout
