"""Encodes prompts that the cache has no rows of, in a process of its own: training never loads a text encoder.

The rows are kept in RUN/prompts, one file per key. A prompt that could not be encoded gets an empty file KEY.late, and
is not tried again before the run is started again.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from prep.formatting import printable
from prep.fs.atomic import make_dirs, remove, write_atomic
from prep.fs.paths import resolve
from prep.loader.index import Index
from prep.manifest.consistency import is_shape_of
from prep.models.family import TextArrays
from prep.models.named import name_for_others
from prep.parse import Unparsed
from prep.runtime import main_of, python
from train.runs.safetensors.reader import read_safetensors
from train.setup import Setup

MOST = 20  # texts to encode at a time
Wanted = Mapping[str, tuple[str, bool]]  # key → text, and whether it is a negative prompt


def kept_rows(run: Path, index: Index, keys: Iterable[str]) -> dict[str, TextArrays]:
    """The rows of `keys` that earlier processes left in the run's directory; files that do not fit are passed over."""
    rows: dict[str, TextArrays] = {}
    for key in keys:
        with suppress(OSError, Unparsed, KeyError):
            row = read_safetensors(run / "prompts" / f"{key}.safetensors", None, None)
            shapes = {name: tuple(value.shape[1:]) for name, value in row.items()}
            if is_shape_of(index.manifest, "text", shapes, dict(index.text_shapes)):
                rows[key] = row
    return rows


def forget_failures(run: Path) -> None:
    """Lets prompts be tried again that failed or took too long: the run is started again, perhaps to wait longer."""
    for path in (run / "prompts").glob("*.late"):
        remove(path)


def encode_aside(run: Path, setup: Setup, texts: Wanted, longest: float = math.inf) -> str | None:
    """Encodes these texts, waiting for at most `sample.wait` seconds, or `longest` if less. Returns the reason if it
    did not, in a line."""
    if "text" in setup.model.others:
        return "the text encoder of the model is not the one that made the cache"
    settings, folder = setup.config.sample, run / "prompts"
    new = {key: text for key, text in texts.items() if not (folder / f"{key}.late").exists()}
    if not new:
        return "that failed or took too long before; --resume tries it again"
    elsewhere = setup.manifest.new_cache
    request = {"manifest": str(resolve(setup.manifest.path)), "cache": str(setup.manifest.cache) if elsewhere else "",
               "model": name_for_others(setup.model.path), "folder": str(folder.resolve()), "device": settings.encode,
               "texts": dict(list(new.items())[:MOST])}
    make_dirs(folder)
    why = _run(request, settings.encode, min(settings.wait, longest))
    if why is not None:
        for key in request["texts"]:
            write_atomic(folder / f"{key}.late", b"")
    return why


def _run(request: Mapping[str, object], device: str, wait: float) -> str | None:
    """Runs the process; returns why it failed."""
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    try:
        done = subprocess.run(python(*main_of("train.prompts.process")), input=json.dumps(request), timeout=wait,
                              text=True, capture_output=True, check=False, start_new_session=True,  # no Ctrl-C for it
                              env={**os.environ, **hidden})
    except subprocess.TimeoutExpired:
        return f"that took more than {wait:g} s"
    except OSError as error:
        return f"no process could be started: {error.strerror or error}"
    if not done.returncode:
        return None
    lines = done.stderr.strip().splitlines()
    return printable(lines[-1][:300]) if lines else f"exit code {done.returncode}"
