"""The training loop, from top to bottom: `train`, its steps, and the pauses between them.

A step's gradient is the sum over its samples, in one or more micro-batches, divided by batch_size: a sample counts no
more in a step that a short bucket leaves incomplete. Besides the tensors, the state is one integer: every random draw
is keyed by its step, so step k of a resumed run equals step k of an uninterrupted run.

Errors leave as they are. `progress` says how far the run was, from which `train.failures` makes the message.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prep.batching.rng import draw_key
from prep.errors import EXIT_INTERRUPTED, first_line
from prep.fs.atomic import write_atomic
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.device import seed
from prep.loader.noise import Noise
from prep.loader.rows import Rows
from prep.runtime import killable
from prep.training.schema import Config
from train.card import card
from train.evaluate import due_after, evaluate, waits_shortened
from train.failures import TRYING, NotFinite, Progress
from train.memory.forecast import blocks_offloaded, recomputing
from train.models.dropout import has_dropout
from train.models.size_shift import chances_by_bucket
from train.parallel.errors import RankFailed
from train.parallel.ranks import ALONE, Ranks
from train.prompts.aside import forget_failures
from train.runs import checkpoint_files as files
from train.runs.checkpoint import step_name
from train.runs.directory import checkpoint_bytes, claim_run
from train.runs.heart import Requests, set_by_signals
from train.runs.log import Log
from train.runs.loss_plot import loss_png
from train.runs.resume import Start
from train.runs.saver import Saver, require_shared
from train.runs.stored.stored import OnDisk
from train.selection.during import proposed
from train.setup import Setup
from train.state import TrainState, create_state, forward_backward
from train.state_files import (
    checkpoint_files,
    in_pieces,
    kept_naming,
    own_files,
    restore,
    result_files,
    result_name,
    snapshot,
    state_of,
    weights_name,
)
from train.trial import tried
from train.update import Gathered, Now, update_of


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What all parts of a run use."""

    setup: Setup
    trainee: TrainState
    storage: OnDisk
    log: Log
    progress: Progress
    requests: Requests
    rows: Rows

    @property
    def ranks(self) -> Ranks:
        return self.trainee.ranks

    @property
    def folder(self) -> Path:
        return self.storage.folder


def train(setup: Setup, storage: OnDisk, log: Log, progress: Progress, start: Start | None = None,
          ranks: Ranks = ALONE, requests: Requests | None = None) -> None:
    """Trains to the last step, from `start` or from the beginning, and writes the result in the directory of `storage`.

    Several `ranks` train together: each calls this, and the first one writes and has the `requests` of others.

    On Ctrl-C, another signal of `STOPPING` or a request, finishes the step, saves a checkpoint, then interrupts.
    After a failure outside of a step's update, saves a checkpoint of the last finished step. Raises any error, also
    `NotFinite` and `RankFailed`; of several ranks those that are not the first raise `RankFailed` if that one is
    interrupted or says the error.
    """
    first = progress.done
    with log.phase("loading the model"), killable(), ranks.collective():
        offload = blocks_offloaded(setup, progress.device, ranks.world)
        setup, texts = recomputing(setup, progress.device, ranks)
        trainee = create_state(setup, progress.device, ranks, offload=offload, progress=log.progress)
        if start is not None:
            restore(trainee, start, setup.model.naming)
            if setup.config.lora.format == start.config.lora.format:  # else its names change here
                name = weights_name(setup.family, setup.config.method)
                naming = kept_naming(start, name, setup.model.naming)
                setup = replace(setup, model=replace(setup.model, naming=naming))
    with log.phase(TRYING), killable():
        setup, tried_texts = tried(trainee, setup, progress)
    texts += tried_texts
    existing = frozenset[str]()
    with ranks.collective():
        if ranks.first:
            texts += claim_run(storage.run, setup, step=None if start is None else first)
            forget_failures(storage.folder)
            existing = log.rewind(first)
            storage.claim(None if start is None else first)
    if in_pieces(trainee, setup.config):
        require_shared(storage.folder, ranks)
    run = _Run(setup=setup, trainee=trainee, storage=storage, log=log, progress=progress, rows=Rows(setup.index),
               requests=requests or Requests())
    with storage:
        _begin(run, texts, existing, offload)
        _steps(run)
        _end(run)


