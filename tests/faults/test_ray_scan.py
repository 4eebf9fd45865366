"""Actors, nodes and drivers of a scan on a Ray cluster killed while pictures are examined: the report is that of a scan
without a cluster, and a scan that was killed goes on where it was.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from harness import ENVIRONMENT, FORKS, PATIENCE, ended
from pictures import draw

pytest.importorskip("ray")
pytestmark = FORKS

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
PICTURES = 40
DRIVER = """
from prep.fs import memo
from prep.scan import crew
from ray_faults import FaultyScanner
memo.REST_NS, memo.FLUSH, crew.ScanWorker = -10**12, 1, FaultyScanner
from prep.cli.main import main
main()
"""
FOUND = 1  # the code after errors in pictures
CALLS = 18  # of workers: 16 pictures come singly
POINTS = [(fault, at) for fault in ("actor", "node", "driver") for at in range(1, CALLS + 1, 2)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Pictures, one of them a copy, one almost, and one damaged."""
    root = tmp_path_factory.mktemp("scanned") / "photos"
    for number in range(PICTURES - 3):
        draw(root / f"{number}.png", (64, 48 + number), seed=number).with_suffix(".txt").write_text(f"words {number}")
    shutil.copy(root / "3.png", root / "copy.png")
    draw(root / "near.png", (66, 54), seed=4)
    (root / "cut.png").write_bytes((root / "9.png").read_bytes()[:-200])
    return root


def scan(photos, home, *options, program=("-m", "prep"), env=None):
    """The command, in a process of its own."""
    words = [sys.executable, "-W", "error", *program, "scan", str(photos), "--json", *map(str, options)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
                            cwd=home, env={**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{SUPPORT}",
                                           "LATENTRY_USER_CACHE": str(home / "user"), **(env or {})})


def driver(photos, home, cluster, fault="none", at=0):
    (home / "fault.json").write_text(json.dumps({"kind": fault, "at": at}))
    for name in ("calls", "reached", "seen"):
        (home / name).unlink(missing_ok=True)
    return scan(photos, home, "--engine", "ray", "--address", cluster.address, "--workers", 2,
                program=("-c", DRIVER), env={"FAULTS": str(home)})


@pytest.fixture(scope="module")
def wanted(photos, tmp_path_factory):
    out, _ = ended(scan(photos, tmp_path_factory.mktemp("local")), FOUND)
    found = json.loads(out)
    assert found["pictures"] == PICTURES and len({one["code"] for one in found["findings"]}) > 3
    return out


def until_reached(home, process):
    """The node where a worker has come to its point."""
    patience = time.monotonic() + PATIENCE
    while not (home / "reached").exists():
        assert time.monotonic() < patience and process.poll() is None, process.communicate()
        time.sleep(0.02)
    return (home / "reached").read_text()


@pytest.fixture
def home(cluster):
    """Where workers look for what is to go wrong: the environment of nodes is that of this process at their start."""
    place = Path(os.environ["FAULTS"])
    for one in place.iterdir():
        one.unlink() if one.is_file() else shutil.rmtree(one)
    return place


@pytest.fixture(scope="module", autouse=True)
def faults(tmp_path_factory):
    before = os.environ.get("FAULTS")
    os.environ["FAULTS"] = str(tmp_path_factory.mktemp("faults"))
    yield
    os.environ.pop("FAULTS") if before is None else os.environ.update(FAULTS=before)


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "at"), POINTS)
def test_a_kill(photos, wanted, home, cluster, fault, at):
    process = driver(photos, home, cluster, fault, at)
    node = until_reached(home, process)
    if fault == "node":
        lost = next(one for one in cluster.worker_nodes if one.node_id == node)
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    if fault == "driver":
        process.kill()
        process.communicate()
        process = driver(photos, home, cluster)
    out, err = ended(process, FOUND)
    assert out == wanted
    assert fault == "driver" or "note: 1 worker of the Ray cluster lost and replaced" in err
    seen = len((home / "seen").read_text().split())
    assert fault != "driver" or seen <= PICTURES - max(0, at - 8), "what had come was remembered; four were under way"
    ended(driver(photos, home, cluster), FOUND)
    assert not (home / "seen").exists(), "all is remembered"


@pytest.mark.slow
def test_a_cluster_that_the_command_starts(photos, wanted, tmp_path):
    out, _ = ended(scan(photos, tmp_path, "--engine", "ray", env={"RAY_TMPDIR": "/tmp"}), FOUND)
    assert out == wanted
