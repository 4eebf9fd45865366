"""A directory as a stranger may hand it over: with a module of each name that a program might import."""

from __future__ import annotations

import os
import sys
from importlib.metadata import packages_distributions
from pathlib import Path


def trap(folder: Path) -> Path:
    """Fills a directory with modules that leave their name in a file when they are imported; that file, not there."""
    caught = folder / "caught"
    code = f"open({os.fspath(caught)!r}, 'a').write(__name__ + ' ')\nraise ImportError('trap')\n"
    for name in {"prep", "train", *sys.stdlib_module_names, *packages_distributions()}:
        if name.isidentifier():
            (folder / f"{name}.py").write_text(code)
    return caught
