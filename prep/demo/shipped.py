"""The tiny model that ships with the package, below `model/`; `pretrain.py` made it."""

from __future__ import annotations

import shutil
from pathlib import Path

SHIPPED = Path(__file__).parent / "model"


def write_model(root: Path) -> None:
    """Writes `root`/model: a diffusers StableDiffusionPipeline directory, under 2 MB. Imports no torch."""
    # Only file contents: installed files may be read-only, the user's copy should not be.
    shutil.copytree(SHIPPED, root / "model", copy_function=shutil.copyfile)
