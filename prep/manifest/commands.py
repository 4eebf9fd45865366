"""The `prep` commands that make or repair what a manifest lacks, as one would type them here."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

from prep.manifest.document import Manifest


def encode_command(manifest: Manifest, options: str = "") -> str:
    """The `prep encode` command that makes what is missing, as one would type it here."""
    recipe = manifest.document["recipe"]
    sources = [place for place in manifest.sources if place is not None]
    named = manifest.folder / recipe if recipe is not None else sources[0] if sources else Path("SOURCE")
    given = "".join(f" {_here(word)}" for word in manifest.options)
    return (f"prep encode {_here(named)}{given}{options} --cache {_here(manifest.cache_root)} "
            f"-o {_here(manifest.path)}")


def repair_command(manifest: Manifest, *, recorded: bool = True) -> str:
    """How to list all damage, and how to repair it; `recorded` unless the cache could not be written."""
    why = "" if recorded else "the cache cannot be written here, so the damage is not recorded in it; "
    return (f"{why}prep verify {_here(manifest.path)} names all that is damaged, and this makes only that again: "
            f"{encode_command(manifest, '' if recorded else ' --recheck')}")


def _here(path: Path | str) -> str:
    """A path as seen from the working directory, when that is shorter; a word as a shell takes it."""
    if isinstance(path, str):
        return shlex.quote(path)
    try:
        return shlex.quote(min(str(path), os.path.relpath(path), key=len))
    except ValueError:
        return shlex.quote(str(path))
