"""The training loop: one straight line, no trainer class.

A step is one or more micro-batches whose gradients are summed and divided once. State is one integer beside the
tensors: every draw is keyed, so step k of a resumed run is step k of one that never stopped.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from prep.batching.rng import draw_key
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.device import to_device
from prep.loader.rows import Rows
from train.evaluate import evaluate, is_due
from train.failures import NotFinite, Progress, check_finite, is_out_of_memory, of_disk, out_of_memory
from train.objectives.forward import forward, latents_of, loss_sums
from train.runs import checkpoint_files as files
from train.runs.directory import RESULTS, claim_run
from train.runs.log import Log
from train.runs.resume import Start
from train.setup import Setup
from train.state import (
    TrainState,
    apply_gradients,
    checkpoint_files,
    create_state,
    restore,
    result_files,
    scale_gradients,
    state_of,
)


def train(setup: Setup, run: Path, device: torch.device, log: Log, start: Start | None = None) -> None:
    """Trains to the last step, from `start` or from the beginning, and writes the result.

    On Ctrl-C (or SIGTERM) the step is finished, a checkpoint saved, and `KeyboardInterrupt` raised. Whatever fails
    before a step's update costs no finished step: a checkpoint of the last one is saved. Raises `Problem`.
    """
    first = 0 if start is None else start.state.step
    progress = Progress(done=first, kept=first, device=device)
    try:
        with log.phase("loading the model"):
            trainee = create_state(setup, device)
            if start is not None:
                restore(trainee, start)
        moved = claim_run(run, setup, step=None if start is None else first)
        there = log.rewind(first)
        _train(trainee, setup, run, log, progress, there, moved)
    except BrokenPipeError:  # nobody reads what we print: no matter of the run's disk
        raise
    except OSError as error:
        raise of_disk(error, run, progress) from error
    except (RuntimeError, MemoryError) as error:
        if is_out_of_memory(error):
            raise out_of_memory(setup, progress) from error
        raise


def _train(trainee: TrainState, setup: Setup, run: Path, log: Log, progress: Progress, there: frozenset[str],
           moved: list[str]) -> None:
    """The run from its first step on. `there`: what a resumed run's log has of that step already."""
    first, rows = progress.done, Rows(setup.index)
    log("start", first, steps=setup.steps, steps_per_epoch=setup.plan.steps_per_epoch, device=str(progress.device),
        parameters=sum(value.numel() for value in trainee.denoiser.parameters.values()))
    for name in moved:
        log("warning", first, text=f"a newer checkpoint was set aside: checkpoints/{name}")
    if first and "checkpoint" not in there:
        log("checkpoint", first, folder=f"checkpoints/step-{first:06d}")
    evaluate(trainee, rows, setup, run, log, first, there)
    _run_steps(trainee, rows, setup, run, log, progress)
    _write_result(trainee, setup, run, max(first, setup.steps))
    log("end", max(first, setup.steps), result=RESULTS[setup.config.method])


def _run_steps(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, progress: Progress) -> None:
    """The steps, with what is due after each: the checkpoint before anything that may fail."""
    with _stopping() as stop, closing(_steps(trainee, rows, setup, log, progress)) as steps:
        try:
            for done in steps:
                if stop.is_set() or done == setup.steps or is_due(setup.config.checkpoint.every, done):
                    _save(trainee, setup, run, log, progress)
                if stop.is_set() and done < setup.steps:
                    log("stopped", done)
                    raise KeyboardInterrupt
                evaluate(trainee, rows, setup, run, log, done)
        except Exception as error:  # whatever it is, it must not cost the steps since the last checkpoint
            if progress.whole and progress.done > progress.kept:
                with suppress(OSError, RuntimeError):  # the first failure is the one to tell
                    _save(trainee, setup, run, log, progress)
            if isinstance(error, NotFinite):
                raise error.explained(rows, progress) from None
            raise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gathered:
    """What the micro-batches of a step summed up to; their gradients are in the parameters."""

    error: Tensor
    weight: Tensor
    samples: int
    waited: float  # seconds for data
    parts: tuple[tuple[tuple[draws.Draw, ...], Tensor], ...]  # what each forward pass was of, and its error