def _steps(run: _Run) -> None:
    """Runs the remaining steps, and what is due after each. After a failure saves the steps that no checkpoint has."""
    setup, trainee, progress, ranks, requests = run.setup, run.trainee, run.progress, run.ranks, run.requests
    share = draws.RankShare(rank=ranks.rank, world=ranks.world, pad_ranks=trainee.model.sharded)
    with (set_by_signals(requests.stop), Saver() as saver,
          step_batches(trainee, setup, run.rows, range(progress.done, setup.steps), share) as feed):
        try:
            with update_of(trainee, setup, run.log, progress) as update:
                for step in range(progress.done, setup.steps):
                    make_step(trainee, setup, update, feed, step, progress, share)
                    stopping, drawing = map(bool, ranks.total([requests.stop.is_set(), requests.sample.is_set()]))
                    saver.check()
                    for text in run.storage.news():
                        run.log("warning", progress.done, text=text)
                    if stopping or drawing or _is_due(setup, step + 1):
                        update.finish()
                        if _pause(run, saver, stopping=stopping, drawing=drawing):
                            raise KeyboardInterrupt if ranks.first else RankFailed(
                                "interrupted", rank=0, exit_code=EXIT_INTERRUPTED)
                        update.since = time.perf_counter()
        except Exception as error:
            _rescue(run, saver, error)
            if isinstance(error, NotFinite) and not ranks.first:
                raise RankFailed("all ranks have numbers that are not finite", rank=0) from None
            raise


def make_step(trainee: TrainState, setup: Setup, update: Now, feed: Iterator[Batch], step: int, progress: Progress,
              share: draws.RankShare = draws.WHOLE) -> None:
    """Makes step `step` (from 0) with the next batches of `feed`. Raises `NotFinite`."""
    config = setup.config
    if has_dropout(trainee.denoiser.model):  # which draws from torch's generators
        seed(draw_key(config.seed, step, b"", trainee.ranks.rank, "dropout-mask")[0], progress.device)
    passes = draws.passes(setup.index, setup.plan, step, dropout=setup.dropout, most=config.micro_batch, share=share)
    with update.gathering(step, passes) as between:
        gathered = accumulate(trainee, config, islice(feed, passes), progress, between)
    update.make(step, gathered)


def step_batches(trainee: TrainState, setup: Setup, rows: Rows, steps: range, share: draws.RankShare = draws.WHOLE
                 ) -> AbstractContextManager[Iterator[Batch]]:
    """The micro-batches of this rank, of these steps."""
    config, denoiser = setup.config, trainee.denoiser
    requests = draws.training(rows.index, setup.plan, steps.start, steps.stop,
                              dropout=setup.dropout, timesteps=denoiser.timesteps,
                              chances=chances_by_bucket(config.timesteps, setup.model.shifts),
                              noise=Noise(**asdict(config.noise)), most=config.micro_batch, share=share)
    return batches(rows, requests, masked=setup.masked, pinned=denoiser.device.type == "cuda",
                   sharing=trainee.ranks.local_world)


def accumulate(trainee: TrainState, config: Config, feed: Iterable[Batch], progress: Progress,
               between: Callable[[Tensor], None] | None = None) -> Gathered:
    """Runs forward and backward over every batch of `feed`: one rank's part of one step. `between` is called with the
    loss of each between both."""
    loss = torch.zeros((), device=trainee.denoiser.device)
    samples, waited, since = 0, 0.0, time.perf_counter()
    parts, each = [], []
    for batch in feed:
        progress.draws = batch.draws
        waited += time.perf_counter() - since
        part, losses = forward_backward(trainee, config, batch, between)
        if not batch.padding:
            each.append(losses)
            loss = loss + part
            samples += len(batch.draws)
            parts.append((batch.draws, part))
        since = time.perf_counter()
    return Gathered(loss=loss, samples=samples, waited=waited, parts=tuple(parts), each=tuple(each))


def _is_due(setup: Setup, done: int) -> bool:
    """Whether something is due after so many steps."""
    return done == setup.steps or bool(due_after(setup, done)) or _is_checkpoint(setup, done)


def _is_checkpoint(setup: Setup, done: int) -> bool:
    return done == setup.steps or setup.interval(setup.config.checkpoint.every).is_due(done)


def _pause(run: _Run, saver: Saver, *, stopping: bool, drawing: bool) -> bool:
    """Saves, validates, samples and evaluates after a step, if due or asked for. Whether the run stops here."""
    setup, done = run.setup, run.progress.done
    if stopping or _is_checkpoint(setup, done):
        _save(run, saver)
    if stopping or done == setup.steps:
        saver.wait()
    if stopping and done < setup.steps:
        run.log("stopped", done)
        return True
    if setup.evaluates(done):
        saver.wait()  # what evaluates reads which weights the checkpoint has
    if drawing:
        run.requests.sample.clear()  # before, since another may come while these are drawn
    evaluate(run.trainee, run.rows, setup, run.folder, run.log, run.progress, requested=("sample",) if drawing else ())
    return False


def _save(run: _Run, saver: Saver) -> None:
    """Saves a checkpoint of the last finished step, after syncing the log to disk; it may be written later. All ranks
    call this, if the model is divided; else the first one may be alone."""
    setup, trainee, ranks, step = run.setup, run.trainee, run.ranks, run.progress.done
    settings, state = setup.config.checkpoint, state_of(setup, step)
    beside, keep = checkpoint_bytes(setup) <= settings.copy_gib * (1 << 30), run.storage.local_keep(settings.keep)

    def saved() -> None:
        run.progress.saved = step
        if ranks.first:
            run.storage.saved()

    run.log.sync()
    if in_pieces(trainee, setup.config):
        saver.save_pieces(run.folder, state, own_files(trainee, setup, step), keep, ranks, beside=beside, done=saved)
    else:
        with snapshot(trainee) as tensors:
            if tensors is not None:
                saver.save(run.folder, state, checkpoint_files(trainee, setup, step, tensors), keep, beside=beside,
                           done=saved)
        if not ranks.first:
            saved()
    if ranks.first:
        saver.then(partial(run.log.show, run.log.record("checkpoint", step, folder=f"checkpoints/{step_name(step)}")))
        _plot(run)


