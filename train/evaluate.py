"""Validates, samples and evaluates between steps, with the average of the weights if there is one. A failure is a
warning: it never ends the run. Several ranks share the work, and the first one tells what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from math import prod
from pathlib import Path

import numpy as np

from prep.cache.records import RowRef
from prep.cache.remote.quota import NotFetched
from prep.errors import OutOfMemoryError, PathError, Problem, first_line
from prep.fs.atomic import make_dirs, write_atomic
from prep.fs.remote.errors import StoreError
from prep.loader.rows import Rows
from prep.models.device.memory import is_out_of_memory, memory_freed
from prep.runs.grids import columns_of
from prep.training.schema import Config
from train.failures import BETWEEN, Progress
from train.models.denoiser import Denoiser, load
from train.models.lora import without_adapters
from train.optim import ema
from train.parallel.errors import RankFailed, RankLost
from train.parallel.ranks import Ranks
from train.prompts.aside import encode_aside, kept_rows
from train.runs.checkpoint_files import copy_into
from train.runs.log import Log
from train.sampling.grid import grid_png
from train.sampling.prompts import CurrentPrompts, PromptRows, current
from train.sampling.sampler import pictures
from train.selection.during import evaluate_checkpoint, prompts_to_evaluate
from train.setup import Setup
from train.state import TrainState, averages
from train.validate import validate

PROMPT, PROMPTS = 200, 500  # characters of each prompt, and prompts, that the log has: a line of it has a bound


def due_after(setup: Setup, step: int) -> list[str]:
    """What is due after step `step`: validation and sample pictures, which are also at step 0 and the last step, and
    the evaluation of its checkpoint."""
    config, ends = setup.config, step in (0, setup.steps)
    due = [name for name, every in (("validation", config.validation.every), ("sample", config.sample.every))
           if every and (ends or setup.interval(every).is_due(step))]
    return [*due, "evaluation"] if (setup.evaluates(step) if step else _draws_base(setup)) else due


def _draws_base(setup: Setup) -> bool:
    """Whether the base model has to draw before the first step: a full run changes it, and has no other."""
    return bool(setup.config.evaluate.every) and setup.config.method == "full" and not setup.init


def evaluate(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, progress: Progress,
             existing: frozenset[str] = frozenset(), requested: Iterable[str] = ()) -> None:
    """Validates, samples, and evaluates the checkpoint, which is whole on disk, after the last step: what is due, or
    `requested`.

    `existing`: the events of this step that the log already has; they are skipped. The weights do not change. All ranks
    call this.
    """
    step = progress.done
    due = {*due_after(setup, step), *requested} - existing
    if not due:
        return
    with ema.swapped_in(averages(trainee), trainee.denoiser.parameters, copied=trainee.model.sharded):
        if "validation" in due:
            with log.phase(f"validating step {step}"), _warned(trainee, log, progress, "validation"):
                _validate(trainee, rows, setup, log, step)
        for name, act, doing, what in (("sample", _sample, "sampling", "sample pictures"),
                                       ("evaluation", _evaluate, "evaluating", "evaluation")):
            if name in due:
                freed = memory_freed(trainee.denoiser.device) if setup.config.sample.model else nullcontext()
                with freed, log.phase(f"{doing} step {step}"), _warned(trainee, log, progress, what):
                    act(trainee, rows, setup, run, log, step)


@contextmanager
def _warned(trainee: TrainState, log: Log, progress: Progress, what: str) -> Iterator[None]:
    """A part whose failure is a warning, unless another rank is gone, or waits in a pass that needs all of them."""
    progress.during = BETWEEN[what]
    try:
        yield
    except RankLost:
        raise
    except Exception as error:
        of_all = isinstance(error, Problem) and not isinstance(
            error, StoreError | NotFetched | OutOfMemoryError)
        if trainee.model.sharded and not of_all:
            raise
        own = error.__cause__ if isinstance(error, RankFailed) and error.rank == trainee.ranks.rank else error
        log("warning", progress.done, text=f"no {what}: {_in_a_line(own or error)}")
    progress.during = ""


def _validate(trainee: TrainState, rows: Rows, setup: Setup, log: Log, step: int) -> None:
    """Logs the validation loss."""
    result = validate(trainee.denoiser, trainee.model, rows, setup, trainee.slide)
    if result is not None:
        log("validation", step, loss=result.loss, spread=result.spread, samples=result.samples,
            timesteps=result.timesteps, losses=result.losses,
            sources={name: asdict(part) for name, part in result.sources.items()})


def _sample(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, step: int) -> None:
    """Writes a grid of sample pictures."""
    ranks, path = trainee.ranks, run / "samples" / f"step-{step:06d}.png"
    prompts = agreed_prompts(rows, setup, run, ranks)
    with _drawing(trainee, setup, wanted=len(prompts.prompts) > ranks.rank) as denoiser:
        made = _pictures(trainee, rows, setup, denoiser, prompts.prompts)
    with ranks.collective():
        if made and ranks.first:
            make_dirs(path.parent)
            write_atomic(path, grid_png(made, [prompt.prompt for prompt in prompts.prompts], columns_of(len(made))))
    for warning in prompts.warnings:
        log("warning", step, text=warning)
    if made:
        log("sample", step, picture=path.relative_to(run).as_posix(),
            prompts=tuple(prompt.prompt[:PROMPT] for prompt in prompts.prompts[:PROMPTS]),
            sizes=tuple((picture.shape[1], picture.shape[0]) for picture in made))


def _evaluate(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, step: int) -> None:
    """Evaluates the checkpoint of the step, or lets the base model draw at step 0."""
    ranks, config = trainee.ranks, setup.config
    found = agreed_prompts(rows, setup, run, ranks)
    about, neutral, warnings = prompts_to_evaluate(setup, run, found.prompts)
    _require_agreed(ranks, neutral)
    with _drawing(trainee, setup) as denoiser:

        def draw(prompts: Sequence[PromptRows], trained: bool) -> list[np.ndarray]:
            with nullcontext() if trained else without_adapters(denoiser.model):
                return _pictures(trainee, rows, setup, denoiser, prompts, alone=True)

        evaluate_checkpoint(trainee, setup, run, log, step, about, neutral, draw)
    for warning in (*(() if config.sample.every else found.warnings), *warnings):
        log("warning", step, text=warning)


def _pictures(trainee: TrainState, rows: Rows, setup: Setup, denoiser: Denoiser, prompts: Sequence[PromptRows], *,
              alone: bool = False) -> list[np.ndarray]:
    """A picture of each prompt, on the first rank; `alone` as in `pictures`. Ranks draw in turn, each with a seed of
    its prompt's own; all draw the same pictures if the model is divided, since each forward pass needs all."""
    ranks, model, settings = trainee.ranks, setup.model, setup.config.sample
    if trainee.model.sharded:
        return pictures(denoiser, rows, model.path, prompts, settings, alone=alone)
    with ranks.collective():
        own = pictures(denoiser, rows, model.drawing, prompts[ranks.rank :: ranks.world], settings, vae=model.path,
                       alone=alone)
    if ranks.world == 1:
        return own
    shapes = ranks.gather([picture.shape for picture in own])
    data = ranks.gather_bytes(b"".join(picture.tobytes() for picture in own))
    drawn = [_cut(theirs, of_rank) for theirs, of_rank in zip(data, shapes, strict=True)]
    return [drawn[number % ranks.world][number // ranks.world] for number in range(len(prompts))]


@contextmanager
def _drawing(trainee: TrainState, setup: Setup, *, wanted: bool = True) -> Iterator[Denoiser]:
    """The denoiser that draws. The model that `sample.model` names is in memory only inside the `with` block, and on
    ranks that are `wanted`. All ranks call this."""
    denoiser, model, config = trainee.denoiser, setup.model, setup.config
    with trainee.ranks.collective():
        if config.sample.model and wanted:
            alone = replace(config, gradient_checkpointing=False, compile=False)  # no pass back, and few forward
            denoiser = load(model.drawing, alone, setup.prediction, denoiser.device, family=setup.family.name,
                            offload=trainee.offload)
            copy_into(denoiser.weights, trainee.denoiser.weights)
    yield denoiser


def _cut(data: bytes, shapes: Iterable[tuple[int, ...]]) -> list[np.ndarray]:
    """The pictures of these shapes, whose bytes follow one another."""
    made, at = [], 0
    for shape in shapes:
        made.append(np.frombuffer(data, np.uint8, count=prod(shape), offset=at).reshape(shape))
        at += prod(shape)
    return made


def agreed_prompts(rows: Rows, setup: Setup, run: Path, ranks: Ranks) -> CurrentPrompts:
    """The current prompts, which are the same for all ranks. The first one lets new ones be encoded.

    Raises `PathError` if the prompt file is written just now, so that ranks read different ones.
    """
    agreed = CurrentPrompts(prompts=())
    with ranks.collective():
        if ranks.first:
            agreed = _prompts(rows, setup, run, ranks.longest)
    with ranks.collective():
        if not ranks.first:
            agreed = current(rows.index, partial(kept_rows, run, rows.index))
    _require_agreed(ranks, agreed.prompts)
    return agreed


def _require_agreed(ranks: Ranks, prompts: Sequence[PromptRows]) -> None:
    """Raises `PathError` unless all ranks have the same prompts."""
    read = ranks.gather([[prompt.prompt, repr(prompt.settings), isinstance(prompt.positive, RowRef)]
                         for prompt in prompts])
    if any(other != read[0] for other in read):
        raise PathError("the processes do not read the same prompts", hint="all must see the same files")


def waits_shortened(config: Config, ranks: Ranks) -> str | None:
    """What to tell of `sample.wait` if other ranks do not wait as long."""
    wait = config.sample.wait
    if not (config.sample.every or config.evaluate.every) or wait <= ranks.longest:
        return None
    return (f"sample.wait is {wait} s, but of several processes none waits longer than {ranks.longest:g} s for one "
            "that encodes prompts")


def _prompts(rows: Rows, setup: Setup, run: Path, longest: float) -> CurrentPrompts:
    """The current prompts. Those without a row are encoded by another process, if `sample.wait` allows one."""
    encoded = partial(kept_rows, run, rows.index)
    prompts = current(rows.index, encoded)
    named = setup.manifest.document["prompts"]["file"]
    if not prompts.lacking or not setup.config.sample.wait or not str(named).endswith(".txt"):
        return prompts
    why = encode_aside(run, setup, prompts.lacking, longest)
    prompts = current(rows.index, encoded)
    return prompts if why is None else replace(
        prompts, warnings=(*prompts.warnings, f"no prompt was encoded here: {why}"))


def _in_a_line(error: BaseException) -> str:
    """An error in a line; if it was not expected, with its class."""
    if is_out_of_memory(error):
        return "too little memory"
    return first_line(error) if isinstance(error, Problem | OSError) else f"{type(error).__name__}: {first_line(error)}"
