"""The pictures of a run's page: what was sampled through time, prompt by prompt, and the samples with the worst losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from prep.errors import Problem, first_line
from prep.fs.untrusted import read_regular
from prep.images.decode import decode_picture
from prep.images.formats.parts import BadPicture
from prep.images.thumbnail import small_jpeg
from prep.manifest.describe import describe
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest
from prep.report.pages.frame import Pictures
from prep.report.pages.gallery import CAPTIONS, LETTERS, from_sources
from prep.report.pages.parts import Caption, Card, Shot
from prep.runs.grids import cut_grid
from prep.runs.history import Grid
from train.runs.directory import Run, require_manifest
from train.worst import Worst, find_worst

SIDE = 320  # pixels of the longer side of a picture
WHOLE = 960  # pixels of the longer side of a grid whose parts are not known
STEPS = 12  # shown of each prompt, evenly spread
PROMPTS = 24
MOST = 1 << 27  # bytes of a grid's file


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """A prompt's picture at a step."""

    step: int
    shot: Shot


@dataclass(frozen=True, kw_only=True, slots=True)
class Strip:
    """The pictures of one prompt, in order of their steps."""

    prompt: str  # "": whole grids, of a log that does not know their prompts
    moments: tuple[Moment, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardest:
    """The samples with the worst losses as cards, or why there are none."""

    found: Worst | None
    cards: tuple[Card, ...]
    why: str = ""


def strips(run: Path, grids: Sequence[Grid], pictures: Pictures) -> tuple[list[Strip], str]:
    """The sampled pictures by prompt, and a note on those that are left out.

    A grid that cannot be read, or is not the one that the log describes, is left out.
    """
    latest = list({grid.step: grid for grid in grids}.values())
    last = len(latest) - 1
    chosen = sorted({round(number * last / max(min(STEPS, last + 1) - 1, 1)) for number in range(min(STEPS, last + 1))})
    cells = [(grid.step, _cells(run, grid)) for grid in (latest[number] for number in chosen)]
    prompts = list(dict.fromkeys(key for _, cut in cells for key in cut))
    found = []
    for prompt, number in prompts[:PROMPTS]:
        shots = [(step, cut[prompt, number]) for step, cut in cells if (prompt, number) in cut]
        found.append(Strip(prompt=prompt, moments=tuple(
            Moment(step=step, shot=_shot(f"{prompt or 'all prompts'}, at step {step:,}", data, pictures))
            for step, data in shots)))
    notes = []
    if len(latest) > len(chosen):
        notes.append(f"{len(chosen)} of {len(latest)} steps with pictures are shown; all are in samples.")
    if len(prompts) > PROMPTS:
        notes.append(f"{PROMPTS} of {len(prompts)} prompts are shown.")
    gone = sum(not cut for _, cut in cells)
    if gone:
        notes.append(f"{gone} {'file' if gone == 1 else 'files'} of sample pictures cannot be read.")
    return found, " ".join(notes)


def _cells(run: Path, grid: Grid) -> dict[tuple[str, int], bytes]:
    """JPEGs by prompt, and by how many earlier pictures of the grid have the same prompt."""
    parts = PurePosixPath(grid.picture).parts
    if len(parts) != 2 or parts[0] != "samples" or parts[1] in ("", ".", ".."):
        return {}
    try:
        sheet = decode_picture(read_regular(run / "samples" / parts[1], MOST), alpha="white")
    except (OSError, BadPicture):
        return {}
    cut = cut_grid(np.asarray(sheet), grid.sizes)
    if not grid.prompts or not cut:
        return {("", 0): small_jpeg(np.asarray(sheet), WHOLE)}
    found: dict[tuple[str, int], bytes] = {}
    for prompt, pixels in zip(grid.prompts, cut, strict=False):
        number = sum(prompt == other for other, _ in found)
        found[prompt, number] = small_jpeg(np.ascontiguousarray(pixels), SIDE)
    return found


def _shot(name: str, data: bytes, pictures: Pictures) -> Shot:
    return Shot(name=name, address=pictures.add(data), instead="The page has no room for this picture.")


def hardest(run: Run, count: int, manifest: Path | None, pictures: Pictures) -> Hardest:
    """The `count` samples with the worst losses, as `train worst` lists them, with their pictures and captions."""
    if not count:
        return Hardest(found=None, cards=(), why="Not asked for.")
    try:
        if manifest is None:
            require_manifest(run)
        opened = open_manifest(read_manifest(manifest or run.asked.manifest))
        found = find_worst(run.folder, count, manifest)
        described = [describe(opened, each.sample) for each in found.samples]
    except Problem as error:
        return Hardest(found=None, cards=(), why=f"{first_line(error)}. {error.hint}".strip())
    thumbnail, cards = from_sources(opened), []
    for each, sample in zip(found.samples, described, strict=True):
        captions = [text["caption"] for text in sample["texts"]]
        cards.append(Card(
            shot=Shot(name=each.name, address=pictures.add(thumbnail(sample)),
                      instead="The original picture was not found."),
            captions=tuple(Caption(text=one[:LETTERS], letters=len(one)) for one in captions[:CAPTIONS]),
            more_captions=max(0, len(captions) - CAPTIONS),
            facts=(f"{each.ratio:.2f} times the usual loss", f"loss {each.loss:.4f}",
                   f"shown {each.showings:,} {'time' if each.showings == 1 else 'times'}")))
    return Hardest(found=found, cards=tuple(cards))
