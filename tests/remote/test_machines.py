"""Two computers that share no disk train from a store: each downloads its part, and the run is that of one process.

The computers are two groups of processes here, each with copies, output and launcher of its own.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pictures import draw
from runs import events
from safetensors.torch import load_file
from torchrun import environment

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="ranks are found in /proc")]
PICTURES, STEPS = 48, 12
RUN = ("--steps", STEPS, "--batch-size", 8, "--device", "cpu", "--precision", "fp32", "--set", "shuffle=partitioned",
       "--set", "sample.every=0", "--set", "checkpoint.every=4", "--set", "optimizer.name=adamw",
       "--set", "lora.rank=2")


@pytest.fixture
def there(prep, store, tiny_model, tmp_path, monkeypatch):
    """48 pictures in shards of three rows, here and in the store; the manifest's URL."""
    monkeypatch.setattr("prep.encode.plan.TASK_ROWS", 3)
    for number in range(PICTURES):
        picture = draw(tmp_path / "photos" / f"{number}.png", (48, 48), seed=number)
        picture.with_suffix(".txt").write_text(f"no {number}")
    home = tmp_path / "home"
    home.mkdir()
    result = prep("encode", tmp_path / "photos", "--model", tiny_model, "--cache", home / "cache", "-o",
                  home / "m.json", "--resolution", 48, "--step", 16, "--dtype", "float32", "--device", "cpu")
    assert result.code == 0, result.err
    store.upload(home)
    return f"{store.url}/m.json"


class Machine:
    """One of two computers, with one rank."""

    def __init__(self, root: Path, number: int, port: int, *words: object, **variables: str) -> None:
        self.run, self.copies = root / f"run{number}", root / f"copies{number}"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(number),
                   "--master-addr", "127.0.0.1", "--master-port", str(port), "--nproc-per-node", "1", "--no-python",
                   sys.executable, "-m", "train", "run", *map(str, words), "-o", str(self.run)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
                                        start_new_session=True,
                                        env=environment() | {"LATENTRY_REMOTE_DIR": str(self.copies), **variables})

    def ended(self) -> str:
        """Its messages, once it has ended."""
        try:
            return self.process.communicate(timeout=90)[1]
        except subprocess.TimeoutExpired:
            self.die()
            return f"{self.run.name} has not ended: {self.process.communicate()[1]}"

    def die(self) -> None:
        """Ends its launcher and its rank, which has a session of its own, at once."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        for process in (self.process.pid, *map(int, children)):
            os.kill(process, signal.SIGKILL)

    @property
    def shards(self) -> set[str]:
        """The names of the shards of which it has a copy."""
        return {path.name for path in self.copies.glob("whole/*/*/*/cache/shards/*/*") if path.is_dir()}


@pytest.fixture
def machines(tmp_path):
    """`machines(*words)` starts two; all processes are ended with the test."""
    started: list[Machine] = []

    def start(*words, late=0.0, **variables):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        found = []
        for number in range(2):
            found.append(Machine(tmp_path, number, port, *words, **variables))
            started.append(found[-1])
            time.sleep(late if not number else 0)
        return found

    yield start
    for one in started:
        with one.process:  # which closes the pipe of one that a test killed, too
            if one.process.poll() is None:
                one.die()


def losses(run):
    return [one["loss"] for one in events(run) if one["event"] == "step"]


def test_each_downloads_its_part_while_one_is_late_and_the_store_goes_away(train, there, store, tiny_model, tmp_path,
                                                                         machines):
    words = (there, "--model", tiny_model, *RUN)
    gone = time.monotonic() + 1e9

    def rule(method, path, before):
        nonlocal gone
        if "/shards/" in path and store.proxy.count(part="c.0") == 20:
            gone = time.monotonic()
        return "503" if 0 <= time.monotonic() - gone < 8 else ""

    store.proxy.rule = rule
    both = machines(*words, late=6.0, LATENTRY_REMOTE_PATIENCE="60")
    said = [one.ended() for one in both]
    assert [one.process.returncode for one in both] == [0, 0], said
    assert any(fault for _, _, fault in store.proxy.asked), "the store was away"
    assert "waiting for" in said[0] + said[1] or "does not answer" in said[0] + said[1], said
    assert train("run", *words, "-o", tmp_path / "one").code == 0
    assert losses(both[0].run) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    ours, alone = (load_file(run / "lora.safetensors") for run in (both[0].run, tmp_path / "one"))
    for name, value in alone.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=2e-5)
    total = both[0].shards | both[1].shards
    assert len(total) >= 2 * PICTURES // 3
    for one in both:
        assert len(one.shards) <= 0.7 * len(total), "each has copies of its own part"


def test_a_machine_with_little_room_and_one_that_dies(train, there, tiny_model, tmp_path, machines):
    words = (there, "--model", tiny_model, *RUN)
    both = machines(*words, LATENTRY_REMOTE_LIMIT="60KB")
    run = both[0].run
    until = time.monotonic() + 120
    while not (run / "checkpoints" / "step-000004").is_dir():
        assert time.monotonic() < until and both[0].process.poll() is None, both[0].ended()
        time.sleep(0.05)
    both[1].die()
    assert both[0].ended() and both[0].process.returncode != 0
    refused = machines(there, "--resume", LATENTRY_REMOTE_LIMIT="60KB")  # the second has no checkpoint
    said = [one.ended() for one in refused]
    assert [one.process.returncode for one in refused] == [1, 1], said
    assert f"error: rank 1 of 2 failed: {refused[1].run}" in said[0] and f"copy {refused[1].run} from" in said[0]
    shutil.copytree(run, refused[1].run)
    again = machines(there, "--resume", LATENTRY_REMOTE_LIMIT="60KB")
    said = [one.ended() for one in again]
    assert [one.process.returncode for one in again] == [0, 0], said
    assert train("run", *words, "-o", tmp_path / "one").code == 0
    assert losses(run) == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
