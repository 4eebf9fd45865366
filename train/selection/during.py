"""Evaluates a checkpoint while its run trains: the trained model draws what `train evaluate` would, and all is kept and
scored as there, so that `train evaluate` afterwards draws nothing of it.

The vision model is in memory only while it embeds. Several ranks draw; the first one keeps, embeds and scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import torch

from prep.errors import CacheError, PathError
from prep.fs.place import Local
from prep.models.vision.model import VisionModel
from train.prompts.aside import kept_rows
from train.runs.checkpoint import list_checkpoints, step_name
from train.runs.log import Log
from train.runs.resume import Start, find_start
from train.sample import SampleRequest
from train.sampling.prompts import PromptRows, current
from train.selection.drawn import AT_ONCE, Column, column, embed, seeded
from train.selection.kept import Kept
from train.selection.run import EvaluateRequest, collection_of, kept_in, neutral_of, prompt_rows, scored, scores_of
from train.selection.scores import Candidate, Proposal, propose
from train.setup import Setup
from train.state import TrainState

Prompts = tuple[PromptRows, ...]
Draw = Callable[[Sequence[PromptRows], bool], list[np.ndarray]]  # with the trained weights, or as the base model does


def evaluate_checkpoint(trainee: TrainState, setup: Setup, run: Path, log: Log, step: int, about: Prompts,
                        neutral: Prompts, draw: Draw) -> None:
    """Draws, embeds and scores the checkpoint of `step`, which is whole on disk, and logs the scores. At step 0 only
    the base model draws. All ranks call this with equal prompts; the first one has the pictures that `draw` returns.

    The base model of a LoRA can draw at any time; that of a full run only before the first step: later, drift is not
    known if its pictures are missing. Raises `CacheError`, `ModelError`, `OutOfMemoryError`, `OSError`.
    """
    ranks, device, kept = trainee.ranks, trainee.denoiser.device, kept_in(run, setup.manifest)
    base: Column | None = None
    own: Column | None = None
    with ranks.collective():
        if ranks.first:
            kept.begin()
            base = _of_base(setup, neutral, device)
            own = _of(find_start(Local(run), step_name(step)), setup, about, neutral, device) if step else None
    can = step == 0 or setup.config.method == "lora"
    lacking = ranks.gather([_lacking(kept, base, setup) if can else [], _lacking(kept, own, setup)])[0]
    with log.progress("drawing", sum(map(len, lacking)), "pictures") as tick:
        for numbers, prompts, column, trained in ((lacking[0], neutral, base, False),
                                                  (lacking[1], (*about, *neutral), own, True)):
            left = iter(numbers)
            while some := list(islice(left, AT_ONCE * ranks.world)):
                made = draw([prompts[number] for number in some], trained)
                with ranks.collective():
                    if column is not None:
                        for number, pixels in zip(some, made, strict=True):
                            kept.put_picture(column.keys[number], pixels)
                tick(len(some))
    with ranks.collective():
        if own is not None:
            _score(setup, log, own, None if _lacking(kept, base, setup) else base, len(about), kept, device)


def prompts_to_evaluate(setup: Setup, run: Path, prompts: Sequence[PromptRows]
                        ) -> tuple[Prompts, Prompts, tuple[str, ...]]:
    """What is drawn of `prompts`, each with its seeds, and of those whose pictures should stay; and warnings about the
    latter. Raises `PathError`, `ConfigError`, `CacheError`."""
    request = EvaluateRequest(sample=SampleRequest(run=Local(run), which=("after",))).with_settings(
        setup.config.evaluate)
    neutral, warnings = neutral_of(request, setup)
    return seeded(prompts, request.seeds, setup.config.sample.seed), neutral, warnings


def proposed(setup: Setup, run: Path, log: Log, device: torch.device) -> Proposal | None:
    """What `train evaluate` would propose of the checkpoints that the run has evaluated and still keeps; `None` for
    fewer than two. Nothing is drawn. Raises what reading prompts and embeddings raises."""
    prompts = current(setup.index, partial(kept_rows, run, setup.index)).prompts
    about, neutral, _ = prompts_to_evaluate(setup, run, prompts)
    kept, base = kept_in(run, setup.manifest), _of_base(setup, neutral, device)
    columns = []
    for folder in list_checkpoints(run):
        with suppress(PathError, CacheError):  # of a run in a store, some are being removed
            found = _of(find_start(Local(run), folder.name), setup, about, neutral, device)
            columns += [] if _lacking(kept, found, setup) else [found]
    if len(columns) < 2:
        return None
    known = None if _lacking(kept, base, setup) else base
    embed(_keys(known, *columns), kept, _vision(setup), device, log.progress)
    return propose(list(_candidates(setup, log, columns, known, len(about), kept, device)))


def _score(setup: Setup, log: Log, own: Column, base: Column | None, about: int, kept: Kept, device: torch.device
           ) -> None:
    """Embeds what is drawn, scores it and logs the scores."""
    embed(_keys(base, own), kept, _vision(setup), device, log.progress)
    found, = _candidates(setup, log, [own], base, about, kept, device)
    scores = {name: value for name, value in scores_of(found).items() if name != "validation"}
    log("evaluation", found.step, **scores, copies=len(found.likeness.copies), pictures=about)


def _candidates(setup: Setup, log: Log, columns: Sequence[Column], base: Column | None, about: int, kept: Kept,
                device: torch.device) -> Iterator[Candidate]:
    vision = _vision(setup)
    prompts = [each.prompt for each in columns[0].prompts[:about]]
    fitting, _ = prompt_rows(prompts, vision, device, log.progress)
    return scored(collection_of(setup.manifest), columns, base, about, kept, vision.expected.digest,
                  dict(log.held_out), fitting)


def _of(start: Start, setup: Setup, about: Prompts, neutral: Prompts, device: torch.device) -> Column:
    """What a checkpoint draws, with the settings that it was saved with. Raises `CacheError`."""
    return column(start, replace(setup, config=start.config), start.config.sample, (*about, *neutral), device)


def _of_base(setup: Setup, neutral: Prompts, device: torch.device) -> Column | None:
    return column(None, setup, setup.config.sample, neutral, device) if neutral else None


def _lacking(kept: Kept, column: Column | None, setup: Setup) -> list[int]:
    """The numbers of the pictures of a column that are not kept."""
    vision = _vision(setup).expected.digest
    return [] if column is None else [number for number, key in enumerate(column.keys) if not kept.has(key, vision)]


def _keys(*columns: Column | None) -> list[str]:
    return [key for column in columns if column is not None for key in column.keys]


def _vision(setup: Setup) -> VisionModel:
    assert setup.vision is not None, "the checks have found it"
    return setup.vision
