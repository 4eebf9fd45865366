"""A Ray cluster that a command starts: nobody else reaches it, and its workers find no modules in the directory where
the command runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import ENVIRONMENT, FORKS, PATIENCE
from traps import trap

pytest.importorskip("ray")
pytestmark = [FORKS, pytest.mark.slow]

# What a cluster listens on, who can read its files, and what its workers find, as JSON.
PROGRAM = """
import json, os, stat, sys
from pathlib import Path
from prep.workers.ray import connected, library

def family(pid):
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(one for child in children for one in family(int(child)))]

def sockets(pid):
    for one in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield os.readlink(one)
        except OSError:
            pass

def listening():
    ours = {name for pid in family(os.getpid()) for name in sockets(pid)}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in ours:
                yield words[1].split(":")[0]

ray = library("")
with connected(ray, ""):
    def look():
        return sys.path, os.environ["RAY_AUTH_MODE"], os.environ["PYTHONSAFEPATH"]
    found = ray.get(ray.remote(look).remote())
    token = Path(os.environ["RAY_AUTH_TOKEN_PATH"])
    print(json.dumps({"path": found[0], "mode": found[1], "safe": found[2], "listening": sorted(set(listening())),
                      "token": oct(stat.S_IMODE(token.stat().st_mode)), "length": len(token.read_text()),
                      "folder": oct(stat.S_IMODE(token.parent.stat().st_mode)),
                      "session": [str(path) for path in token.parent.rglob("sockets")]}))
print(json.dumps({"left": token.parent.exists(), "named": "RAY_AUTH_TOKEN_PATH" in os.environ}))
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


def test_nobody_else_reaches_it(tmp_path):
    (tmp_path / "home").mkdir()
    caught = trap(tmp_path)
    done = subprocess.run([sys.executable, "-P", "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True,
                          check=False, timeout=PATIENCE, env={**ENVIRONMENT, "HOME": str(tmp_path / "home")})
    assert done.returncode == 0, done.stderr
    found, left = map(json.loads, done.stdout.splitlines())
    assert found["listening"] and set(found["listening"]) <= LOOPBACK
    assert (found["token"], found["length"], found["folder"]) == ("0o600", 64, "0o700")
    assert len(found["session"]) == 1, "inside of that directory"
    assert str(tmp_path) not in found["path"] and (found["mode"], found["safe"]) == ("token", "1")
    assert left == {"left": False, "named": False} and not any((tmp_path / "home").rglob("*token*"))
    assert not caught.exists()


def test_encode_where_the_data_have_modules(setting, tmp_path):
    """Not even with `train` or `prep` among them."""
    photos, model = setting
    caught = trap(tmp_path)
    done = subprocess.run([Path(sys.executable).parent / "prep", "encode", photos, "--model", model, "--resolution",
                           "96", "--step", "16", "--compute", "float32", "--cache", "cache", "-o", "manifest.json",
                           "--engine", "ray", "--json"], cwd=tmp_path, capture_output=True, text=True, check=False,
                          timeout=PATIENCE, env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert sum(json.loads(done.stdout)["encoded"].values()) > 0 and not caught.exists()
