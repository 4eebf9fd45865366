"""A drawn dataset, a tiny model and a recipe, so that everything runs with no download."""

from __future__ import annotations

import shutil
from pathlib import Path

from prep.errors import PathError


def write_demo(root: Path, *, pairs: bool = False) -> None:
    """Writes dataset, recipe, prompts, training settings and model below `root`; with `pairs` those of edit training,
    whose model is made by torch. Raises `PathError` if it has files."""
    if root.is_dir() and any(root.iterdir()):
        raise PathError(f"{root} is not empty, expected a new or empty directory", hint=f"prep demo {root}/demo")
    if root.exists() and not root.is_dir():
        raise PathError(f"{root} is a file, expected a new or empty directory", hint="prep demo demo")
    root.mkdir(parents=True, exist_ok=True)
    try:
        _write_all(root, pairs)
    except BaseException:  # it was empty before, and the same command can be repeated
        for inner in root.iterdir():
            shutil.rmtree(inner) if inner.is_dir() else inner.unlink()
        raise


def _write_all(root: Path, pairs: bool) -> None:
    # Not at the top: it loads Pillow, which `--help` does not need.
    if pairs:
        from prep.demo.editor import write_editor
        from prep.demo.pairs import write_pairs

        write_pairs(root)
        write_editor(root / "model")
    else:
        from prep.demo.dataset import write_dataset
        from prep.demo.shipped import write_model

        write_dataset(root)
        write_model(root)
