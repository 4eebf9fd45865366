"""The training loop: one straight line, no trainer class.

A step is one or more micro-batches whose gradients are summed and divided once. State is one integer beside the
tensors: every draw is keyed, so step k of a resumed run is step k of one that never stopped.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from prep.batching.rng import draw_key
from prep.errors import CacheError, ConfigError, Problem, first_line
from prep.fs.atomic import make_dirs, write_atomic
from prep.loader import draws
from prep.loader.batches import Batch, batches
from prep.loader.device import to_device
from prep.loader.rows import Rows
from train.config.load import as_table
from train.objectives.forward import forward, latents_of, loss_sums
from train.optim import ema
from train.runs import checkpoint
from train.runs.checkpoint import State
from train.runs.log import Log
from train.sampling.grid import grid_png
from train.sampling.prompts import current
from train.sampling.sampler import pictures
from train.setup import Setup
from train.state import TrainState, apply_gradients, checkpoint_files, create_state, restore, result_files
from train.validate import validate


def train(setup: Setup, run: Path, device: torch.device, log: Log, *, resume: bool) -> None:
    """Trains to the last step, from the newest checkpoint of `run` where `resume` finds one, and writes the result.

    On Ctrl-C (or SIGTERM) the step is finished, a checkpoint kept, and `KeyboardInterrupt` raised.
    """
    with log.phase("loading the model"):
        trainee, rows = create_state(setup, device), Rows(setup.index)
    first = _resume(trainee, setup, run) if resume else 0
    log.rewind(first)
    log("start", first, steps=setup.steps, steps_per_epoch=setup.plan.steps_per_epoch, device=str(device),
        parameters=sum(value.numel() for value in trainee.denoiser.parameters.values()))
    if first == 0:
        _evaluate(trainee, rows, setup, run, log, 0)
    _run_steps(trainee, rows, setup, run, log, first)
    _write_result(trainee, setup, run, max(first, setup.steps))
    log("end", max(first, setup.steps), result=_result(setup))


def _run_steps(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, first: int) -> None:
    """The steps from `first` on, with what is due after each: the checkpoint before anything that may fail."""
    done = kept = first
    with _stopping() as stop, closing(_steps(trainee, rows, setup, log, first)) as steps:
        try:
            for done in steps:
                if stop.is_set() or done == setup.steps or _due(setup.config.checkpoint.every, done):
                    _save(trainee, setup, run, log, done)
                    kept = done
                if stop.is_set() and done < setup.steps:
                    log("stopped", done)
                    raise KeyboardInterrupt
                _evaluate(trainee, rows, setup, run, log, done)
        except CacheError:  # a damaged row must not cost the steps since the last checkpoint
            if done > kept:
                _save(trainee, setup, run, log, done)
            raise


@dataclass(frozen=True, kw_only=True, slots=True)
class _Gathered:
    """What the micro-batches of a step summed up to; their gradients are in the parameters."""

    error: Tensor
    weight: Tensor
    samples: int
    waited: float  # seconds for data


def _steps(trainee: TrainState, rows: Rows, setup: Setup, log: Log, first: int) -> Generator[int]:
    """Makes one optimizer step after another; yields how many are done."""
    config, timesteps = setup.config, trainee.denoiser.timesteps
    requests = draws.training(rows.index, setup.plan, first, setup.steps, dropout=config.caption_dropout,
                              timesteps=timesteps)
    pinned = trainee.denoiser.device.type == "cuda"
    with batches(rows, requests, masked=config.loss.masked, pinned=pinned) as feed:
        for step in range(first, setup.steps):
            begun = time.perf_counter()
            _seed(config.seed, step)
            gathered = _gather(trainee, setup, feed)
            loss = float(gathered.error) / max(float(gathered.weight), 1e-12)
            norm, rate = apply_gradients(trainee, setup, step, gathered.weight)
            seconds = time.perf_counter() - begun
            log("step", step + 1, loss=loss, lr=rate, grad_norm=norm, samples=gathered.samples, seconds=seconds,
                wait=gathered.waited, samples_per_second=gathered.samples / seconds)
            _check_finite(loss, norm, step + 1)
            yield step + 1


def _gather(trainee: TrainState, setup: Setup, feed: Iterator[Batch]) -> _Gathered:
    """Forward and backward of every micro-batch of one step."""
    denoiser, settings, latents = trainee.denoiser, setup.config.loss, latents_of(setup.manifest)
    error = to_device(torch.zeros(()), denoiser.device)
    weight, samples, waited, last = torch.zeros_like(error), 0, 0.0, False
    while not last:
        asked = time.perf_counter()
        batch = next(feed)
        waited += time.perf_counter() - asked
        sums = loss_sums(forward(denoiser, batch.to(denoiser.device), latents, settings), settings)
        sums.error.backward()  # type: ignore[no-untyped-call]
        error, weight = error + sums.error.detach(), weight + sums.weight
        samples, last = samples + len(batch.shots), batch.last
    return _Gathered(error=error, weight=weight, samples=samples, waited=waited)


def _seed(seed: int, step: int) -> None:
    """LoRA's dropout draws from torch's own generator: it too is a function of the step alone."""
    torch.manual_seed(draw_key(seed, step, b"", 0, "dropout-mask")[0])


def _check_finite(loss: float, norm: float, step: int) -> None:
    if not (math.isfinite(loss) and math.isfinite(norm)):
        raise ConfigError(f"loss is {loss} and the gradient's norm {norm} in step {step}, expected finite numbers",
                          hint="a smaller optimizer.lr, in another RUN (-o); --resume would come to this step again")


def _evaluate(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, step: int) -> None:
    """Validates and samples when it is time, with the moving average where there is one."""
    config = setup.config
    with ema.swapped_in(trainee.shadow, trainee.denoiser.parameters):
        if config.validation.every and (_due(config.validation.every, step) or step in (0, setup.steps)):
            with log.phase(f"validating step {step}"):
                found = validate(trainee.denoiser, rows, setup)
            if found is not None:
                log("validation", step, loss=found.loss, timesteps=found.timesteps, losses=found.losses,
                    samples=found.samples)
        if config.sample.every and (_due(config.sample.every, step) or step in (0, setup.steps)):
            with log.phase(f"sampling step {step}"):
                _sample(trainee, rows, setup, run, log, step)


def _sample(trainee: TrainState, rows: Rows, setup: Setup, run: Path, log: Log, step: int) -> None:
    """Pictures of the prompts as they are now; whatever is wrong with them is a warning, and training goes on."""
    try:
        found = current(rows.index)
        for warning in found.warnings:
            log("warning", step, text=warning)
        if not found.prompts:
            return
        made = pictures(trainee.denoiser, rows, setup.model, found.prompts, setup.config.sample)
        path = run / "samples" / f"step-{step:06d}.png"
        make_dirs(path.parent)
        labels = [prompt.prompt for prompt in found.prompts]
        write_atomic(path, grid_png(made, labels, math.ceil(math.sqrt(len(made)))))
    except (Problem, OSError, torch.OutOfMemoryError) as problem:
        log("warning", step, text=f"no sample pictures: {first_line(problem)}")
        return
    log("sample", step, picture=path.relative_to(run).as_posix())


def _save(trainee: TrainState, setup: Setup, run: Path, log: Log, step: int) -> None:
    state = State(step=step, manifest=setup.manifest.digest, config=as_table(setup.config))
    folder = checkpoint.save(run, state, checkpoint_files(trainee, setup, step), setup.config.checkpoint.keep)
    log("checkpoint", step, folder=folder.relative_to(run).as_posix())


def _resume(trainee: TrainState, setup: Setup, run: Path) -> int:
    """Restores the newest whole checkpoint, which `rundir.claim` has compared, and returns its step; 0 without one."""
    folders = checkpoint.list_checkpoints(run)
    if not folders:
        return 0
    state = checkpoint.read_state(folders[-1])
    restore(trainee, setup, folders[-1])
    return state.step


def _write_result(trainee: TrainState, setup: Setup, run: Path, step: int) -> None:
    """Writes what the run is for: RUN/lora.safetensors, or RUN/unet/ as diffusers has it."""
    if setup.config.method == "lora":
        for part in result_files(trainee, setup, step, _result(setup)):
            checkpoint.write_file(run / part.name, part)
    else:
        whole = result_files(trainee, setup, step, "diffusion_pytorch_model.safetensors")
        checkpoint.write_folder(run / _result(setup), whole)


def _result(setup: Setup) -> str:
    return "lora.safetensors" if setup.config.method == "lora" else "unet"


def _due(every: int, step: int) -> bool:
    return every > 0 and step > 0 and step % every == 0


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
