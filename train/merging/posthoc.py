"""`train merge RUN --ema 0.1`: a power-function average of any length, made after training (post-hoc EMA).

Karras et al. 2024, "Analyzing and Improving the Training Dynamics of Diffusion Models", section 3.2 and appendix C. A
run with `ema.snapshots` keeps two averages at each checkpoint. The profile of an average of exponent g at step T is
p(t) = (g + 1) / T^(g + 1) t^g for 0 <= t <= T (equation 3). The average that is asked for is the sum of the stored ones
whose profile is nearest to its own by least squares: A x = b, where A and b have the inner products of profiles, which
algorithm 3 of the appendix gives in closed form. As in the authors' code (NVlabs/edm2, training/phema.py), x is divided
by its sum, so that weights that never changed stay as they are. What is averaged are the trained tensors themselves, as
a moving average that is kept while training has them: of a LoRA its matrices.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from prep.errors import PathError
from prep.fs.place import Local
from prep.training.schema import Dtype
from train.merging.average import Averaged, linear, part_at
from train.merging.reduced import check_output
from train.merging.trained import find_result, metadata_of
from train.optim.ema import exponent_of
from train.runs.checkpoint import POWERS, is_checkpoint, list_averages, list_checkpoints
from train.runs.directory import run_of

Tick = Callable[[int], object]
Vector = NDArray[np.float64]
_OF_RESULT = ("modelspec.", "ss_", "latentry.seed", "latentry.recipe")  # metadata that only a run's result has


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A power-function average that a run has kept."""

    path: Path  # of the file, or of the directory of its pieces
    step: int
    length: float  # sigma_rel


@dataclass(frozen=True, kw_only=True, slots=True)
class Solved:
    """The sum of snapshots that is nearest to the average that is asked for."""

    weights: tuple[float, ...]  # of each snapshot; their sum is 1
    error: float  # the norm of the difference of both profiles, in parts of that of the one that is asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class PosthocRequest:
    """A request for a power-function average."""

    run: Path  # a run, or one of its checkpoints: the average at its step
    length: float  # sigma_rel
    output: Path
    dtype: Dtype | None = None  # None: float32, as snapshots are


def posthoc(request: PosthocRequest, tick: Tick = lambda count: None) -> tuple[Averaged, int, Solved]:
    """Writes the average as a file; returns it with its step. `tick`: called for each tensor.

    Raises `PathError`, `UsageError`, `ModelError`, `CacheError`.
    """
    run = run_of(Local(request.run)).path
    found = snapshots_of(run)
    last = int(request.run.name[5:]) if is_checkpoint(request.run) else max((each.step for each in found), default=0)
    used = sorted((each for each in found if each.step <= last), key=lambda each: -each.step)
    if not used:
        raise PathError(f"{request.run} has no snapshots of averages{f' up to step {last}' if found else ''}",
                        hint="train with --set ema.snapshots=true, which keeps them from the first step on")
    check_output(request.output, [each.path for each in used], force=None, what="file of weights")
    solved = solve([(each.step, each.length) for each in used], last, request.length)
    parts = tuple(part_at(each.path, weight) for each, weight in zip(used, solved.weights, strict=True))
    listed = [{"step": each.step, "length": each.length, "sha256": part.sha256, "weight": part.weight}
              for each, part in zip(used, parts, strict=True)]
    of_run = {name: value for name, value in parts[0].metadata.items() if name != "format"}
    metadata = {**of_run, **_of_result(run, last), "latentry.step": str(last),
                "latentry.weights": "power-function average", "latentry.averaged": json.dumps(listed),
                "latentry.ema": json.dumps({"length": request.length, "error": round(solved.error, 6)})}
    return linear(parts, request.output, request.dtype, metadata, tick), last, solved


def snapshots_of(run: Path) -> list[Snapshot]:
    """The averages that a run has kept: in its checkpoints, and of those that are removed. Raises `CacheError`."""
    found = {(int(folder.name[5:]), length): place for folder in (*list_averages(run), *list_checkpoints(run))
             for file, length in POWERS.items() for place in (folder / file, (folder / file).with_suffix(""))
             if place.is_file() or place.is_dir()}
    return [Snapshot(path=found[each], step=each[0], length=each[1]) for each in sorted(found)]


def solve(snapshots: Sequence[tuple[int, float]], step: int, length: float) -> Solved:
    """The weights of snapshots, each of a step and a length, for the average of `length` at `step`."""
    steps = np.array([float(at) for at, _ in snapshots])
    exponents = np.array([exponent_of(each) for _, each in snapshots])
    wanted = exponent_of(length)
    among = inner_products(steps[:, None], exponents[:, None], steps[None], exponents[None])
    with_wanted = inner_products(steps, exponents, np.full_like(steps, step), np.full_like(steps, wanted))
    weights = np.linalg.lstsq(among, with_wanted, rcond=1e-13)[0]
    weights /= weights.sum()
    own = float(inner_products(*(np.array(float(each)) for each in (step, wanted, step, wanted))))
    missing = weights @ among @ weights - 2 * weights @ with_wanted + own
    return Solved(weights=tuple(weights.tolist()), error=sqrt(max(float(missing), 0.0) / own))


def inner_products(steps: Any, exponents: Any, others: Any, of_others: Any) -> Vector:
    """The integrals of the products of two profiles: (g + 1) (h + 1) r / ((g + h + 1) max(T, U)), where r is (T/U)^h if
    T < U, else (U/T)^g, for exponents g and h at steps T and U."""
    ratio = np.where(steps < others, (steps / others) ** of_others, (others / steps) ** exponents)
    found: Vector = ((exponents + 1) * (of_others + 1) * ratio
                     / ((exponents + of_others + 1) * np.maximum(steps, others)))
    return found


def _of_result(run: Path, step: int) -> dict[str, str]:
    """What the run's result at this step says besides what checkpoints do; nothing if there is none."""
    try:
        said = metadata_of(find_result(run))
    except (PathError, OSError, ValueError):
        return {}
    if said.get("latentry.step") != str(step):
        return {}
    return {name: value for name, value in said.items() if name.startswith(_OF_RESULT)}
