"""The layout of a run in a store: names of objects, relative to the run.

    run.json, samples.bin, manifest.json, log.jsonl, …    as in a run's directory, without links
    wandb/id.txt                                           what W&B calls the run; its other files stay here
    checkpoints/step-000500/state.json                     a checkpoint without it does not exist
    averages/step-000500/ema-0.05.safetensors              of a removed checkpoint, with ema.snapshots
    checkpoints/aside-step-000500/…, averages/aside-…      set aside by --from
    samples/aside-step-000500.png                          likewise; such pictures are not uploaded from here
    writer.json                                            who writes the run

    {"format": "latentry/run-writer", "version": 1, "token": "9f…", "host": "gpu-7", "since": "2026-11-23T19:30:00Z"}

Whoever begins or continues a run replaces writer.json. Before each object, and once more before a checkpoint's
state.json, its token is compared: a program that finds another's ends.
"""

from __future__ import annotations

import json
import platform
import re
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from prep.formatting import printable
from prep.fs.atomic import is_partial
from prep.runs.document import NAME as RUN
from prep.runs.events import NAME as LOG
from prep.runs.losses import NAME as LOSSES
from train.runs.checkpoint import AVERAGES, POWERS, STATE
from train.runs.directory import PASSING, RESULTS

WRITER = "writer.json"
CHECKPOINTS, PROMPTS, KEPT = "checkpoints/", "prompts/", f"{AVERAGES}/"
PAGE = "report.html"  # of `train report`, which is not the run's
WANDB, WANDB_ID = "wandb/", "wandb/id.txt"  # of W&B's own files only the run's name there is the run's
FORMAT, VERSION = "latentry/run-writer", 1
_STATE = re.compile(rf"checkpoints/step-([0-9]{{6,13}})/{re.escape(STATE)}")
_CHECKPOINT = re.compile(r"checkpoints/step-([0-9]{6,13})/")
_AVERAGE = re.compile(rf"(?:checkpoints|{AVERAGES})/step-([0-9]{{6,13}})/([^/]+)(?:/[^/]+)?")
_INDEX = re.compile(r"config\.json|.*\.index\.json")


def whole_steps(names: Iterable[str]) -> set[int]:
    """The steps of the checkpoints that exist."""
    return {int(match[1]) for name in names if (match := _STATE.fullmatch(name))}


def step_of(name: str) -> int | None:
    """The step of the checkpoint that has an object, whole or not; `None`: another object."""
    match = _CHECKPOINT.match(name)
    return int(match[1]) if match else None


def is_state(name: str) -> bool:
    """Whether an object is the state.json of a checkpoint."""
    return _STATE.fullmatch(name) is not None


def averaged_step(name: str) -> int | None:
    """The step of the checkpoint, there or removed, that has an object as a power-function average, or as a piece of
    one; `None`: another object."""
    match = _AVERAGE.fullmatch(name)
    return int(match[1]) if match and f"{match[2].removesuffix('.safetensors')}.safetensors" in POWERS else None


def has_result(names: Iterable[str]) -> bool:
    """Whether there is a result, or some of it."""
    return any(name.partition("/")[0] in RESULTS for name in names)


def below(folder: str, names: Iterable[str]) -> list[str]:
    """The `names` below `folder`, relative to it."""
    return [name.removeprefix(f"{folder}/") for name in names if name.startswith(f"{folder}/")]


def others(run: Path) -> list[str]:
    """The files of a run besides its checkpoints, in the order in which they are uploaded: of a result its index and
    its configuration last, then the card, and the log after all."""
    names = []
    for path in run.rglob("*"):
        name = path.relative_to(run).as_posix()
        skipped = any(map(is_partial, (path, *path.relative_to(run).parents))) or name in (PAGE, WRITER, *PASSING)
        skipped = skipped or name.startswith(("samples/aside-", f"{KEPT}aside-"))
        skipped = skipped or (name.startswith((CHECKPOINTS, WANDB)) and name != WANDB_ID)
        if not skipped and path.is_file() and not path.is_symlink():
            names.append(name)
    return sorted(names, key=lambda name: (_rank(name), name))


def grows(name: str) -> bool:
    """Whether a file is appended to, and not replaced."""
    return name in (LOG, LOSSES) or name.startswith("tensorboard/")


def _rank(name: str) -> int:
    if name == RUN:
        return 0
    if name in (LOG, LOSSES):
        return 5 if name == LOG else 4
    if name == "README.md":
        return 3
    return 2 if name.partition("/")[0] in RESULTS and _INDEX.fullmatch(name.rpartition("/")[2]) else 1


# ---- writer.json -----------------------------------------------------------------------------------------------------


def new_token() -> str:
    """A token of a program's own."""
    return secrets.token_hex(16)


def writer(token: str) -> bytes:
    """The content of writer.json."""
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return json.dumps({"format": FORMAT, "version": VERSION, "token": token, "host": platform.node(), "since": since},
                      sort_keys=True).encode() + b"\n"


def token_of(data: bytes) -> tuple[str, str]:
    """The token in writer.json, and who that is, for messages; both of what cannot be read are of nobody known."""
    try:
        body = json.loads(data)
        return str(body["token"]), f"{printable(str(body['host']))[:80]}, since {printable(str(body['since']))[:40]}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "", "an unknown one"
