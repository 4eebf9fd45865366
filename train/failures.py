"""Turns failures of a run into errors with hints: out of memory, non-finite numbers, disk errors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from prep.errors import CacheError, ConfigError, OutOfMemoryError, Problem, first_line, from_system
from prep.formatting import join_texts
from prep.fs.mirror import more_room
from prep.loader.draws import Draw
from prep.loader.rows import Rows
from prep.manifest.commands import encode_command
from prep.models.device.memory import is_out_of_memory
from prep.training.schema import Config
from train.parallel.ranks import ALONE, Ranks
from train.setup import Setup

NAMES = 5  # non-finite rows listed by name; further rows are only counted


@dataclass(kw_only=True, slots=True)
class Progress:
    """Progress of a run. Not frozen: the loop updates it."""

    device: torch.device
    done: int  # finished steps
    kept: int  # the step of the newest checkpoint
    world: int = 1  # processes that train together
    whole: bool = True  # False during an update: the weights then belong to no step
    trying: bool = False  # the largest bucket, before the first step
    shots: tuple[Draw, ...] = ()  # of the newest forward pass


class NotFinite(Exception):
    """The loss or the gradient of a step is not finite; the weights are still those of the previous step."""

    def __init__(self, loss: float, norm: float, shots: Iterable[Draw]) -> None:
        super().__init__()
        self.loss, self.norm, self.shots = loss, norm, tuple(shots)

    def explained(self, rows: Rows, progress: Progress, config: Config) -> Problem:
        """The error to raise: names the cache rows with non-finite values, or else suggests other settings."""
        step, index = progress.done + 1, rows.index
        if found := rows.not_finite(self.shots):
            names = [f"the {field} row of {index.samples.name(shot.sample)} (shard {ref.shard[:12]}, row "
                     f"{ref.row})" for field, shot, ref in found[:NAMES]]
            more = f" and {len(found) - NAMES} more" if len(found) > NAMES else ""
            return CacheError(f"step {step} cannot be trained: NaN or infinite values in {', '.join(names)}{more}",
                              hint="encoders never store such rows; to verify all rows and re-encode these, run "
                                   + encode_command(index.manifest, "--recheck"))
        names = [f"{index.samples.name(shot.sample)} at timestep {shot.timestep}" for shot in self.shots]
        again = (f", with --resume, which continues from step {progress.kept}, and --from if that already diverges"
                 if progress.kept else "")
        return ConfigError(f"loss is {self.loss} and the gradient norm {self.norm} in step {step}, expected finite "
                           f"numbers; it trained on {join_texts(names, NAMES)}; the weights are still those of step "
                           f"{progress.done}",
                           hint=f"try a smaller learning rate ({_rates(config)}){again}{_wider(config)}")


def _rates(config: Config) -> str:
    """What sets the learning rates."""
    own = config.method == "lora" and any("lr" in rule for rule in config.lora.layers)
    return "lr in lora.layers for the layers that have one there, --lr for the others" if own else "--lr"


def _wider(config: Config) -> str:
    """What helps where numbers are too large for float16, whose loss is scaled down before this is an error."""
    return "; or --precision bf16 or fp32 in another RUN: float16 ends at 65504" if config.precision == "fp16" else ""


def check_finite(loss: float, norm: float, parts: Iterable[tuple[tuple[Draw, ...], Tensor]],
                 ranks: Ranks = ALONE) -> None:
    """Raises `NotFinite` on every rank unless both are finite. `parts`: the shots of each forward pass of this rank,
    and the sum of their losses."""
    if math.isfinite(loss) and math.isfinite(norm):
        return
    passes = list(parts)
    guilty = [shots for shots, loss in passes if not math.isfinite(float(loss))]
    if not ranks.any(bool(guilty)):
        guilty = [shots for shots, _ in passes]
    told = ranks.gather([asdict(shot) for shots in guilty for shot in shots])
    raise NotFinite(loss, norm, (_draw(shot) for shots in told for shot in shots))


def _draw(facts: Mapping[str, Any]) -> Draw:
    """A draw from its fields, in which JSON has lists instead of tuples."""
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in facts.items()}
    return Draw(**values)


def out_of_memory(setup: Setup, progress: Progress) -> OutOfMemoryError:
    """The error for a failed allocation: says where it happened, and which options use less memory."""
    config = setup.config
    kept = f"--resume continues from step {progress.kept}: " if progress.kept else ""
    if not progress.shots:
        return OutOfMemoryError(f"{progress.device} has too little memory for the model",
                                hint=kept + " or ".join(_smaller_model(config)))
    bucket = setup.manifest.buckets[int(setup.index.samples.bucket[progress.shots[0].sample])]
    when = f"before step {progress.done + 1}, trying the largest bucket" if progress.trying else (
        f"in step {progress.done + 1}")
    return OutOfMemoryError(
        f"{progress.device} ran out of memory {when}, with {len(progress.shots)} samples of {bucket[0]}x{bucket[1]} "
        "in a forward pass", hint=kept + " or ".join(_less_memory(config, progress)))


@contextmanager
def telling_of_memory(device: torch.device, what: str, ranks: Ranks, *, less: str) -> Iterator[None]:
    """Forward passes between steps, whose failure is a warning unless `ranks` divide the model: then it ends the run,
    so that too little memory is told with what helps. `what` is done, and the options `less` need less memory."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if ranks.sharded and is_out_of_memory(error):
            raise OutOfMemoryError(f"{device} ran out of memory while {what}, and a divided model needs all processes",
                                   hint=f"--resume continues from the last step: {less}") from error
        raise


