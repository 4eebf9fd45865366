"""Checks manifest, cache, settings and model files before a model is loaded. No torch here: it takes a second."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from prep.batching.plan import StepPlan
from prep.errors import Problem
from prep.loader.index import Index, open_index
from prep.loader.shards import Looks, check_shards
from prep.manifest.document import Manifest, read_manifest
from prep.models.families.registry import FAMILIES
from prep.models.vision.model import VisionModel
from prep.progress import Progress, silent
from prep.training.interval import INTERVALS
from prep.training.schema import Config
from train.check.data import (
    check_dropout,
    check_interval,
    check_masks,
    check_prompts,
    check_schedule,
    plan_of,
    steps_of,
    uneven,
    uses_masks,
)
from train.check.evaluation import vision_to_evaluate
from train.check.faults import Noting
from train.check.model import model_of
from train.check.notes import notes_of
from train.check.objective import check_fields, prediction_of
from train.check.requirements import check_libraries
from train.setup import CheckedModel, CheckReport, Initial, RunRequest, Setup

_TIMES: tuple[Callable[[Config, StepPlan | None], None], ...] = (
    check_schedule, *(partial(check_interval, name) for name in INTERVALS))


def check(request: RunRequest, config: Config, *, planned: int | None = None, manifest: Manifest | None = None,
          progress: Progress = silent) -> CheckReport:
    """Checks manifest, fields, shards, step plan, model and its encoders, and reports every fault. `planned`: the
    micro-batch with which the steps of a resumed run were planned; `manifest`: that in place of the one to read."""
    faults: list[Problem] = []
    index: Index | None = None
    plan: StepPlan | None = None
    model: CheckedModel | None = None
    vision: VisionModel | None = None
    shards: Looks = {}
    with Noting(faults):
        manifest = manifest or read_manifest(request.manifest, cache=request.cache)
    if manifest is None:
        return CheckReport(faults=tuple(faults), setup=None, plan=None, left_out=(), repeated=())
    with Noting(faults):
        check_fields(manifest, config)
    with Noting(faults):
        check_libraries(config, FAMILIES[manifest.family], references=manifest.referring, paired=manifest.paired)
    with Noting(faults):
        index = open_index(manifest)
    if index is not None:
        with Noting(faults):
            shards = check_shards(index)
        for look in (check_masks, check_dropout, check_prompts):
            with Noting(faults):
                look(index, config)
        with Noting(faults):
            plan = plan_of(index, config, planned)
        for check_times in _TIMES:
            with Noting(faults):
                check_times(config, plan)
    with Noting(faults):
        model = model_of(request, config, manifest, index, faults, progress)
    with Noting(faults):
        vision = vision_to_evaluate(request, config, manifest, index, progress)
    setup = _setup(request, config, manifest, index, plan, model, shards, vision) if (
        not faults and index and plan and model) else None
    left_out, repeated = uneven(index, plan)
    return CheckReport(faults=tuple(faults), setup=setup, plan=plan, left_out=left_out, repeated=repeated,
                       notes=tuple(notes_of(model, config, manifest, index)))


def _setup(request: RunRequest, config: Config, manifest: Manifest, index: Index, plan: StepPlan, model: CheckedModel,
           shards: Looks, vision: VisionModel | None) -> Setup:
    return Setup(request=request, config=config, manifest=manifest, index=index, plan=plan, model=model,
                 init=_recorded(model.initial), masked=uses_masks(index, config), steps=steps_of(config, plan),
                 prediction=prediction_of(config, manifest), family=FAMILIES[manifest.family], shards=shards,
                 vision=vision)


def _recorded(initial: Initial | None) -> Mapping[str, str]:
    return {} if initial is None else {"name": initial.name, "sha256": initial.digest}
