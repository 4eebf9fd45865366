"""The training loop, in plain functions without a trainer class.

A step's gradient is the sum over its samples, in one or more micro-batches, divided by batch_size: a sample counts no
more in a step that a short bucket leaves incomplete. Besides the tensors, the state is one integer: every random draw
is keyed by its step, so step k of a resumed run equals step k of an uninterrupted run.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from prep.batching.rng import draw_key
from prep.errors import EXIT_INTERRUPTED, first_line
from prep.fs.atomic import write_atomic
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.device import seed as seed_device
from prep.loader.device import to_device, to_host
from prep.loader.noise import Noise
from prep.loader.rows import Rows
from prep.models.device.memory import is_out_of_memory
from train.card import card
from train.evaluate import evaluate, is_due
from train.failures import NotFinite, Progress, check_finite, not_compiled, of_disk, out_of_memory
from train.models.size_shift import chances_by_bucket
from train.objectives.forward import forward, sample_losses
from train.parallel.ranks import ALONE, RankLost, Ranks
from train.runs import checkpoint_files as files
from train.runs.checkpoint import step_name
from train.runs.directory import checkpoint_bytes, claim_run
from train.runs.log import Log
from train.runs.loss_plot import loss_png
from train.runs.resume import Start
from train.setup import Setup
from train.state import (
    Held,
    TrainState,
    add_gradients,
    apply_gradients,
    checkpoint_files,
    clip_gradients,
    create_state,
    held,
    in_pieces,
    own_files,
    restore,
    result_files,
    result_name,
    state_of,
)


def train(setup: Setup, run: Path, device: torch.device, log: Log, start: Start | None = None,
          ranks: Ranks = ALONE) -> None:
    """Trains to the last step, from `start` or from the beginning, and writes the result.

    Several `ranks` train together: each calls this, and the first one writes.

    On Ctrl-C (or SIGTERM), finishes the step, saves a checkpoint and raises `KeyboardInterrupt`. After a failure
    outside of a step's update, saves a checkpoint of the last finished step. Raises `Problem`.
    """
    first = 0 if start is None else start.state.step
    progress = Progress(done=first, kept=first, device=device)
    explained = partial(_explained, setup, run, progress)
    try:
        with log.phase("loading the model"), ranks.together(explained):
            trainee = create_state(setup, device, ranks)
            if start is not None:
                restore(trainee, start)
        with log.phase("trying the largest bucket"), ranks.passing(explained):
            _try_largest(trainee, setup, progress)
        moved: list[str] = []
        there = frozenset[str]()
        with ranks.together(explained):
            if ranks.first:
                moved = claim_run(run, setup, step=None if start is None else first)
                there = log.rewind(first)
        if in_pieces(trainee, setup):
            with ranks.together(explained):
                files.require_shared(run, files.Together(ranks=ranks, explained=explained))
        _train(trainee, setup, run, log, progress, there, moved)
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
    if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
        return out_of_memory(setup, progress)
    return not_compiled(error) if setup.config.compile else error


def _train(trainee: TrainState, setup: Setup, run: Path, log: Log, progress: Progress, there: frozenset[str],
           moved: list[str]) -> None:
    """Runs all remaining steps and writes the result.

    `there`: events of the first step that a resumed run's log already has. `moved`: checkpoints that were set aside.
    """
    first, rows = progress.done, Rows(setup.index)
    log("start", first, steps=setup.steps, steps_per_epoch=setup.plan.steps_per_epoch, device=str(progress.device),
        parameters=setup.numbers, ranks=trainee.ranks.world)
    for name in moved:
        log("warning", first, text=f"a newer checkpoint was set aside: checkpoints/{name}")
    if first and "checkpoint" not in there:
        log("checkpoint", first, folder=f"checkpoints/{step_name(first)}")
    evaluate(trainee, rows, setup, run, log, first, frozenset(trainee.ranks.gather(sorted(there))[0]))
    _run_steps(trainee, rows, setup, run, log, progress)
    with trainee.ranks.together():
        with held(trainee) as found:
            if found is not None:
                _write_result(trainee, setup, run, max(first, setup.steps), found)
        if trainee.ranks.first:
            _plot(setup, run, log)  # with the last validation
    log("end", max(first, setup.steps), result=result_name(setup))


def _run_steps(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, progress: Progress) -> None:
    """Runs the steps. After each, saves a checkpoint if due, then validates and samples."""
    with (_stopping() as stop, files.Saver() as saver,
          closing(_steps(trainee, rows, setup, run, log, progress)) as steps):
        try:
            for done in steps:
                stopping = trainee.ranks.any(stop.is_set())
                with trainee.ranks.together():
                    saver.check()
                    if stopping or done == setup.steps or is_due(setup.config.checkpoint.every, done):
                        _save(trainee, setup, run, log, progress, saver)
                    if stopping or done == setup.steps:
                        saver.wait()
                if stopping and done < setup.steps:
                    log("stopped", done)
                    if not trainee.ranks.first:
                        raise SystemExit(EXIT_INTERRUPTED)
                    raise KeyboardInterrupt
                evaluate(trainee, rows, setup, run, log, done)
        except (Exception, SystemExit) as error:  # no failure may lose the steps since the last checkpoint
            with suppress(Exception):  # report the first failure
                saver.wait()
            able = not isinstance(error, RankLost) if trainee.ranks.sharded else trainee.ranks.first
            if able and progress.whole and progress.done > progress.kept:
                with suppress(Exception):
                    _save(trainee, setup, run, log, progress, saver)
                    saver.wait()
            if isinstance(error, NotFinite):
                raise error.explained(rows, progress, setup.config) from None
            raise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gathered:
    """Sums over this rank's part of a step; the gradients are in the parameters."""

    loss: Tensor  # of its samples
    samples: int
    waited: float  # seconds for data
    parts: tuple[tuple[tuple[draws.Draw, ...], Tensor], ...]  # draws and loss of each forward pass
    each: tuple[Tensor, ...]  # the losses of its samples, before any weight