def not_compiled(error: Exception) -> Exception:
    """An error of torch.compile as a `Problem`; others as they are."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return error
    return of_compiler(getattr(error, "inner_exception", error))


def of_compiler(error: Exception) -> ConfigError:
    """What torch.compile raised as a `Problem`."""
    return ConfigError(f"compile is on, but torch.compile failed: {first_line(error)}",
                       hint="--no-compile, also with --resume; or install what it needs, like a C++ compiler")


def of_disk(error: OSError, run: Path, progress: Progress) -> Problem:
    """`error` as a `Problem` that names the run and the step to resume from."""
    problem = from_system(error, or_else=more_room(error.filename))
    hint = problem.hint
    if progress.kept:
        hint = hint.replace("run the same command again; finished work is kept",
                            f"add --resume to continue from step {progress.kept}")
    return type(problem)(f"{problem.message} (run {run}, after step {progress.done})", hint=hint)


def of_store(error: Problem, progress: Progress) -> Problem:
    """`error` of an object store, whose hint is to run the command again, with how a run that has begun goes on."""
    again = "run the same command again"
    if not progress.kept or again not in error.hint or f"{again} with" in error.hint:
        return error
    return type(error)(error.message, hint=error.hint.replace(again, f"{again} with --resume"))


def _less_memory(config: Config, progress: Progress) -> list[str]:
    """Options that use less memory, the mildest first."""
    # A resumed run keeps its plan: its ranks divide the micro-batches of before, and take passes of so many samples.
    world = 1 if progress.kept else progress.world
    smaller = [size for size in range(1, config.micro_batch)
               if config.batch_size % size == 0 and -(-size // world) < len(progress.shots)]
    found = [f"--micro-batch {smaller[-1]}"] if smaller else []
    if not config.gradient_checkpointing:
        found.append("--set gradient_checkpointing=true")
    return [*found, *_smaller_model(config)] if len(found) < 2 else found


def _smaller_model(config: Config) -> list[str]:
    if config.method == "full":
        return ["--method lora (in another RUN)"]
    if config.precision == "fp32":
        return ["--precision bf16 (in another RUN)"]
    if config.quantization == "none" and config.lora.kind == "lora" and not config.parallel.shard:
        return ["--set quantization=fp8 or nf4 (in another RUN)", "a device with more memory"]
    return ["a device with more memory", "smaller buckets: prep encode --resolution"]
