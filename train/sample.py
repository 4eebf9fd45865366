"""Pictures of a finished or unfinished run, before and after training: what `train sample` does."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from prep.errors import CacheError, PathError
from prep.fs.atomic import make_dirs, write_atomic
from prep.fs.paths import NamedPath, check_disjoint, check_replaceable
from prep.loader.rows import Rows
from prep.manifest.commands import encode_command
from prep.recipe.prompts import read_prompts
from train.check import check
from train.models.denoiser import load
from train.runs import checkpoint
from train.runs.directory import Run, read_run
from train.sampling.grid import grid_png
from train.sampling.prompts import Found, current, look_up
from train.sampling.sampler import pictures
from train.setup import Setup
from train.state import WEIGHTS, put_weights

Which = Literal["before", "after"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """What to show; `None` takes the run's own."""

    folder: Path
    which: tuple[Which, ...]
    prompts: Path | None = None
    checkpoint: str | None = None
    manifest: Path | None = None
    model: str | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    download: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """What became of it."""

    warnings: tuple[str, ...]
    pictures: tuple[np.ndarray, ...]  # in the order of the grid


def show(wanted: SampleRequest, device: torch.device, out: Path) -> Shown:
    """Writes the grid to `out`: a row a prompt, before and after in columns. Raises what `train check` would find."""
    run = read_run(wanted.folder)
    setup = _setup(run, wanted)
    _check_output(out, setup)
    folder = _checkpoint(wanted) if "after" in wanted.which else None
    rows = Rows(setup.index)
    found = _prompts(wanted, setup)
    settings = replace(setup.config.sample, **{name: value for name in ("steps", "guidance", "seed")
                                               if (value := getattr(wanted, name)) is not None})
    columns: list[list[np.ndarray]] = []
    for which in wanted.which:
        denoiser = load(setup.model, setup.config, setup.prediction, device, adapt=which == "after")
        if which == "after" and folder is not None:
            average = folder / "ema.safetensors"
            weights = average if average.is_file() else folder / WEIGHTS[setup.config.method]
            put_weights(denoiser.parameters, setup, weights)
        columns.append(pictures(denoiser, rows, setup.model, found.prompts, settings))
        del denoiser  # before the next is loaded
    cells = [picture for row in zip(*columns, strict=True) for picture in row]
    heads = [f"{which}: " if len(columns) > 1 else "" for which in wanted.which]
    labels = [head + prompt.prompt for prompt in found.prompts for head in heads]
    wide = len(columns) if len(columns) > 1 else math.ceil(math.sqrt(len(cells)))
    write_atomic(out, grid_png(cells, labels, wide))
    return Shown(warnings=found.warnings, pictures=tuple(cells))


def _check_output(out: Path, setup: Setup) -> None:
    """Raises `PathError` before any work is done, unless the grid can be written there and replaces at most a PNG."""
    others = [NamedPath(role="pictures", path=place) for place in setup.manifest.sources if place is not None]
    for other in (NamedPath(role="cache", path=setup.manifest.cache_root), *others):
        if other.path.exists():
            check_disjoint([NamedPath(role="grid", path=out), other])
    make_dirs(out.absolute().parent)
    check_replaceable(out, "PNG picture", lambda start: start.startswith(b"\x89PNG"))


def _setup(run: Run, wanted: SampleRequest) -> Setup:
    asked = replace(run.asked, download=wanted.download, model=wanted.model or run.asked.model,
                    manifest=wanted.manifest or run.asked.manifest)
    report = check(asked, run.config)
    if report.setup is None:
        raise report.faults[0]
    return report.setup


def _checkpoint(wanted: SampleRequest) -> Path:
    folders = checkpoint.list_checkpoints(wanted.folder)
    names = [folder.name for folder in folders]
    if wanted.checkpoint is None and folders:
        return folders[-1]
    if wanted.checkpoint in names:
        return folders[names.index(wanted.checkpoint)]
    seen = "no checkpoint" if wanted.checkpoint is None else f"no checkpoint '{wanted.checkpoint}'"
    raise PathError(f"{wanted.folder} has {seen}, expected one of: {', '.join(names) or 'none is there yet'}",
                    hint="--base shows the model as it was before training")


def _prompts(wanted: SampleRequest, setup: Setup) -> Found:
    if wanted.prompts is None:
        found = current(setup.index)
    else:
        _, pairs = read_prompts(wanted.prompts)
        found = look_up(setup.index, pairs, wanted.prompts)
    if not found.prompts:
        named = wanted.prompts or Path("prompts.txt")
        raise CacheError(f"the cache has no text row of any prompt in {named}" if wanted.prompts else
                         "the manifest has no sample prompts",
                         hint=encode_command(setup.manifest, f" --prompts {shlex.quote(str(named))}"))
    return found
