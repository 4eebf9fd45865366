"""A training run in this process, begun or resumed as `train run` does it."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from prep.fs.place import Local
from train.failures import Progress, explained
from train.loop import train
from train.runs.log import Log
from train.runs.resume import compare, find_start
from train.runs.stored.stored import OnDisk

CPU = torch.device("cpu")


def go(setup, run, *, resume=False, named=None, adopt=False, watch=lambda event: None, device=CPU):
    """Trains `setup` in the directory `run`; raises the first fault of a checkpoint that does not fit."""
    start = find_start(Local(run), named) if resume else None
    if start is not None:
        found = compare(start, setup, adopt=adopt)
        if found.faults:
            raise found.faults[0]
        if found.adopted:
            setup = replace(setup, adopted=({"step": start.state.step, "changes": list(found.adopted)},))
    step = 0 if start is None else start.state.step
    progress = Progress(device=device, done=step, saved=step)
    with Log(run / "log.jsonl", watch) as log, explained(setup, run, progress):
        train(setup, OnDisk(Local(run)), log, progress, start)


def events(run):
    """The events in the log of a run."""
    return [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
