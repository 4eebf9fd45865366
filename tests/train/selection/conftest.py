"""A data set with embeddings, and a run on it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pictures import draw
from vision_models import build

SMALL = ("--device", "cpu", "--quiet", "--batch-size", 2, "--set", "lora.rank=2", "--set", "sample.steps=2", "--set",
         "sample.size=[64, 64]", "--set", "sample.every=0", "--set", "checkpoint.every=1", "--set", "checkpoint.keep=0",
         "--set", "validation.every=1", "--lr", 0.05)
RED = "a <b>red</b> circle " + "W" * 120
_made: dict[str, Path] = {}


@pytest.fixture
def root(prep, train, tiny_model, tmp_path_factory):
    """A directory with a manifest that has embeddings, and a run of three checkpoints; made once, never written to."""
    if not _made:
        root = tmp_path_factory.mktemp("evaluated")
        for number in range(10):
            picture = draw(root / "photos" / f"{number}.png", (64, 64), seed=number)
            picture.with_suffix(".txt").write_text(f"picture {number}")
        (root / "prompts.txt").write_text(f"{RED}\na blue square --n blurry --d 7\n")
        build(root / "vision", "dinov2")
        done = prep("encode", root / "photos", "--embed", root / "vision", "--model", tiny_model, "--cache",
                    root / "cache", "-o", root / "m.json", "--prompts", root / "prompts.txt", "--resolution", 64,
                    "--step", 32, "--device", "cpu", "--validation", 0.3)
        assert done.code == 0, done.err
        done = train("run", root / "m.json", "-o", root / "run", "--steps", 3, *SMALL)
        assert done.code == 0, done.err
        _made["root"] = root
    return _made["root"]
