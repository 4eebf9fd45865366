"""`train sample`: pictures from a run, finished or not, before and after training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from prep.errors import CacheError, PathError, Problem, UsageError
from prep.fs.atomic import make_dirs, write_atomic
from prep.fs.paths import NamedPath, check_above, check_disjoint, check_replaceable
from prep.fs.place import Local, Place, is_here
from prep.loader.index import Index
from prep.loader.rows import Rows
from prep.models.files import Model
from prep.progress import Progress, silent
from prep.recipe.prompts import Prompt
from prep.runs.grids import columns_of
from prep.runtime import killable
from prep.training.schema import Base, Evaluating
from train.check import check
from train.config.load import on_trained
from train.memory.forecast import blocks_offloaded
from train.models.adapters.frozen import PART
from train.models.denoiser import Denoiser, adapted, load
from train.models.lora import at_weight
from train.parallel.shards import Whole
from train.prompts.aside import kept_rows
from train.runs.checkpoint import list_checkpoints, newest_other
from train.runs.directory import RESULTS, Run, model_of, read_run, require_manifest
from train.runs.resume import Start, find_start
from train.sampling.grid import MARK, grid_png
from train.sampling.prompts import CurrentPrompts, PromptRows, bad_lines, of_file, of_manifest
from train.sampling.sampler import decoded, drawn
from train.setup import Setup
from train.state import put_initial
from train.state_files import averaged, put_weights

OTHERS = (".jpg", ".jpeg", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".jxl")  # what is no PNG by its name
SLIDER = (-1.0, 0.0, 1.0)  # weights at which a slider is looked at
Which = Literal["before", "after"]
Encode = Callable[[Index, Model, Sequence[Prompt], torch.device], tuple[PromptRows, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleRequest:
    """What to sample; `None` uses the run's own value, and where no `model` is named, its `sample.model` draws. Steps,
    guidance and seed are also those of prompts in a file, whatever they say there, but not of `texts`, which were typed
    beside them."""

    run: Local
    which: tuple[Which, ...]
    weights: tuple[float, ...] = ()  # of a LoRA, each in a column; empty: 1, and of a slider -1, 0 and 1
    prompts: Path | None = None
    texts: tuple[Prompt, ...] = ()  # prompts given as text; if any, no prompt file is read
    checkpoint: str | None = None
    manifest: Place | None = None
    cache: Place | None = None
    model: str | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int | None = None
    sampler: str | None = None
    download: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class SampleGrid:
    """The pictures, and warnings about them."""

    warnings: tuple[str, ...]
    pictures: tuple[np.ndarray, ...]  # in the order of the grid


def show(wanted: SampleRequest, device: torch.device, out: Path, encode: Encode | None = None,
         progress: Progress = silent) -> SampleGrid:
    """Writes the grid to `out`: one row per prompt, before and after in columns. `encode` encodes `texts`.

    Writes only the grid. Raises the first fault that `train check` would report.
    """
    run = read_run(wanted.run, manifest=wanted.manifest, cache=wanted.cache)
    after = "after" in wanted.which
    finished = after and _has_only_result(run, wanted)
    start = _start(wanted) if after and not finished else None
    setup = checked_setup(run, wanted, start, progress, finished=finished)
    _check_output(out, setup)
    rows = Rows(setup.index)
    if wanted.texts:
        assert encode is not None, "texts need an encoder"
        prompts = CurrentPrompts(prompts=encode(setup.index, setup.model.path, wanted.texts, device))
    else:
        prompts = overridden(prompts_of(wanted, setup), wanted)
    weights = _weights(wanted, setup)
    columns = _columns(setup, start, device, rows, prompts, wanted, weights, progress)
    cells = [picture for row in zip(*columns, strict=True) for picture in row]
    named = [f"{weight:g}" for weight in weights] if len(weights) > 1 else wanted.which
    heads = [f"{name}: " if len(columns) > 1 else "" for name in named]
    labels = [head + prompt.prompt for prompt in prompts.prompts for head in heads]
    write_atomic(out, grid_png(cells, labels, len(columns) if len(columns) > 1 else columns_of(len(cells))))
    others = () if not after else other_base(setup, run.base, "the run") if start is None else other_base(
        setup, start.state.base, start.folder.name)
    return SampleGrid(warnings=(*prompts.warnings, *others), pictures=tuple(cells))


@killable()
def _columns(setup: Setup, start: Start | None, device: torch.device, rows: Rows, prompts: CurrentPrompts,
             wanted: SampleRequest, weights: Sequence[float], progress: Progress) -> list[list[np.ndarray]]:
    """Samples the model before and after training, or with its adapters at these weights. A base is loaded once if it
    gets its adapters in place. The VAE decodes when no denoiser is left."""
    model, config, offload = setup.model.drawing, setup.config, blocks_offloaded(setup, device)
    settings = replace(config.sample, **typed(wanted))
    kept: Denoiser | None = None
    columns = []
    for which in wanted.which:
        denoiser = adapted(kept, model, config, setup.prediction) if kept is not None else load(
            model, config, setup.prediction, device, adapt=which == "after", family=setup.family.name, offload=offload,
            progress=progress)
        if which == "after":
            put_trained(denoiser, setup, start)
        for weight in weights:
            with at_weight(denoiser.model, weight):
                columns.append(drawn(denoiser, rows, model, prompts.prompts, settings))
        kept = denoiser if config.method == "lora" and not offload and not config.compile else None
        del denoiser  # else there would be two while the next is loaded
    kept = None
    made = decoded([row for column in columns for row in column], setup.model.path, prompts.prompts * len(columns),
                   device)
    count = len(prompts.prompts)
    return [made[first:first + count] for first in range(0, len(made), count)]


def _weights(wanted: SampleRequest, setup: Setup) -> tuple[float, ...]:
    """The weights of adapters to sample with. Raises `UsageError` for a run that has none."""
    if wanted.weights and setup.config.method == "full":
        raise UsageError("--weights is given, which is for the adapters of a LoRA, but the run trained all weights",
                         hint="--compare shows before and after training")
    slides = (setup.config.slider.on or setup.index.paired) and wanted.which == ("after",)
    return wanted.weights or (SLIDER if slides else (1.0,))


def put_trained(denoiser: Denoiser, setup: Setup, start: Start | None) -> None:
    """Gives a denoiser the weights of the run's result, or of the checkpoint. Raises `CacheError`, `ModelError`."""
    if setup.model.initial is not None:
        put_initial(Whole(denoiser.weights), setup.model.initial, setup.config.method, setup.model.naming)
        return
    assert start is not None
    try:
        put_weights(denoiser.weights, start, averaged(start, setup.family), setup.family, Whole(denoiser.weights),
                    naming=setup.model.naming)
    except CacheError as error:
        error.hint = _another(start.folder)
        raise