def _steps(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, progress: Progress) -> Generator[int]:
    """Runs the optimizer steps; yields the number of finished steps after each."""
    config, timesteps, first, ranks = setup.config, trainee.denoiser.timesteps, progress.done, trainee.ranks
    share = draws.Share(rank=ranks.rank, world=ranks.world, level=ranks.sharded)
    explained = partial(_explained, setup, run, progress)
    requests = draws.training(rows.index, setup.plan, first, setup.steps, dropout=config.caption_dropout,
                              timesteps=timesteps, chances=chances_by_bucket(config.timesteps, setup.shifts),
                              noise=Noise(**asdict(config.noise)), most=config.micro_batch,
                              share=share)
    pinned = trainee.denoiser.device.type == "cuda"
    with batches(rows, requests, masked=setup.masked, pinned=pinned) as feed:
        for step in range(first, setup.steps):
            begun = time.perf_counter()
            _seed(config.seed, step, ranks.rank, progress.device)
            count = draws.passes(setup.plan, step, most=config.micro_batch, share=share)
            with ranks.passing(explained):
                gathered = _gather(trainee, setup, ranks.each(islice(feed, count), explained), progress)
            summed, samples = ranks.total([float(gathered.loss), gathered.samples])
            loss = summed / samples
            showings = _showings(gathered, ranks)  # at once: later it would wait for the update
            add_gradients(trainee)
            norm = clip_gradients(trainee, setup)
            scale = None if trainee.scale is None else trainee.scale.value
            skipped = trainee.scale is not None and trainee.scale.overflowed(loss, norm)
            with ranks.together():
                if not skipped:
                    check_finite(loss, norm, gathered.parts, ranks)
            progress.whole = False
            rate = apply_gradients(trainee, setup, step, skipped=skipped)
            progress.done, progress.whole = step + 1, True
            seconds = time.perf_counter() - begun
            if ranks.first:
                log.losses.add(step + 1, setup.index, showings)
            log("step", step + 1, loss=loss, lr=rate, grad_norm=norm, samples=int(samples), seconds=seconds,
                wait=gathered.waited, samples_per_second=samples / seconds, **_memory(progress.device),
                **({} if scale is None else {"loss_scale": scale, "skipped": skipped}))
            yield step + 1


def _memory(device: torch.device) -> dict[str, int]:
    """The most memory that tensors have taken so far on a GPU."""
    return {"memory": torch.cuda.max_memory_allocated(device)} if device.type == "cuda" else {}


def _showings(gathered: _Gathered, ranks: Ranks) -> list[tuple[int, int, float]]:
    """Sample, timestep and loss of each showing of the step, on all ranks."""
    losses = to_host(torch.cat(gathered.each)).tolist() if gathered.each else []
    shots = [shot for shots, _ in gathered.parts for shot in shots]
    mine = [(shot.sample, shot.timestep, loss) for shot, loss in zip(shots, losses, strict=True)]
    return [showing for showings in ranks.gather(mine) for showing in showings]


