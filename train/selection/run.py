"""Runs `train evaluate`: draws, embeds and scores the checkpoints of a run, and proposes one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prep.batching.split import ROLES
from prep.embedding.rows import Rows, embeddings_of
from prep.errors import CacheError, PathError
from prep.formatting import printable
from prep.fs.memo import Memo, memo_path
from prep.fs.place import Local
from prep.manifest.document import Manifest
from prep.manifest.opened import open_manifest
from prep.models.vision.model import VisionModel
from prep.models.vision.texts import MEMORY, embed_lacking, remembered_rows
from prep.parse import alpha_setting, color_below
from prep.progress import Progress, silent
from prep.runs.events import NAME as LOG
from prep.runs.events import read_events
from prep.runs.history import read_history
from prep.similarity.vectors import Integers
from prep.training.schema import Evaluating
from train.check.evaluation import AGAIN, vision_of
from train.runs.checkpoint import list_checkpoints
from train.runs.directory import Run, read_run
from train.runs.resume import Start, find_start
from train.sample import SampleRequest, checked_setup, other_base, overridden, prompts_of, typed
from train.sampling.prompts import PromptRows
from train.selection.drawn import Column, aside, column, draw, embed, no_prompt, rows_of, seeded
from train.selection.kept import NAME, Kept
from train.selection.scores import NEAREST, Candidate, Collection, Proposal, drift, likeness, prompt_fit, propose
from train.setup import Setup

FEWEST = 2  # neutral pictures: how far the base model's are from one another is the unit of drift


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateRequest:
    """What to evaluate; `sample` has run and prompts, and how pictures are drawn."""

    sample: SampleRequest
    neutral: Path | None = None  # prompts of pictures that training is not to change; None: those of the run's settings
    embed: str | None = None  # the vision model; None: likewise, or the one in the options that the manifest records
    every: int = 1  # each so many-th checkpoint, counted from the newest
    seeds: int = 0  # pictures of each prompt; 0: as the run's settings say

    def with_settings(self, settings: Evaluating) -> EvaluateRequest:
        """The same, with a run's settings for what was not asked for."""
        return replace(self, neutral=self.neutral or (Path(settings.neutral) if settings.neutral else None),
                       embed=self.embed or settings.embed or None, seeds=self.seeds or settings.seeds)


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The scores of a run's checkpoints."""

    run: Run
    vision: VisionModel
    collection: Collection
    least: float  # the cosine of a copy
    candidates: tuple[Candidate, ...]
    proposal: Proposal
    columns: tuple[Column, ...]  # of the candidates
    base: Column | None  # of the base model, with the neutral prompts; None: drift is not known
    kept: Kept
    prompts: int  # pictures of each candidate that are compared with the data set: the first of its column
    drawn: int  # pictures that this call drew
    warnings: tuple[str, ...]

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`: the same for a second call."""
        drawn = self.columns[0].prompts[:self.prompts]
        return {"format": "latentry/evaluate", "version": 1, "run": str(self.run.local),
                "vision": str(self.vision.folder.resolve()), "pictures": self.prompts,
                "prompts": list(dict.fromkeys(each.prompt for each in drawn)),
                "neutral": 0 if self.base is None else len(self.base.prompts), "nearest": NEAREST,
                "training": self.collection.training, "held_out": self.collection.held_out,
                "copy_from": round(self.least, 6), "checkpoints": [
                    {"name": each.name, "step": each.step, **scores_of(each), "copies": [
                        {"prompt": drawn[copy.drawn].prompt, "seed": drawn[copy.drawn].settings.seed,
                         "picture": copy.name, "cosine": round(copy.cosine, 6)} for copy in each.likeness.copies],
                     "excluded": list(each.excluded)} for each in self.candidates],
                "proposal": {"checkpoint": self.proposal.name, "reason": self.proposal.reason},
                "warnings": list(self.warnings)}

    def as_text(self) -> str:
        """A table for people, with the copies and the proposal below."""
        lines = [f"{'checkpoint':16}  {'held-out':>8}  {'training':>8}  {'nearest':>8}  {'copies':>6}  {'drift':>7}  "
                 f"{'validation':>10}  {'prompt fit':>10}"]
        for each in self.candidates:
            scores = scores_of(each)
            held_out, training, nearest, drifted, loss, fit = (
                "-" if scores[name] is None else f"{scores[name]:.4f}"
                for name in ("held_out", "training", "nearest", "drift", "validation", "prompt_fit"))
            lines.append(f"{each.name:16}  {held_out:>8}  {training:>8}  {nearest:>8}  {len(each.likeness.copies):6}  "
                         f"{drifted:>7}  {loss:>10}  {fit:>10}")
        drawn = self.columns[0].prompts
        lines += [f"{each.name}: '{printable(drawn[copy.drawn].prompt)}', seed {drawn[copy.drawn].settings.seed}, is "
                  f"nearly {printable(copy.name)} (cosine {copy.cosine:.4f})"
                  for each in self.candidates for copy in each.likeness.copies]
        return "\n".join([*lines, f"proposed: {self.proposal.name or 'none'}: {self.proposal.reason}"])


def scores_of(each: Candidate) -> dict[str, float | None]:
    """The scores of a checkpoint by name; `None`: not known."""
    like = each.likeness
    numbers = {"held_out": None if like.held_out_P is None else float(like.held_out_P.mean()),
               "training": float(like.training_P.mean()), "nearest": like.nearest, "drift": each.drift,
               "validation": each.validation, "prompt_fit": each.fit}
    return {name: None if value is None else round(value, 6) for name, value in numbers.items()}


def evaluate(wanted: EvaluateRequest, device: torch.device, progress: Progress = silent) -> Evaluation:
    """Scores the checkpoints of a run. What is drawn stays in RUN/evaluation, so that an interrupted call, or one after
    more checkpoints, draws only what is missing.

    Raises `PathError` for a run without checkpoints, `ConfigError` for a manifest without embeddings, `ModelError` for
    a vision model that did not make these, and what `train sample` raises.
    """
    sample = wanted.sample
    run = read_run(sample.run, manifest=sample.manifest, cache=sample.cache)
    wanted = wanted.with_settings(run.config.evaluate)
    starts = _starts(run.local, wanted.every)
    setups = list(_setups(run, sample, starts, progress))
    newest = setups[-1]
    vision = vision_of(newest.manifest, wanted.embed, "--embed MODEL", progress, download=sample.download)
    collection = collection_of(newest.manifest)
    prompts = overridden(prompts_of(sample, newest, typing=False), sample)
    neutral, warnings = neutral_of(wanted, newest)
    about = seeded(prompts.prompts, wanted.seeds, newest.config.sample.seed if sample.seed is None else sample.seed)
    columns = [column(start, setup, replace(setup.config.sample, **typed(sample)), (*about, *neutral), device)
               for start, setup in zip(starts, setups, strict=True)]
    base = column(None, newest, columns[-1].settings, neutral, device) if neutral else None
    kept = kept_in(run.folder, newest.manifest)
    kept.begin()
    every = [*([] if base is None else [base]), *reversed(columns)]
    drawn = draw(every, kept, vision.expected.digest, device, progress)
    embed([key for each in every for key in each.keys], kept, vision, device, progress)
    least = collection.least
    fitting, unfit = prompt_rows([each.prompt for each in about], vision, device, progress)
    losses = dict(read_history(read_events(run.folder / LOG)).held_out)
    candidates = tuple(scored(collection, columns, base, len(about), kept, vision.expected.digest, losses, fitting))
    others = dict.fromkeys(text for start, setup in zip(starts, setups, strict=True)
                           for text in other_base(setup, start.state.base, start.folder.name))
    return Evaluation(run=run, vision=vision, collection=collection, least=least, candidates=candidates,
                      proposal=propose(candidates), columns=tuple(columns), base=base, kept=kept, prompts=len(about),
                      drawn=drawn, warnings=(*prompts.warnings, *warnings, *others, *unfit))


def kept_in(run: Path, manifest: Manifest) -> Kept:
    """What the run in this directory keeps of evaluations."""
    return Kept(folder=run / NAME, below=alpha_setting(color_below(manifest.alpha) or (255, 255, 255)))


def scored(collection: Collection, columns: Sequence[Column], base: Column | None, about: int, kept: Kept, vision: str,
           losses: Mapping[int, float], fitting: tuple[Integers, Rows] | None) -> Iterator[Candidate]:
    """The checkpoints with their scores; the first `about` pictures of each are those of prompts. `losses`: of
    validations, by step. `fitting`: as `prompt_rows` returns it."""
    least = collection.least
    apart = None if base is None else rows_of(base.keys, kept, vision)
    for each in columns:
        assert each.start is not None, "the base model is no candidate"
        rows, step = rows_of(each.keys, kept, vision), each.start.state.step
        yield Candidate(name=each.start.folder.name, step=step, likeness=likeness(collection, rows[:about], least),
                        drift=None if apart is None else drift(apart, rows[about:]), validation=losses.get(step),
                        fit=None if fitting is None else prompt_fit(rows[fitting[0]], fitting[1]))


def prompt_rows(prompts: Sequence[str], vision: VisionModel, device: torch.device, progress: Progress
                ) -> tuple[tuple[Integers, Rows] | None, tuple[str, ...]]:
    """((the places of prompts that have an embedding, these), or `None` if none has; what to say of the others)."""
    if vision.reading is None:
        return None, ()
    with closing(Memo(memo_path(*MEMORY))) as memory:
        done = embed_lacking(vision, prompts, memory, device=str(device), progress=progress)
        texts, rows = remembered_rows(memory, vision.expected.digest, prompts, vision.width,
                                      vision.reading.digest)
    numbers = {text: number for number, text in enumerate(texts)}
    places = np.array([place for place, prompt in enumerate(prompts) if prompt in numbers], np.int64)
    found = (places, rows[[numbers[prompts[place]] for place in places.tolist()]]) if len(places) else None
    return found, (done.note,) if done.note else ()


def _starts(run: Local, every: int) -> list[Start]:
    """The checkpoints to evaluate, the oldest first: each so many-th of those that are kept, and the newest. Raises
    `PathError`, `CacheError`."""
    folders = list_checkpoints(run.path)
    if not folders:
        raise PathError(f"{run} has no checkpoint to evaluate",
                        hint="checkpoint.every and checkpoint.keep say which ones a run keeps")
    starts = []
    for folder in folders[::-1][::every][::-1]:
        with aside(folder):
            starts.append(find_start(run, folder.name))
    return starts


def _setups(run: Run, sample: SampleRequest, starts: Sequence[Start], progress: Progress) -> Iterator[Setup]:
    """The setup of each checkpoint; those with the same settings share one."""
    before: tuple[Start, Setup] | None = None
    for start in starts:
        if before is None or before[0].config != start.config:
            before = start, checked_setup(run, sample, start, progress, finished=False)
        yield before[1]


def collection_of(manifest: Manifest) -> Collection:
    """The pictures of a manifest that have embeddings, each once, without regularization pictures. Raises
    `CacheError`."""
    opened = open_manifest(manifest)
    rows, there = embeddings_of(opened)
    samples, first = opened.samples, dict[bytes, int]()
    pictures, labels = samples.table["picture"].to_pylist(), opened.labels()
    for number in np.flatnonzero(there).tolist():
        if ROLES[int(samples.role[number])] != "prior":
            first.setdefault(pictures[number], number)
    held_out = {number for number in first.values() if ROLES[int(samples.role[number])] == "validation"}
    order = [*(number for number in first.values() if number not in held_out), *sorted(held_out)]
    training = len(order) - len(held_out)
    if not training:
        raise CacheError(f"{manifest.path} has no embedding of a training picture", hint=AGAIN)
    return Collection(rows=rows[order], training=training, names=tuple(labels[number] for number in order))


def neutral_of(wanted: EvaluateRequest, setup: Setup) -> tuple[tuple[PromptRows, ...], tuple[str, ...]]:
    """The prompts of pictures that training is not to change, with their seeds, and warnings. Raises `PathError`,
    `CacheError`."""
    sample, seeds = wanted.sample, max(wanted.seeds, FEWEST)
    seed = setup.config.sample.seed if sample.seed is None else sample.seed
    if wanted.neutral is None:
        plain = no_prompt(setup.index)
        return seeded([replace(each, settings=replace(each.settings, **typed(sample))) for each in plain], seeds,
                      seed), ()
    found = overridden(prompts_of(replace(sample, prompts=wanted.neutral), setup, typing=False), sample)
    return seeded(found.prompts, seeds, seed), found.warnings
