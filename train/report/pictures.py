"""The pictures of a run's page: what was sampled through time, prompt by prompt, and the samples with the worst losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from prep.errors import Problem, first_line
from prep.fs.place import Place
from prep.images.thumbnail import small_jpeg
from prep.manifest.describe import describe
from prep.manifest.opened import open_manifest
from prep.pages.cards import (
    REFERENCES,
    described_card,
    described_references,
    more_references,
    references_of,
    source_thumbnails,
)
from prep.pages.overlay import Shot
from prep.pages.parts import Card
from prep.pages.run import Film, Prompt, films_of, loss_facts
from prep.pages.snapshot import EmbeddedPictures
from prep.runs.grids import cut_grid
from prep.runs.history import Grid
from prep.runs.sheets import keyed_prompts, read_sheet
from train.report.hardest import find_worst
from train.runs.directory import Run, open_run

SIDE = 320  # pixels of the longer side of a picture
WHOLE = 960  # pixels of the longer side of a grid whose parts are not known
STEPS = 12  # shown of each prompt, evenly spread
PROMPTS = 24


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardest:
    """The samples with the worst losses as cards, or why there are none."""

    cards: tuple[Card, ...]
    why: str = ""


def films(run: Path, grids: Sequence[Grid], pictures: EmbeddedPictures) -> tuple[list[Film], str]:
    """The sampled pictures by prompt, and a note on those that are left out.

    A grid that cannot be read, or is not the one that the log describes, is left out.
    """
    return films_of(grids, lambda number: _cells(run, grids[number]), lambda name, data: Shot(
        name=name, address=pictures.add(data), instead="The page has no room for this picture."),
        steps=STEPS, prompts=PROMPTS)


def _cells(run: Path, grid: Grid) -> dict[Prompt, bytes]:
    """JPEGs by prompt; empty if the file cannot be read."""
    sheet = read_sheet(run, grid)
    if sheet is None:
        return {}
    cut = cut_grid(sheet, grid.sizes)
    if not grid.prompts or not cut:
        return {("", 0): small_jpeg(sheet, WHOLE)}
    return {key: small_jpeg(np.ascontiguousarray(pixels), SIDE)
            for key, pixels in zip(keyed_prompts(grid), cut, strict=False)}


def hardest(run: Run, count: int, manifest: Place | None, pictures: EmbeddedPictures) -> Hardest:
    """The `count` samples with the worst losses, as `train worst` lists them, with their pictures and captions."""
    if not count:
        return Hardest(cards=(), why="Not asked for.")
    try:
        opened = open_manifest(open_run(run, manifest).manifest)
        worst = find_worst(run.local, count, manifest, run.request.cache)
        described = [describe(opened, hard.sample) for hard in worst.samples]
    except Problem as error:
        return Hardest(cards=(), why=f"{first_line(error)}. {error.hint}".strip())
    thumbnail, cards = source_thumbnails(opened), []
    for hard, sample in zip(worst.samples, described, strict=True):
        address = pictures.add(thumbnail(sample))
        referred = [pictures.add(thumbnail(sample, each)) for each in references_of(sample)[:REFERENCES]]
        cards.append(described_card(
            sample, Shot(name=hard.name, address=address, instead="The original picture was not found."),
            facts=(*loss_facts(hard.ratio, hard.loss, hard.showings), *more_references(sample, REFERENCES)),
            references=described_references(sample, referred, paired=opened.manifest.paired)))
    return Hardest(cards=tuple(cards))