def typed(wanted: SampleRequest) -> dict[str, Any]:
    """The settings that are asked for, by name."""
    return {name: value for name in ("steps", "guidance", "seed") if (value := getattr(wanted, name)) is not None}


def overridden(prompts: CurrentPrompts, wanted: SampleRequest) -> CurrentPrompts:
    """The prompts with the settings that are asked for instead of their own."""
    return replace(prompts, prompts=tuple(replace(prompt, settings=replace(prompt.settings, **typed(wanted)))
                                          for prompt in prompts.prompts))


def _check_output(out: Path, setup: Setup) -> None:
    """Raises `PathError` early, unless the grid can be written to `out` and replaces at most a PNG."""
    others = [NamedPath(role="pictures", path=place) for place in setup.manifest.sources if place is not None]
    for other in (NamedPath(role="cache", path=setup.manifest.cache), *others):
        if is_here(other.path):
            check_disjoint([NamedPath(role="grid", path=out), other])
    if out.suffix.lower() in OTHERS:
        raise PathError(f"{out} is named like a {out.suffix} file, expected a PNG picture",
                        hint=f"-o {out.with_suffix('.png')}")
    check_above(out, "PNG picture")
    make_dirs(out.absolute().parent)
    check_replaceable(out, "grid of pictures", lambda start: MARK in start)


def _has_only_result(run: Run, wanted: SampleRequest) -> bool:
    """Whether to sample with the result: of a run whose checkpoints are gone, unless one was named."""
    return (wanted.checkpoint is None and not list_checkpoints(run.folder)
            and any((run.folder / name).exists() for name in RESULTS))


def checked_setup(run: Run, wanted: SampleRequest, start: Start | None, progress: Progress, *, finished: bool) -> Setup:
    """The setup of the checkpoint, or else of the run; `finished`: with its result as weights.

    Raises the first fault.
    """
    if wanted.manifest is None:
        require_manifest(run)
    request = replace(run.request, download=wanted.download, model=model_of(run, wanted.model),
                      init=run.local if finished else None)
    config = run.config if start is None else start.config
    # Neither a training adapter is used, nor what evaluates; nor the model that draws, if another is asked for.
    config = on_trained(config) if wanted.model else replace(config, base=Base(), evaluate=Evaluating())
    if wanted.sampler is not None:
        config = replace(config, sample=replace(config.sample, sampler=wanted.sampler))
    report = check(request, config, progress=progress)
    if report.setup is None:
        raise report.faults[0]
    return report.setup


def other_base(setup: Setup, base: Mapping[str, str], name: str) -> list[str]:
    """A warning for each part of the model that differs from that of the checkpoint or run `name`."""
    own = setup.model.base
    return [f"the {part} of {setup.model.path} differs from that of {name}: it is {own.get(part, 'none')[:12]}, "
            f"expected {digest[:12]}" for part, digest in base.items() if own.get(part) != digest and part != PART]


def _start(wanted: SampleRequest) -> Start:
    try:
        return find_start(wanted.run, wanted.checkpoint, complete=not wanted.run.partial)  # or its weights
    except Problem as error:
        others = "name another checkpoint with --checkpoint, or " if list_checkpoints(wanted.run.path) else ""
        error.hint = f"{others}show the model before training with --base"
        raise


def _another(damaged: Path) -> str:
    """The hint for a damaged checkpoint."""
    base, other = "--base shows the model before training", newest_other(damaged)
    return base if other is None else f"--checkpoint {other.name} shows another checkpoint; {base}"


def prompts_of(wanted: SampleRequest, setup: Setup, *, typing: bool = True) -> CurrentPrompts:
    """The prompts whose rows the cache has, or the run's directory; `typing`: whether the command takes --prompt, too.
    Raises `PathError`, `ConfigError`, `CacheError`."""
    encoded, typed = partial(kept_rows, wanted.run.path, setup.index), "--prompt TEXT" if typing else ""
    if wanted.prompts is not None:
        return of_file(setup.index, wanted.prompts, "--prompts", encoded, typed=typed)
    for fault in bad_lines(setup.index):
        raise fault
    return of_manifest(setup.index, encoded, typed=typed)
