"""The grids of sampled pictures of a run: which to show, their prompts, and their pixels."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import numpy as np

from prep.fs.untrusted import read_regular
from prep.images.decode import decode_picture
from prep.images.formats.parts import BadPicture
from prep.runs.grids import Pixels
from prep.runs.history import Grid

FOLDER = "samples"  # of a run
MOST = 1 << 27  # bytes of a grid's file


def spread_grids(grids: Sequence[Grid], most: int) -> list[int]:
    """The numbers of each step's newest grid, by step; of more than `most`, some, evenly spread, with first and last.
    """
    newest = sorted({grid.step: number for number, grid in enumerate(grids)}.items())
    last, shown = len(newest) - 1, min(most, len(newest))
    return [newest[place][1] for place in sorted({round(number * last / max(shown - 1, 1)) for number in range(shown)})]


def keyed_prompts(grid: Grid) -> list[tuple[str, int]]:
    """The prompt of each picture of a grid, and how many pictures before it have the same; none if not known."""
    prompts = grid.prompts[: len(grid.sizes)]
    return [(prompt, prompts[:number].count(prompt)) for number, prompt in enumerate(prompts)]


def read_sheet(run: Path, grid: Grid) -> Pixels | None:
    """The pixels of a grid, uint8 [H, W, 3]; `None` if its file cannot be read, or is not one of the run's pictures."""
    parts = PurePosixPath(grid.picture).parts
    if len(parts) != 2 or parts[0] != FOLDER or parts[1] in ("", ".", ".."):
        return None
    try:
        return np.asarray(decode_picture(read_regular(run / FOLDER / parts[1], MOST), alpha="white"))
    except (OSError, BadPicture):
        return None