def _rescue(run: _Run, saver: Saver, error: Exception) -> None:
    """Saves the steps since the last checkpoint after a failure: of a whole model on the first rank, and of a divided
    one if no rank is missing, since all have the same error."""
    progress = run.progress
    possible = isinstance(error, NotFinite) if run.trainee.model.sharded else run.ranks.first
    with suppress(Exception):  # what failed first is told
        if not progress.whole or not possible:
            saver.leave()
            return
        with suppress(Exception):  # if it fails, it may fail again
            saver.wait()
        if progress.done > progress.saved:
            _save(run, saver)
            saver.wait()


def _begin(run: _Run, texts: Iterable[str], existing: frozenset[str], offload: int) -> None:
    """Logs what the run begins with, and evaluates the weights. `texts`: warnings of the trial and the run's directory;
    `existing`: events of this step that the log of a resumed run already has; `offload`: blocks in host memory."""
    setup, log, ranks, device, first = run.setup, run.log, run.ranks, run.progress.device, run.progress.done
    before, dtype = log.begun, str(run.trainee.denoiser.dtype).removeprefix("torch.")
    log("start", first, steps=setup.steps, steps_per_epoch=setup.plan.steps_per_epoch, device=str(device),
        parameters=setup.model.numbers, ranks=ranks.world, dtype=dtype, **({"offload": offload} if offload else {}))
    if before.get("dtype") not in (None, dtype):
        log("warning", first, text=f"forward passes are now computed in {dtype}, and were in {before['dtype']}: "
            f"precision is '{setup.config.precision}', and this device is {device}")
    if before.get("ranks") not in (None, ranks.world) and has_dropout(run.trainee.denoiser.model):
        log("warning", first, text=f"the number of processes is {ranks.world}, and was {before['ranks']}: "
            "dropout draws differ, so the steps are not those that one number would have made")
    if text := waits_shortened(setup.config, ranks):
        log("warning", first, text=text)
    for text in texts:
        log("warning", first, text=text)
    if first and "checkpoint" not in existing:
        log("checkpoint", first, folder=f"checkpoints/{step_name(first)}")
    keep = run.storage.local_keep(setup.config.checkpoint.keep)
    if first and ranks.first:  # the run may have ended after it saved one, before it removed the oldest
        files.remove_old(run.folder, keep)
    evaluate(run.trainee, run.rows, setup, run.folder, log, run.progress,
             existing=frozenset(ranks.gather(sorted(existing))[0]))


def _end(run: _Run) -> None:
    """Writes the result, RUN/lora.safetensors or the denoiser in diffusers' layout, and RUN/README.md."""
    setup, folder, step, result = run.setup, run.folder, max(run.progress.done, run.setup.steps), result_name(run.setup)
    with snapshot(run.trainee) as tensors:
        if tensors is not None and setup.config.method == "lora":
            for part in result_files(run.trainee, setup, step, result, tensors):
                files.write_file(folder / part.name, part)
        elif tensors is not None:
            weights = "diffusion_pytorch_model.safetensors"
            files.write_folder(folder / result, result_files(run.trainee, setup, step, weights, tensors))
    if run.ranks.first:
        picture = f"samples/step-{step:06d}.png"
        text = card(setup, step, result, picture if (folder / picture).is_file() else None)
        write_atomic(folder / "README.md", text.encode())
        _plot(run)  # with the last validation
    run.log("end", step, result=result, **_proposal(run))
    with run.log.phase("waiting for uploads"):
        run.storage.finish()


def _proposal(run: _Run) -> dict[str, Any]:
    """Which of several evaluated checkpoints to take, and why. A failure is a warning."""
    setup = run.setup
    try:
        found = proposed(setup, run.folder, run.log, run.progress.device) if run.ranks.first and setup.vision else None
    except Exception as error:
        run.log("warning", run.progress.done, text=f"no proposal: {type(error).__name__}: {first_line(error)}")
        return {}
    return {} if found is None else {"proposal": {"checkpoint": found.name, "reason": found.reason}}


def _plot(run: _Run) -> None:
    """Draws RUN/loss.png. A failure is a warning."""
    if not run.setup.config.log.plot:
        return
    try:
        write_atomic(run.folder / "loss.png", loss_png(run.log.curve, run.log.held_out, run.setup.steps))
    except Exception as error:
        run.log("warning", run.progress.done, text=f"no loss.png: {type(error).__name__}: {first_line(error)}")
