"""The tiny models that ship with the package: `model/`, of `pretrain.py`, and `vision/`, of `pretrain_vision.py`."""

from __future__ import annotations

import shutil
from pathlib import Path

SHIPPED = Path(__file__).parent / "model"
VISION = Path(__file__).parent / "vision"


def write_model(root: Path) -> None:
    """Writes `root`/model, a diffusers StableDiffusionPipeline directory under 2 MB, and `root`/vision, a CLIP under
    1 MB. Imports no torch."""
    # Only file contents: installed files may be read-only, the user's copy should not be.
    for folder in (SHIPPED, VISION):
        shutil.copytree(folder, root / folder.name, copy_function=shutil.copyfile)
