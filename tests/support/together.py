"""Runs in several processes that come to grief: killed ones, and rows that are damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import torch
from runs import events
from torchrun import command, environment

from prep.loader.draws import training
from prep.loader.rows import Rows
from train.check import check
from train.config.load import parse
from train.setup import RunRequest


def steps_of(run):
    return [event for event in events(run) if event["event"] == "step"]


def ended(count, blow, words, run):
    """What a long run in so many processes says when it is dealt a blow after some steps."""
    words = command(count, *words, "-o", run)
    with subprocess.Popen(words, env=environment(), stderr=subprocess.PIPE, text=True, start_new_session=True) as popen:
        try:
            until(lambda: (run / "log.jsonl").exists() and len(steps_of(run)) > 5)
            blow(popen)
            return popen.communicate(timeout=60)[1]
        finally:
            if popen.poll() is None:
                os.killpg(popen.pid, signal.SIGKILL)


def damage_late_row(made):
    """Flips a bit in the latent of a sample that the first step does not show."""
    report = check(RunRequest(manifest=made.path), parse({"batch_size": 4}, ""))
    setup = report.setup
    first, second = (next(iter(training(setup.index, setup.plan, step, step + 1, timesteps=1000)))
                     for step in (0, 1))
    shot = next(shot for shot in second.draws if shot.sample not in {one.sample for one in first.draws})
    damage(made, setup, (second, shot))


def damage(made, setup, showing):
    """Flips a bit in the latent of a showing: its request and its draw."""
    request, shot = showing
    rows = Rows(setup.index)
    ref, = rows.places([shot], masked=False).latents
    row = torch.empty(1, *setup.index.shape("latent", request.bucket)["latent"], dtype=torch.bfloat16)
    rows.fill(row, "latent", "latent", [ref])
    content = row.view(torch.uint8).numpy().tobytes()
    path, = (file for file in setup.index.cache.shard(ref.shard).rglob("*")
             if file.is_file() and content in file.read_bytes())
    data = path.read_bytes()
    assert data.count(content) == 1
    place = data.index(content) + len(content) // 2
    path.chmod(0o644)
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1:])


def until(true, seconds=90):
    patience = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < patience
        time.sleep(0.05)


def second(torchrun_process):
    """The process of rank 1."""
    children = Path(f"/proc/{torchrun_process}/task/{torchrun_process}/children").read_text().split()
    return next(int(child) for child in children
                if b"\0RANK=1\0" in b"\0" + Path(f"/proc/{child}/environ").read_bytes())
