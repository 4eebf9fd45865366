"""Finds the pictures of a run's samples, and names them for a shell."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prep.formatting import shell_name
from prep.loader.index import Index


def path_of(index: Index, sample: int, reference: int | None = None) -> Path | None:
    """The sample's picture, or a reference of it by number in the columns, relative to the working directory if it is
    below that; `None` if it is not a file there.

    A picture in a tar or a table is none.
    """
    path, here = index.picture(sample) if reference is None else index.reference(sample, reference), Path.cwd()
    return path.relative_to(here) if path is not None and path.is_relative_to(here) else path


def spelled(path: Path | None, name: str, source: int, prefixes: Sequence[str]) -> str:
    """Names a sample for a shell: by its path, else by its name, after its source if there are several."""
    if path is not None:
        return shell_name(str(path))
    return shell_name(f"{prefixes[source]}{name}")