def _gather(trainee: TrainState, setup: Setup, feed: Iterator[Batch], progress: Progress) -> _Gathered:
    """Runs forward and backward over every batch of `feed`: one rank's part of one step."""
    loss = to_device(torch.zeros(()), trainee.denoiser.device)
    samples, waited, asked = 0, 0.0, time.perf_counter()
    parts, each = [], []
    for batch in feed:
        progress.shots = batch.shots
        waited += time.perf_counter() - asked
        progress.whole = not trainee.ranks.sharded  # no checkpoint without the rank that fails in a pass
        part, losses = _pass(trainee, setup, batch)
        progress.whole = True
        if not batch.idle:
            each.append(losses)
            loss = loss + part
            samples += len(batch.shots)
            parts.append((batch.shots, part))
        asked = time.perf_counter()
    return _Gathered(loss=loss, samples=samples, waited=waited, parts=tuple(parts), each=tuple(each))


def _pass(trainee: TrainState, setup: Setup, batch: Batch) -> tuple[Tensor, Tensor]:
    """The weighted losses of a micro-batch, summed, and each sample's, after adding its share to the step's gradients.
    """
    settings = setup.config.loss
    given = forward(trainee.denoiser, batch.to(trainee.denoiser.device), trainee.latents, settings)
    each_B = sample_losses(given, settings)
    loss = (each_B * given.weight_B).sum()
    times = 1.0 if trainee.scale is None else trainee.scale.value
    (loss * 0.0 if batch.idle else loss * times / setup.config.batch_size).backward()  # type: ignore[no-untyped-call]
    return loss.detach(), each_B.detach()


def _try_largest(trainee: TrainState, setup: Setup, progress: Progress) -> None:
    """One forward and backward pass over the largest bucket, with memory held for what the optimizer keeps.

    Too little memory then shows at once, and not in the step that meets this bucket first. Nothing else changes.
    """
    if progress.done >= setup.steps:
        return
    somewhere = next(iter(trainee.denoiser.parameters.values()))
    size = setup.state_bytes // (trainee.ranks.world if trainee.ranks.sharded else 1)
    moments = somewhere.new_empty(0 if trainee.optimizer.state else size, dtype=torch.uint8)
    request = draws.trial(setup.index, setup.plan, setup.config.micro_batch, trainee.ranks.world)
    progress.shots, progress.trying = request.shots, True
    with batches(Rows(setup.index), iter([request]), masked=setup.masked, pinned=False) as feed:
        for batch in trainee.ranks.each(feed):
            _pass(trainee, setup, batch)
    trainee.optimizer.zero_grad(set_to_none=True)
    if trainee.shards is not None:
        trainee.shards.drop_gradients()
    progress.shots, progress.trying = (), False
    del moments


def _seed(seed: int, step: int, rank: int, device: torch.device) -> None:
    """Seeds torch's generators by step and rank, since LoRA dropout draws from it."""
    seed_device(draw_key(seed, step, b"", rank, "dropout-mask")[0], device)


def _save(trainee: TrainState, setup: Setup, run: Path, log: Log, progress: Progress, saver: files.Saver) -> None:
    """Saves a checkpoint of the last finished step, after syncing the log to disk; it may be written later. All ranks
    call this."""
    step, ranks = progress.done, trainee.ranks
    if in_pieces(trainee, setup):
        if ranks.first:
            log.sync()
        together = files.Together(ranks=ranks, explained=partial(_explained, setup, run, progress))
        files.save_pieces(run, state_of(setup, step), own_files(trainee, setup, step), setup.config.checkpoint.keep,
                          together)
    else:  # of a divided model all know whether the first rank has written it
        (ranks if ranks.sharded else ALONE).share(partial(_save_whole, trainee, setup, run, log, progress, saver))
    if ranks.sharded or not ranks.first:
        progress.kept = step
    if ranks.first:
        log("checkpoint", step, folder=f"checkpoints/{step_name(step)}")
        _plot(setup, run, log)


def _save_whole(trainee: TrainState, setup: Setup, run: Path, log: Log, progress: Progress, saver: files.Saver) -> None:
    """Saves a checkpoint that the first rank writes."""
    step, settings = progress.done, setup.config.checkpoint
    small = checkpoint_bytes(setup) <= settings.copy_gib * (1 << 30)
    with held(trainee) as found:
        if found is not None:
            log.sync()
            saver.save(run, state_of(setup, step), checkpoint_files(trainee, setup, step, found), settings.keep,
                       beside=small and not trainee.ranks.sharded, done=partial(setattr, progress, "kept", step))


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
def _stopping() -> Iterator[threading.Event]:
    """Yields an event that the first Ctrl-C or SIGTERM sets; the second one raises `KeyboardInterrupt` at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may handle signals
        yield stop
        return

    def ask(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