def _steps(trainee: TrainState, rows: Rows, setup: Setup, log: Log, progress: Progress) -> Generator[int]:
    """Makes one optimizer step after another; yields how many are done."""
    config, timesteps, first = setup.config, trainee.denoiser.timesteps, progress.done
    requests = draws.training(rows.index, setup.plan, first, setup.steps, dropout=config.caption_dropout,
                              timesteps=timesteps, most=config.micro_batch)
    pinned = trainee.denoiser.device.type == "cuda"
    with batches(rows, requests, masked=setup.masked, pinned=pinned) as feed:
        for step in range(first, setup.steps):
            begun = time.perf_counter()
            _seed(config.seed, step)
            gathered = _gather(trainee, setup, feed, progress)
            loss = float(gathered.error) / max(float(gathered.weight), 1e-12)
            norm = scale_gradients(trainee, setup, gathered.weight)
            check_finite(loss, norm, gathered.parts)
            progress.whole = False
            rate = apply_gradients(trainee, setup, step)
            progress.done, progress.whole = step + 1, True
            seconds = time.perf_counter() - begun
            log("step", step + 1, loss=loss, lr=rate, grad_norm=norm, samples=gathered.samples, seconds=seconds,
                wait=gathered.waited, samples_per_second=gathered.samples / seconds)
            yield step + 1


def _gather(trainee: TrainState, setup: Setup, feed: Iterator[Batch], progress: Progress) -> _Gathered:
    """Forward and backward of every micro-batch of one step."""
    denoiser, settings, latents = trainee.denoiser, setup.config.loss, latents_of(setup.manifest)
    error = to_device(torch.zeros(()), denoiser.device)
    weight, samples, waited, last = torch.zeros_like(error), 0, 0.0, False
    parts = []
    while not last:
        asked = time.perf_counter()
        batch = next(feed)
        progress.shots = batch.shots
        waited += time.perf_counter() - asked
        sums = loss_sums(forward(denoiser, batch.to(denoiser.device), latents, settings), settings)
        sums.error.backward()  # type: ignore[no-untyped-call]
        error, weight = error + sums.error.detach(), weight + sums.weight
        samples, last = samples + len(batch.shots), batch.last
        parts.append((batch.shots, sums.error.detach()))
    return _Gathered(error=error, weight=weight, samples=samples, waited=waited, parts=tuple(parts))


def _seed(seed: int, step: int) -> None:
    """LoRA's dropout draws from torch's own generator: it too is a function of the step alone."""
    torch.manual_seed(draw_key(seed, step, b"", 0, "dropout-mask")[0])


def _save(trainee: TrainState, setup: Setup, run: Path, log: Log, progress: Progress) -> None:
    """Saves a checkpoint of the last finished step; the log's lines up to it are on the disk before."""
    step = progress.done
    log.sync()
    folder = files.save(run, state_of(setup, step), checkpoint_files(trainee, setup, step),
                        setup.config.checkpoint.keep)
    progress.kept = step
    log("checkpoint", step, folder=folder.relative_to(run).as_posix())


def _write_result(trainee: TrainState, setup: Setup, run: Path, step: int) -> None:
    """Writes what the run is for: RUN/lora.safetensors, or RUN/unet/ as diffusers has it."""
    result = RESULTS[setup.config.method]
    if setup.config.method == "lora":
        for part in result_files(trainee, setup, step, result):
            files.write_file(run / part.name, part)
    else:
        files.write_folder(run / result, result_files(trainee, setup, step, "diffusion_pytorch_model.safetensors"))


@contextmanager
def _stopping() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C or SIGTERM sets; the second one ends the program at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only it may handle signals
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
