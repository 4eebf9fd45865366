"""Validates and samples between steps, with the average of the weights if there is one. A failure is a warning: it
never ends the run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from pathlib import Path

from prep.errors import Problem, first_line
from prep.fs.atomic import make_dirs, write_atomic
from prep.loader.rows import Rows
from prep.models.device.memory import is_out_of_memory
from train.models.family import TextArrays
from train.optim import ema
from train.prompts.aside import encode_aside, kept_rows
from train.runs.log import Log
from train.sampling.grid import columns_of, grid_png
from train.sampling.prompts import Found, current
from train.sampling.sampler import pictures
from train.setup import Setup
from train.state import TrainState, averages
from train.validate import validate


def is_due(every: int, step: int) -> bool:
    """Whether an action with interval `every` in steps (0: never) is due after step `step`."""
    return every > 0 and step > 0 and step % every == 0


def evaluate(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, step: int,
             there: frozenset[str] = frozenset()) -> None:
    """Validates and samples if either is due, and at step 0 and the last step.

    `there`: the events of this step that the log already has; they are skipped. The weights do not change.
    """
    config, ends = setup.config, step in (0, setup.steps)
    due = [name for name, every in (("validation", config.validation.every), ("sample", config.sample.every))
           if every and (ends or is_due(every, step)) and name not in there]
    if not due:
        return
    with ema.swapped_in(averages(trainee), trainee.denoiser.parameters):
        if "validation" in due:
            with log.phase(f"validating step {step}"):
                _validate(trainee, rows, setup, log, step)
        if "sample" in due:
            with log.phase(f"sampling step {step}"):
                _sample(trainee, rows, setup, run, log, step)


def _validate(trainee: TrainState, rows: Rows, setup: Setup, log: Log, step: int) -> None:
    """Logs the validation loss, or a warning."""
    try:
        found = validate(trainee.denoiser, rows, setup)
    except Exception as error:
        log("warning", step, text=f"no validation: {_told(error)}")
        return
    if found is not None:
        log("validation", step, loss=found.loss, spread=found.spread, samples=found.samples, timesteps=found.timesteps,
            losses=found.losses, sources={name: asdict(part) for name, part in found.sources.items()})


def _sample(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, step: int) -> None:
    """Writes a grid of sample pictures, or logs a warning."""
    try:
        found = _prompts(rows, setup, run)
        made = pictures(trainee.denoiser, rows, setup.model, found.prompts, setup.config.sample)
        path = run / "samples" / f"step-{step:06d}.png"
        if made:
            make_dirs(path.parent)
            write_atomic(path, grid_png(made, [prompt.prompt for prompt in found.prompts], columns_of(len(made))))
    except Exception as error:
        log("warning", step, text=f"no sample pictures: {_told(error)}")
        return
    for warning in found.warnings:
        log("warning", step, text=warning)
    if made:
        log("sample", step, picture=path.relative_to(run).as_posix())


def _prompts(rows: Rows, setup: Setup, run: Path) -> Found:
    """The current prompts. Those without a row are encoded by another process, if `sample.wait` allows one."""
    def kept(keys: Iterable[str]) -> Mapping[str, TextArrays]:
        return kept_rows(run, rows.index, keys)

    found = current(rows.index, kept)
    named = setup.manifest.document["prompts"]["file"]
    if not found.lacking or not setup.config.sample.wait or not str(named).endswith(".txt"):
        return found
    why = encode_aside(run, setup, found.lacking)
    found = current(rows.index, kept)
    return found if why is None else replace(found, warnings=(*found.warnings, f"no prompt was encoded here: {why}"))


def _told(error: Exception) -> str:
    """An error in a line; if it was not expected, with its class."""
    if is_out_of_memory(error):
        return "too little memory"
    return first_line(error) if isinstance(error, Problem | OSError) else f"{type(error).__name__}: {first_line(error)}"
