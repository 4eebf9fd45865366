"""The training loop, in plain functions without a trainer class.

A step's gradient is the sum over its samples, in one or more micro-batches, divided by batch_size: a sample counts no
more in a step that a short bucket leaves incomplete. Besides the tensors, the state is one integer: every random draw
is keyed by its step, so step k of a resumed run equals step k of an uninterrupted run.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from prep.cache.remote.room import NotFetched
from prep.errors import EXIT_INTERRUPTED, first_line
from prep.fs.atomic import write_atomic
from prep.fs.remote.errors import StoreError
from prep.loader.rows import Rows
from prep.models.device.memory import is_out_of_memory
from train.card import card
from train.evaluate import due_after, evaluate, waits_shortened
from train.failures import NotFinite, Progress, not_compiled, of_disk, of_store, out_of_memory
from train.models.dropout import has_dropout
from train.parallel.errors import RankFailed
from train.parallel.ranks import ALONE, Ranks
from train.prompts.aside import forget_failures
from train.runs import checkpoint_files as files
from train.runs.checkpoint import step_name
from train.runs.directory import checkpoint_bytes, claim_run
from train.runs.heart import Requests
from train.runs.log import Log
from train.runs.loss_plot import loss_png
from train.runs.resume import Start
from train.runs.saver import Saver, Together, require_shared
from train.runs.stored.stored import OnDisk
from train.setup import Setup
from train.state import (
    Held,
    TrainState,
    checkpoint_files,
    create_state,
    held,
    in_pieces,
    kept_naming,
    own_files,
    restore,
    result_files,
    result_name,
    state_of,
    weights_name,
)
from train.steps import steps, try_largest

STOPPING = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name))
# Seconds in which a signal repeats itself: schedulers send it to each process and to their group, and torchrun passes
# on what it gets.
AGAIN = 2.0


def train(setup: Setup, run: Path, device: torch.device, log: Log, start: Start | None = None,
          ranks: Ranks = ALONE, kept: OnDisk | None = None, requests: Requests | None = None) -> None:
    """Trains to the last step, from `start` or from the beginning, and writes the result.

    Several `ranks` train together: each calls this, and the first one writes. It has the `requests` of others, and
    `kept`: where the run is kept besides the directory `run`.

    On Ctrl-C, another signal of `STOPPING` or a request, finishes the step, saves a checkpoint, then interrupts.
    After a failure outside of a step's update, saves a checkpoint of the last finished step. Raises `Problem`.
    """
    first, kept = 0 if start is None else start.state.step, kept or OnDisk(run)
    progress = Progress(done=first, kept=first, world=ranks.world, device=device)
    explained = partial(_explained, setup, run, progress)
    with _explaining(explained, ranks):
        with log.phase("loading the model"), ranks.together(explained):
            trainee = create_state(setup, device, ranks)
            if start is not None:
                restore(trainee, start, setup.naming)
                if setup.config.lora.format == start.config.lora.format:  # else its names change here
                    name = weights_name(setup.family, setup.config.method)
                    setup = replace(setup, naming=kept_naming(start, name, setup.naming))
        with log.phase("trying the largest bucket"), ranks.passing(explained):
            try_largest(trainee, setup, progress)
        moved: list[str] = []
        there = frozenset[str]()
        with ranks.together(explained):
            if ranks.first:
                moved = claim_run(run, setup, step=None if start is None else first)
                forget_failures(run)
                there = log.rewind(first)
                kept.claim(None if start is None else first)
        if in_pieces(trainee, setup):
            with ranks.together(explained):
                require_shared(run, Together(ranks=ranks, explained=explained))
        with kept:
            _train(trainee, setup, kept, log, progress, there, moved, requests or Requests())


@contextmanager
def _explaining(explained: Callable[[Exception], Exception], ranks: Ranks) -> Iterator[None]:
    """Raises errors as `explained`, of which the other ranks know then."""
    try:
        with ranks.telling(explained):
            yield
    except Exception as error:
        if (better := explained(error)) is not error:
            raise better from error
        raise


def _explained(setup: Setup, run: Path, progress: Progress, error: Exception) -> Exception:
    """An error of the disk, of memory or of the compiler as one that says what helps; others as they are."""
    if isinstance(error, BrokenPipeError):  # our output was closed: not an error of the run's disk
        return error
    if isinstance(error, OSError):
        return of_disk(error, run, progress)
    if isinstance(error, StoreError | NotFetched):
        return of_store(error, progress)
    if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
        return out_of_memory(setup, progress)
    return not_compiled(error) if setup.config.compile else error


def _train(trainee: TrainState, setup: Setup, kept: OnDisk, log: Log, progress: Progress, there: frozenset[str],
           moved: list[str], requests: Requests) -> None:
    """Runs all remaining steps and writes the result.

    `there`: events of the first step that a resumed run's log already has. `moved`: warnings of what was set aside.
    """
    first, rows, run, before = progress.done, Rows(setup.index), kept.folder, log.begun
    dtype = str(trainee.denoiser.dtype).removeprefix("torch.")
    log("start", first, steps=setup.steps, steps_per_epoch=setup.plan.steps_per_epoch, device=str(progress.device),
        parameters=setup.numbers, ranks=trainee.ranks.world, dtype=dtype)
    if before.get("dtype") not in (None, dtype):
        log("warning", first, text=f"forward passes are now computed in {dtype}, and were in {before['dtype']}: "
            f"precision is '{setup.config.precision}', and this device is {progress.device}")
    if before.get("ranks") not in (None, trainee.ranks.world) and has_dropout(trainee.denoiser.model):
        log("warning", first, text=f"the number of processes is {trainee.ranks.world}, and was {before['ranks']}: "
            "dropout draws differ, so the steps are not those that one number would have made")
    if text := waits_shortened(setup, trainee.ranks):
        log("warning", first, text=text)
    for text in moved:
        log("warning", first, text=text)
    if first and "checkpoint" not in there:
        log("checkpoint", first, folder=f"checkpoints/{step_name(first)}")
    evaluate(trainee, rows, setup, run, log, first, frozenset(trainee.ranks.gather(sorted(there))[0]))
    _run_steps(trainee, rows, setup, kept, log, progress, requests)
    with trainee.ranks.together(partial(_explained, setup, run, progress)):
        with held(trainee) as found:
            if found is not None:
                _write_result(trainee, setup, run, max(first, setup.steps), found)
        if trainee.ranks.first:
            _plot(setup, run, log)  # with the last validation
    log("end", max(first, setup.steps), result=result_name(setup))
    with log.phase("waiting for uploads"):
        kept.finish()


def _run_steps(trainee: TrainState, rows: Rows, setup: Setup, kept: OnDisk, log: Log, progress: Progress,
               requests: Requests) -> None:
    """Runs the steps. After each, saves a checkpoint if due, then validates and samples."""
    run, ranks = kept.folder, trainee.ranks
    explained = partial(_explained, setup, run, progress)
    with (_stopping(requests.stop), Saver() as saver,
          closing(steps(trainee, rows, setup, log, progress, partial(_pauses, setup, requests, saver, kept), explained))
          as finished):
        try:
            with ranks.telling(explained):
                for done in finished:
                    stopping, drawing = map(bool, ranks.total([requests.stop.is_set(), requests.sample.is_set()]))
                    with ranks.together(explained):
                        _between(trainee, setup, kept, log, progress, saver, stopping=stopping)
                    if stopping and done < setup.steps:
                        log("stopped", done)
                        break
                    evaluate(trainee, rows, setup, run, log, done, asked=("sample",) if drawing else ())
                    if drawing:
                        requests.sample.clear()
                else:
                    return
        except (Exception, SystemExit) as error:  # no failure may lose the steps since the last checkpoint
            with suppress(Exception):  # report the first failure
                _save_rest(trainee, setup, kept, log, progress, saver)
            if isinstance(error, NotFinite):
                raise error.explained(rows, progress, setup.config) from None
            raise
    raise KeyboardInterrupt if ranks.first else SystemExit(EXIT_INTERRUPTED)


def _between(trainee: TrainState, setup: Setup, kept: OnDisk, log: Log, progress: Progress, saver: Saver, *,
             stopping: bool) -> None:
    """Between two steps: ends a checkpoint that is written, and saves the next one if it is due."""
    done, last = progress.done, stopping or progress.done == setup.steps
    saver.check()
    for text in kept.news():
        log("warning", done, text=text)
    if last or setup.interval(setup.config.checkpoint.every).is_due(done):
        _save(trainee, setup, kept, log, progress, saver)
    if last:
        saver.wait()


def _save_rest(trainee: TrainState, setup: Setup, kept: OnDisk, log: Log, progress: Progress, saver: Saver) -> None:
    """Saves the steps since the last checkpoint after a failure. Of a divided model, if all ranks are still there and
    have finished the same steps."""
    ranks = trainee.ranks if trainee.ranks.sharded else ALONE
    if not progress.whole or not _agree(ranks, [progress.done, saver.pending]):
        saver.leave()
        return
    with suppress(Exception):  # if it fails, it may fail again
        saver.wait()
    if (ranks.sharded or trainee.ranks.first) and ranks.any(progress.done > progress.kept):
        _save(trainee, setup, kept, log, progress, saver)
        saver.wait()


def _agree(ranks: Ranks, facts: list[int | None]) -> bool:
    """Whether all ranks are still there, with the same facts."""
    try:
        return all(each == facts for each in ranks.gather(facts))
    except RankFailed:
        return False


def _pauses(setup: Setup, requests: Requests, saver: Saver, kept: OnDisk, done: int) -> bool:
    """Whether there is something to do after so many steps."""
    return (requests.stop.is_set() or requests.sample.is_set() or saver.is_ready() or kept.has_news
            or bool(due_after(setup, done)) or setup.interval(setup.config.checkpoint.every).is_due(done))


def _save(trainee: TrainState, setup: Setup, kept: OnDisk, log: Log, progress: Progress, saver: Saver) -> None:
    """Saves a checkpoint of the last finished step, after syncing the log to disk; it may be written later. All ranks
    call this."""
    step, ranks, settings, run = progress.done, trainee.ranks, setup.config.checkpoint, kept.folder
    beside, keep = checkpoint_bytes(setup) <= settings.copy_gib * (1 << 30), kept.local_keep(settings.keep)

    def written() -> None:
        progress.kept = step
        if ranks.first:
            kept.saved()

    if in_pieces(trainee, setup):
        if ranks.first:
            log.sync()
        together = Together(ranks=ranks, explained=partial(_explained, setup, run, progress))
        saver.save_pieces(run, state_of(setup, step), own_files(trainee, setup, step), keep, together, beside=beside,
                          done=written)
    else:  # of a divided model all know whether the first rank has what it writes
        def save() -> None:
            with held(trainee) as found:
                if found is not None:
                    log.sync()
                    saver.save(run, state_of(setup, step), checkpoint_files(trainee, setup, step, found), keep,
                               beside=beside, done=written)

        (ranks if ranks.sharded else ALONE).share(save)
        if not ranks.first:
            written()
    if ranks.first:
        saver.then(partial(log.show, log.record("checkpoint", step, folder=f"checkpoints/{step_name(step)}")))
        _plot(setup, run, log)


def _plot(setup: Setup, run: Path, log: Log) -> None:
    """Draws RUN/loss.png. A failure is a warning."""
    if not setup.config.log.plot:
        return
    try:
        write_atomic(run / "loss.png", loss_png(log.curve, log.held_out, setup.steps))
    except Exception as error:
        log("warning", setup.steps, text=f"no loss.png: {type(error).__name__}: {first_line(error)}")


def _write_result(trainee: TrainState, setup: Setup, run: Path, step: int, found: Held) -> None:
    """Writes the trained weights, RUN/lora.safetensors or the denoiser in diffusers' layout, and RUN/README.md."""
    result = result_name(setup)
    if setup.config.method == "lora":
        for part in result_files(trainee, setup, step, result, found):
            files.write_file(run / part.name, part)
    else:
        weights = "diffusion_pytorch_model.safetensors"
        files.write_folder(run / result, result_files(trainee, setup, step, weights, found))
    picture = f"samples/step-{step:06d}.png"
    text = card(setup, step, result, picture if (run / picture).is_file() else None)
    write_atomic(run / "README.md", text.encode())


@contextmanager
def _stopping(stop: threading.Event) -> Iterator[None]:
    """Lets the first Ctrl-C set the event, or a signal by which clusters ask for a stop. Another Ctrl-C raises
    `KeyboardInterrupt` at once, if it is not that of the same moment."""
    asked = math.inf
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield
        return

    def ask(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if number == signal.SIGINT and time.monotonic() - asked >= AGAIN:
            raise KeyboardInterrupt
        asked = min(asked, time.monotonic())
        stop.set()

    heeded = [number for number in STOPPING
              if number in (signal.SIGINT, signal.SIGTERM) or signal.getsignal(number) is not signal.SIG_IGN]  # nohup
    before = {number: signal.signal(number, ask) for number in heeded}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
