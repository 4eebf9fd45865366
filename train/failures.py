"""What failed in a run, as a message that helps: memory, numbers that are not finite, the disk, a store, the compiler.

The loop raises errors as they are, and says in `Progress` how far it was. `train run` turns them into messages here, in
one place (`explained`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from prep.batching.short import smaller_sizes
from prep.cache.remote.quota import NotFetched
from prep.errors import CacheError, ConfigError, OutOfMemoryError, Problem, first_line, from_system
from prep.formatting import format_bucket, join_texts
from prep.fs.remote.copies import more_room
from prep.fs.remote.errors import StoreError
from prep.loader.draws import Draw
from prep.loader.rows import Rows
from prep.manifest.commands import encode_command
from prep.models.device.memory import is_out_of_memory
from prep.models.device.offload import SHARED
from prep.training.schema import Config
from train.parallel.errors import RankFailed
from train.setup import Setup

TRYING = "trying the largest bucket"
BETWEEN = {"validation": "validating", "sample pictures": "drawing sample pictures", "evaluation": "evaluating"}
NAMES = 5  # non-finite rows listed by name; further rows are only counted


@dataclass(kw_only=True, slots=True)
class Progress:
    """Progress of a run. Not frozen: the loop updates it."""

    device: torch.device
    done: int = 0  # finished steps
    saved: int = 0  # the step of the newest checkpoint
    world: int = 1  # processes that train together
    whole: bool = True  # False during an update: the weights then belong to no step
    recomputes: bool = False  # whether gradient checkpointing is on, as far as the trial settled it
    during: str = ""  # what is computed besides steps: TRYING, or one of BETWEEN's
    draws: tuple[Draw, ...] = ()  # of the newest forward pass


class NotFinite(Exception):
    """The loss or the gradient of a step is not finite; the weights are still those of the previous step, if
    `Progress.whole`. `norm`: None, if the loss was looked at before there were gradients."""

    def __init__(self, loss: float, norm: float | None, draws: Iterable[Draw]) -> None:
        super().__init__()
        self.loss, self.norm, self.draws = loss, norm, tuple(draws)


@contextmanager
def explained(setup: Setup, run: Path, progress: Progress) -> Iterator[None]:
    """Training, whose errors become messages that say what helps: see `explanation`."""
    try:
        yield
    except Exception as error:
        # What ranks know of each other's errors stays around the one that is said.
        own = error.__cause__ if isinstance(error, RankFailed) and isinstance(error.__cause__, Exception) else error
        better = explanation(own, setup, run, progress)
        if better is own:
            raise
        if own is error:
            raise better from error
        raise error from better


def explanation(error: Exception, setup: Setup, run: Path, progress: Progress) -> Exception:
    """What is shown of an error, by its type and how far the run was; a bug stays what it is."""
    if isinstance(error, NotFinite):
        return _not_finite(error, setup, progress)
    if isinstance(error, BrokenPipeError):  # our output was closed: not an error of the run's disk
        return error
    if isinstance(error, OSError):
        return _of_disk(error, run, progress)
    if isinstance(error, StoreError | NotFetched):
        return _of_store(error, progress)
    if isinstance(error, RuntimeError | MemoryError) and is_out_of_memory(error):
        return _out_of_memory(setup, progress)
    if isinstance(error, ValueError) and "attn_mask" in str(error) and setup.config.attention != "native":
        return _no_masks(setup.config)
    return _not_compiled(error) if setup.config.compile else error


def _no_masks(config: Config) -> Problem:
    """The error for a kernel of attention that is given the mask of padded texts."""
    return ConfigError(f"attention is '{config.attention}', which takes no masks, but texts of one forward pass have "
                       "different lengths here", hint="--resume with --set attention=native, cudnn or xformers")


def _not_finite(error: NotFinite, setup: Setup, progress: Progress) -> Problem:
    """Names the cache rows with non-finite values, or else suggests other settings."""
    rows, config = Rows(setup.index), setup.config
    step, index = progress.done + 1, rows.index
    if damaged := rows.not_finite(error.draws):
        names = [f"the {field} row of {index.samples.name(draw.sample)} (shard {ref.shard[:12]}, row "
                 f"{ref.row})" for field, draw, ref in damaged[:NAMES]]
        more = f" and {len(damaged) - NAMES} more" if len(damaged) > NAMES else ""
        return CacheError(f"step {step} cannot be trained: NaN or infinite values in {', '.join(names)}{more}",
                          hint="encoders never store such rows; to verify all rows and re-encode these, run "
                               + encode_command(index.manifest, "--recheck"))
    names = [f"{index.samples.name(draw.sample)} at timestep {draw.timestep}" for draw in error.draws]
    again = (f", with --resume, which continues from step {progress.saved}, and --from if that already diverges"
             if progress.saved else "")
    norm = "" if error.norm is None else f" and the gradient norm {error.norm}"
    weights = (f"the weights are still those of step {progress.done}" if progress.whole else
               "full.fused_backward had updated the weights by then, so they are not saved")
    return ConfigError(f"loss is {error.loss}{norm} in step {step}, expected finite numbers; it trained on "
                       f"{join_texts(names, NAMES)}; {weights}",
                       hint=f"try a smaller learning rate ({_rates(config)}){again}{_wider(config)}")


def _rates(config: Config) -> str:
    """What sets the learning rates."""
    own = config.method == "lora" and any("lr" in rule for rule in config.lora.layers)
    return "lr in lora.layers for the layers that have one there, --lr for the others" if own else "--lr"


def _wider(config: Config) -> str:
    """What helps where numbers are too large for float16, whose loss is scaled down before this is an error."""
    return "; or --precision bf16 or fp32 in another RUN: float16 ends at 65504" if config.precision == "fp16" else ""


def _out_of_memory(setup: Setup, progress: Progress) -> OutOfMemoryError:
    """The error for a failed allocation: says where it happened, and which options use less memory."""
    config = setup.config
    resume = f"--resume continues from step {progress.saved}: " if progress.saved else ""
    if progress.during in BETWEEN.values():
        less = {"validating": f"{_half_micro_batch(config)}--set validation.every=0",
                "drawing sample pictures": "smaller pictures (sample.size) or --set sample.every=0",
                "evaluating": "smaller pictures (sample.size) or --set evaluate.every=0"}[progress.during]
        return OutOfMemoryError(f"{progress.device} ran out of memory while {progress.during}, and a divided model "
                                "needs all processes", hint=resume + less)
    if not progress.draws:
        return OutOfMemoryError(f"{progress.device} has too little memory for the model",
                                hint=resume + " or ".join(_smaller_model(config, progress)))
    shape = setup.manifest.shapes[int(setup.index.samples.bucket[progress.draws[0].sample])]
    step = progress.done + 1
    when = f"before step {step}, {progress.during}" if progress.during else f"in step {step}"
    return OutOfMemoryError(
        f"{progress.device} ran out of memory {when}, with {len(progress.draws)} samples of {format_bucket(shape)} "
        "in a forward pass", hint=resume + " or ".join(_less_memory(config, progress)))


def _half_micro_batch(config: Config) -> str:
    return f"--micro-batch {config.micro_batch // 2} or " if config.micro_batch % 2 == 0 else ""


def _not_compiled(error: Exception) -> Exception:
    """An error of torch.compile as a `Problem`; others as they are."""
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        return error
    return of_compiler(getattr(error, "inner_exception", error))


def of_compiler(error: Exception) -> ConfigError:
    """What torch.compile raised as a `Problem`."""
    return ConfigError(f"compile is on, but torch.compile failed: {first_line(error)}",
                       hint="--no-compile, also with --resume; or install what it needs, like a C++ compiler")


def _of_disk(error: OSError, run: Path, progress: Progress) -> Problem:
    """`error` as a `Problem` that names the run and the step to resume from."""
    problem = from_system(error, or_else=more_room(error.filename))
    hint = problem.hint
    if progress.saved:
        hint = hint.replace("run the same command again; finished work is kept",
                            f"add --resume to continue from step {progress.saved}")
    return type(problem)(f"{problem.message} (run {run}, after step {progress.done})", hint=hint)


def _of_store(error: Problem, progress: Progress) -> Problem:
    """`error` of an object store, whose hint is to run the command again, with how a run that has begun goes on."""
    again = "run the same command again"
    if not progress.saved or again not in error.hint or f"{again} with" in error.hint:
        return error
    return type(error)(error.message, hint=error.hint.replace(again, f"{again} with --resume"))


def _less_memory(config: Config, progress: Progress) -> list[str]:
    """Options that use less memory, the mildest first."""
    # A resumed run keeps its plan: its ranks divide the micro-batches of before, and take passes of so many samples.
    world = 1 if progress.saved else progress.world
    smaller = [size for size in smaller_sizes(config.batch_size, config.micro_batch)
               if -(-size // world) < len(progress.draws) and not config.full.fused_backward]
    options = [f"--micro-batch {smaller[0]}"] if smaller else []
    if not (config.recomputes or progress.recomputes):
        options.append("--set gradient_checkpointing=true")
    return [*options, *_smaller_model(config, progress)] if len(options) < 2 else options


def _smaller_model(config: Config, progress: Progress) -> list[str]:
    """What leaves less of the model on the device."""
    if config.method == "full":
        halved = config.full.dtype == "float32" and not config.parallel.shard
        return ["--set full.dtype=bfloat16 (in another RUN)" if halved else "--method lora (in another RUN)"]
    own_memory = progress.device.type not in SHARED
    if own_memory and config.offload != "auto" and not config.compile and not config.parallel.shard:
        more = "" if config.gradient_checkpointing else " --set gradient_checkpointing=true"
        return [f"--set offload=auto{more}", *_fewer_bytes(config)[:1]]
    return _fewer_bytes(config)


def _fewer_bytes(config: Config) -> list[str]:
    """What makes a LoRA's base smaller, and what helps if nothing does."""
    if config.precision == "fp32":
        return ["--precision bf16 (in another RUN)"]
    if config.quantization == "none" and config.lora.kind == "lora" and not config.parallel.shard:
        return ["--set quantization=fp8 or nf4 (in another RUN)", "a device with more memory"]
    return ["a device with more memory", "smaller buckets: prep encode --resolution"]
