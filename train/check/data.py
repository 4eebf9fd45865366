"""The data, the plan of steps and the schedule, by the settings."""

from __future__ import annotations

from collections.abc import Sequence

from prep.batching.plan import StepPlan, require_steps, step_plan
from prep.errors import CacheError, ConfigError
from prep.formatting import counted
from prep.loader.draws import accumulates, require_shown
from prep.loader.index import Index
from prep.training.interval import interval_of
from prep.training.schema import Config
from train.config.load import by_name
from train.optim.schedule import warmup_steps
from train.sampling.prompts import places_of
from train.setup import dropout_of


def check_masks(index: Index, config: Config) -> None:
    """Raises `CacheError` if masks are asked for and no sample has one."""
    if config.loss.masked is True and "mask" in index.manifest.fields and not index.masked:
        raise CacheError(f"the settings ask for masked loss, but none of the {len(index.samples)} samples has a mask",
                         hint="--no-masked, or add masks at the paths in the recipe and run prep encode again")


def check_dropout(index: Index, config: Config) -> None:
    """Raises `ConfigError` if references are to be dropped that text rows show."""
    require_shown(index, dropout_of(config))


def check_prompts(index: Index, config: Config) -> None:
    """Raises `ConfigError` if the prompts that are to be preserved, or those of a slider, have no rows."""
    if config.preserve.prompted:
        places_of(index, config.preserve.prompts, "preserve.prompts")
    if config.slider.on:
        places_of(index, config.slider.prompts, "slider")


def uses_masks(index: Index, config: Config) -> bool:
    """Whether the loss uses masks: as the settings say; with "auto", if any sample has a mask, and it is not there to
    tell the model what to paint."""
    if config.loss.masked == "auto":
        return "mask" in index.manifest.fields and index.masked > 0 and not index.inpaints
    return bool(config.loss.masked)


def plan_of(index: Index, config: Config, planned: int | None) -> StepPlan:
    """The plan of steps, with the micro-batch with which those of a resumed run were `planned`. Raises `ConfigError`,
    `EmptyPlanError`."""
    plan = planned_by(config, index.counts, planned)
    _check_passes(config, plan)
    if not plan.steps_per_epoch:
        require_steps(plan, index.manifest.shapes, index.names(plan.left_out(0)) if sum(plan.counts) else ())
    return plan


def planned_by(config: Config, counts: Sequence[int], planned: int | None = None) -> StepPlan:
    """The plan of so many occurrences by bucket, which may have no step. Raises `ConfigError`."""
    whole = planned is not None and config.batch_size % planned == 0
    return step_plan(counts, seed=config.seed, batch_size=config.batch_size,
                     micro_batch=planned if planned and whole else config.micro_batch, underfill=config.underfill,
                     shuffle=config.shuffle)


def _check_passes(config: Config, plan: StepPlan) -> None:
    """Raises `ConfigError` if weights are updated in each backward pass, but a step of the plan has several: that of a
    resumed run may, which was begun with a smaller micro-batch."""
    fused = config.method == "full" and config.full.fused_backward and config.micro_batch == config.batch_size
    if fused and accumulates(plan, config.micro_batch):
        raise ConfigError("full.fused_backward is on, which updates weights in each backward pass, but the steps of "
                          f"this run were planned with several, of {plan.micro_batch} samples",
                          hint="--set full.fused_backward=false, or another RUN with -o")


def steps_of(config: Config, plan: StepPlan) -> int:
    """How many steps the run has."""
    return config.steps or (config.epochs or 0) * plan.steps_per_epoch


def check_schedule(config: Config, plan: StepPlan | None) -> None:
    """Raises `ConfigError` for a warm-up or cycles that the run is too short for."""
    steps, schedule = 0 if plan is None else steps_of(config, plan), config.schedule
    if plan is not None and warmup_steps(schedule, steps) > steps:
        raise ConfigError(f"schedule.warmup is {schedule.warmup}, but the run has {steps} steps: the learning "
                          "rate would never reach optimizer.lr", hint=f"--set schedule.warmup={steps // 10}")
    falling = max(steps - warmup_steps(schedule, steps), 1)
    if plan is not None and schedule.name == "cosine-restarts" and schedule.cycles > falling:
        raise ConfigError(f"schedule.cycles is {schedule.cycles}, but only {falling} steps follow the warm-up",
                          hint=f"--set schedule.cycles={min(4, falling)}")


def check_interval(name: str, config: Config, plan: StepPlan | None) -> None:
    """Raises `ConfigError` if the interval that the setting `name` is in epochs ends before a step does."""
    every = by_name(config)[name]
    if plan is not None and 0 < interval_of(every, plan.steps_per_epoch).steps < 1:
        raise ConfigError(f"{name} is '{every}', which ends before a step does, since an epoch has "
                          f"{counted(plan.steps_per_epoch, 'step')}; expected 1 step or more",
                          hint=f"--set {name}=1 for every step, or --set '{name}=1 epoch'")


def uneven(index: Index | None, plan: StepPlan | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The names of the samples that the first epoch leaves out, and of those that it repeats."""
    if index is None or plan is None:
        return (), ()
    return tuple(index.names(plan.left_out(0))), tuple(index.names(plan.repeated(0)))
