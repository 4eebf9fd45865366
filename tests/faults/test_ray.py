"""Actors, nodes and drivers of the Ray engine killed at changes of the disk: every task is committed once, and the
manifest is that of the local engine.

Several raylets run on this machine. Only masks are to be made, which needs no torch in the workers: the other rows are
in the cache already. A slow test makes all rows.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import vision_models
from account import account, state
from harness import ENVIRONMENT, FORKS, PATIENCE, ended
from pictures import draw, draw_mask

pytest.importorskip("ray")
pytestmark = FORKS

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"
PICTURES = 8
DRIVER = """
from prep.encode import plan
from prep.encode.engines import ray
from prep.fs import memo
from ray_faults import FaultyWorker
plan.TASK_ROWS, memo.REST_NS, ray.RayWorker = 1, -10**12, FaultyWorker
from prep.cli.main import main
main()
"""
ALL = 304  # changes of the disk that the workers make
POINTS = {"actor": range(3, ALL, 20), "node": range(5, ALL, 27), "driver": range(8, ALL, 26)}
QUICK = {("actor", 43)}


@pytest.fixture(scope="module")
def prepared(launch, tiny_model, tmp_path_factory):
    """Pictures with masks; a cache with all rows but those of masks; what the local engine makes of it."""
    from harness import Stage

    root = tmp_path_factory.mktemp("ray")
    for number in range(PICTURES):  # each of another size, so that no mask is that of another
        draw(root / "photos" / f"{number}.png", (96, 96 + number), seed=number)
        (root / "photos" / f"{number}.txt").write_text(f"picture {number % 3}")
        draw_mask(root / "photos" / f"{number}-masklabel.png", (96, 96 + number))
    (root / "home").mkdir()
    stage = Stage(launch=launch, pictures=root / "photos", model=tiny_model, home=root / "home", rows=1)
    without = [word if word != "sidecar" else "none" for word in stage.encode(name="without.json")]
    assert stage.run(without)["codes"] == [0]
    shutil.copytree(stage.home, root / "kept")
    assert stage.run(stage.encode())["codes"] == [0]
    return stage, root / "kept", state(stage.home)


@pytest.fixture
def there(prepared):
    """The stage as it was before the masks, and what is wanted of it."""
    stage, kept, wanted = prepared
    shutil.rmtree(stage.home)
    shutil.copytree(kept, stage.home)
    return stage, wanted


def driver(stage, cluster, *options, fault="none", at=0):
    """The command, in a process of its own."""
    (stage.home / "fault.json").write_text(json.dumps({"kind": fault, "at": at}))
    for name in ("calls", "reached"):
        (stage.home / name).unlink(missing_ok=True)
    words = [word for word in stage.encode(*options) if word != "--quiet"]
    words += ["--engine", "ray", "--address", cluster.address, "--workers", "2"]
    return subprocess.Popen([sys.executable, "-W", "error", "-c", DRIVER, *words], stdout=subprocess.PIPE,
                            stderr=subprocess.PIPE, text=True, start_new_session=True,
                            env={**ENVIRONMENT, "PYTHONPATH": f"{ENVIRONMENT['PYTHONPATH']}:{SUPPORT}"})


def reported(process):
    """What a command reports that ends well, and its notices."""
    out, err = ended(process)
    return {**json.loads(out), "notices": err.splitlines()}


def until_reached(stage, process):
    """The node where a worker has come to its point."""
    patience = time.monotonic() + PATIENCE
    while not (stage.home / "reached").exists():
        assert time.monotonic() < patience and process.poll() is None, process.communicate()
        time.sleep(0.02)
    return (stage.home / "reached").read_text()


def is_as(stage, wanted):
    """The cache has each task's commit, and the manifest is the same; killed processes may leave files in tmp."""
    for name in ("fault.json", "calls", "reached"):
        (stage.home / name).unlink(missing_ok=True)
    left = account(stage.home)
    assert left.plans == []
    assert state(stage.home) == wanted


@pytest.mark.slow
@pytest.mark.parametrize(("fault", "at"), [
    pytest.param(fault, at, marks=() if (fault, at) in QUICK else pytest.mark.slow)
    for fault, points in POINTS.items() for at in points])
def test_a_kill(there, cluster, fault, at):
    stage, wanted = there
    process = driver(stage, cluster, fault=fault, at=at)
    node = until_reached(stage, process)
    if fault == "node":
        lost = next(one for one in cluster.worker_nodes if one.node_id == node)
        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(num_cpus=1, object_store_memory=80 << 20)
    if fault == "driver":
        process.kill()
        process.communicate()
        process = driver(stage, cluster)
    report = reported(process)
    assert report["rejected"] == [] and 0 < report["encoded"]["mask"] <= PICTURES
    assert fault == "driver" or any("lost and replaced" in line for line in report["notices"])
    is_as(stage, wanted)


@pytest.mark.slow
def test_all_rows_with_models(stage, cluster, tmp_path):
    """Text and latents, too, in an actor that loads both encoders, one after the other."""
    assert stage.run(stage.encode(), task_rows=1)["codes"] == [0]
    there = stage.at(tmp_path / "ray")
    report = reported(driver(there, cluster, fault="actor", at=90))
    assert sum(report["encoded"].values()) + 3 >= 11 and report["rejected"] == []
    is_as(there, state(stage.home))


@pytest.mark.slow
def test_a_cluster_that_the_command_starts(stage, tmp_path):
    embed = ["--embed", str(vision_models.build(tmp_path / "vision", "clip"))]
    assert stage.run(stage.encode(*embed), task_rows=256)["codes"] == [0]  # as in a process of its own
    there = stage.at(tmp_path / "ray")
    words = [*there.encode(*embed), "--engine", "ray", "--workers", "1"]
    done = subprocess.run([sys.executable, "-W", "error", "-m", "prep", *words], capture_output=True, text=True,
                          timeout=PATIENCE, env={**ENVIRONMENT, "RAY_TMPDIR": "/tmp"})
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["encoded"] == {
        "latent": 5, "mask": 2, "text": 4, "embedding": 5}  # and Ray says nothing there
    account(there.home)
    assert (there.home / "m.json").read_bytes() == (stage.home / "m.json").read_bytes()


@pytest.mark.slow
def test_a_signal_to_the_driver(there, cluster):
    """The tasks under way are completed, and the rest is for the next run."""
    stage, wanted = there
    process = driver(stage, cluster, fault="none")
    patience = time.monotonic() + PATIENCE
    while not list((stage.cache / "tmp").glob("*")) and process.poll() is None:  # the token of the workers
        assert time.monotonic() < patience
        time.sleep(0.02)
    process.terminate()
    _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75 and "stopped by SIGTERM" in err, err
    ended(driver(stage, cluster))
    is_as(stage, wanted)
