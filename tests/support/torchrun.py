"""Runs of `train` in several processes, started as a user does: by torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def command(count, *words):
    """The command line; `words` follow `train`."""
    return [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(count), "--no-python",
            sys.executable, "-m", "train", *map(str, words)]


def environment():
    """One thread each, and no variable of a torchrun that started the tests."""
    others = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return others | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2]), "NO_COLOR": "1"}


def torchrun(count, *words):
    """Runs `train` in `count` processes; the finished process with its output as text."""
    return subprocess.run(command(count, *words), env=environment(), capture_output=True, text=True, check=False,
                          timeout=240)
