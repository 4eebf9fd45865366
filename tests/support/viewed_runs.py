"""A run's directory beside a small manifest, written without training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from run_pages import told, write_grids
from small_manifest import write_small

from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.runs.document import FORMAT
from prep.runs.documents import with_checksum
from prep.runs.losses import HEAD, RECORD, short_ids

WORDS = ("a red circle", "a blue square", "<b>a prompt</b>", "a caption", "another", "a third", "bad.png")
LOSSES = {"a.png": (0.1, 0.3), "sub/b.png": (0.9,)}  # c.png was not shown


def write_run(root: Path, texts: Sequence[str] = (), words: Sequence[str] = WORDS) -> Path:
    """RUN beside its manifest, `texts` as of `write_small`; `words` are its prompts and the texts of its warnings."""
    manifest = read_manifest(write_small(root, texts))
    run, events = root / "run", told(words)
    run.mkdir()
    (run / "run.json").write_bytes(with_checksum({
        "format": FORMAT, "version": 2, "manifest": "../manifest.json", "manifest_digest": manifest.digest,
        "data": "a" * 64, "model": {"hub": "some/model"}, "base": {}, "other_encoders": False, "config": {},
        "adopted": []}))
    (run / "log.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    write_grids(run, events)
    (run / "losses.bin").write_bytes(HEAD + records(root).tobytes())
    return run


def records(root: Path) -> np.ndarray:
    """The losses of LOSSES, all at one timestep, by the samples' places in the table if their names are others."""
    samples = open_manifest(read_manifest(root / "manifest.json")).samples
    names = samples.table["name"].to_pylist()
    ids = dict(zip(names, short_ids(samples.ids), strict=True))
    chosen = LOSSES if set(LOSSES) <= set(names) else dict(zip(names, LOSSES.values(), strict=False))
    rows = [(step, 500, loss, ids[name]) for name, losses in chosen.items() for step, loss in enumerate(losses, 1)]
    return np.array(sorted(rows), RECORD)
