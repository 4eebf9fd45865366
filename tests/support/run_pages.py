"""The page of a run, made of given texts: prompts, warnings, names of sources, captions, the names of the files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from report_pages import MADE, jpeg

from prep.fs.place import Local
from prep.pages.overlay import Shot
from prep.pages.parts import Caption, Card
from prep.pages.snapshot import EmbeddedPictures
from prep.runs.grids import columns_of
from prep.runs.history import read_history
from train.config.load import parse
from train.report.page import page
from train.report.pictures import Hardest, films
from train.runs.directory import Run
from train.sampling.grid import grid_png
from train.setup import Origin, RunRequest

SIZES = ((96, 64), (64, 96), (48, 48))
STEPS = 40


def told(texts: Sequence[str]) -> list[dict]:
    """The events of a run that was resumed after half of its steps; its prompts are the first three texts."""
    found: list[dict] = [{"event": "start", "step": 0, "steps": STEPS, "steps_per_epoch": 4, "device": "cpu",
                          "parameters": 92160, "ranks": 1}]
    for step in range(1, STEPS + 1):
        found.append({"event": "step", "step": step, "loss": 0.1 + 1 / step + step % 3 / 50, "lr": 1e-4 * step / STEPS,
                      "grad_norm": 0.5, "samples": 8, "seconds": 0.5, "wait": 0.1, "samples_per_second": 16.0})
        if step % 10 == 0:
            found += [{"event": "validation", "step": step, "loss": 0.5 / step, "spread": 0.1, "samples": 3,
                       "timesteps": [100, 500], "losses": [0.1, 0.01],
                       "sources": {text: {"loss": 0.1, "spread": 0.2, "samples": 2} for text in texts[:2]}},
                      {"event": "sample", "step": step, "picture": f"samples/step-{step:06d}.png",
                       "prompts": [text[:200] for text in texts[:3]], "sizes": [list(size) for size in SIZES]},
                      {"event": "checkpoint", "step": step, "folder": f"checkpoints/step-{step:06d}"}]
        if step == STEPS // 2:
            found += [{"event": "warning", "step": step, "text": f"saw {text}"} for text in texts]
            found.append({**found[0], "step": step})
    return [*found, {"event": "end", "step": STEPS, "result": "lora.safetensors"}]


def write_grids(root: Path, events: Sequence[dict]) -> None:
    """The files of the sampled pictures."""
    (root / "samples").mkdir(parents=True, exist_ok=True)
    for event in events:
        if event["event"] == "sample":
            pixels = [np.full((high, wide, 3), 3 * event["step"] + number, np.uint8)
                      for number, (wide, high) in enumerate(SIZES)]
            (root / event["picture"]).write_bytes(grid_png(pixels, event["prompts"], columns_of(len(pixels))))


def run_html(texts: Sequence[str], root: Path) -> str:
    """A page with all of its parts."""
    events = told(texts)
    write_grids(root, events)
    run = Run(local=Local(root), request=RunRequest(manifest=root / "none.json", model=texts[0]), table={},
              base={"x": "a" * 64}, config=parse({"steps": STEPS, "lora": {"targets": [texts[0][:40]]}}, "x"),
              origin=Origin(started="2024-02-29T12:00:00Z", recipe="b" * 64))
    history, room = read_history(events), EmbeddedPictures()
    shown, note = films(root, history.grids, room)
    cards = tuple(  # with the caption that is one in tests of the layout
        Card(shot=Shot(name=text, address=room.add(jpeg(number)) if number else ""), facts=("loss 0.1",),
             captions=(Caption(text=texts[4][:300], letters=len(texts[4])),)) for number, text in enumerate(texts))
    return page(run, history, MADE, shown, note, Hardest(cards=cards))
