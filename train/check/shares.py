"""What part of a run goes to training, validation, sample pictures and the evaluation of checkpoints, estimated in
forward passes.

A trained sample counts as three passes (the backward pass takes about two), with gradient_checkpointing as four; a
slider trains it twice, and preserve.prompted once more, beside what the base predicts. A validated one counts as one
for each of its timesteps, or five of a slider; a picture as one for each sampler step, or two where guidance needs the
prediction without the prompt. Each pass counts by its pixels, with those of references. Data, decoding, the optimizer,
embeddings and an evaluation's pictures of neutral prompts are left out.
"""

from __future__ import annotations

from dataclasses import dataclass

from prep.formatting import counted
from prep.geometry import pixels_of
from prep.recipe.prompts import PromptSettings
from prep.training.schema import Validation
from train.setup import Setup

TRAINED = 3  # passes
SLIDER_BASE = 3  # passes of the base for each sample of a slider
CAPTIONS = 4  # that are sampled where there are no prompts
FEW = Validation().most
MUCH = 0.5  # of a run, beyond which there is a note


@dataclass(frozen=True, kw_only=True, slots=True)
class Shares:
    """Parts of a run from its beginning, 0 to 1."""

    training: float
    validation: float
    sampling: float
    evaluation: float
    validated: int  # samples of each validation
    validations: int
    pictures: int  # each time
    samplings: int
    evaluated: int  # pictures of each evaluation
    evaluations: int

    @property
    def line(self) -> str:
        """The parts in a line, and what they are made of."""
        parts = [f"training {self.training:.0%}"]
        if self.validations and self.validated:
            parts.append(f"validation {self.validation:.0%} ({counted(self.validated, 'sample')}, "
                         f"{counted(self.validations, 'time')})")
        if self.samplings and self.pictures:
            parts.append(f"sample pictures {self.sampling:.0%} ({counted(self.pictures, 'picture')}, "
                         f"{counted(self.samplings, 'time')})")
        if self.evaluations and self.evaluated:
            parts.append(f"evaluation of checkpoints {self.evaluation:.0%} ({counted(self.evaluated, 'picture')}, "
                         f"{counted(self.evaluations, 'time')})")
        return f"estimated share of the run, in forward passes: {', '.join(parts)}"


def shares_of(setup: Setup) -> Shares:
    """The parts of a run that begins with this setup."""
    config, steps, index = setup.config, setup.steps, setup.index
    areas = [pixels_of(shape) for shape in setup.manifest.shapes]
    shown = sum(setup.plan.counts)
    area = sum(count * size for count, size in zip(setup.plan.counts, areas, strict=True)) / max(shown, 1)
    trained = steps * float(setup.plan.sizes(0).mean()) * area * _passes(setup)
    held_out = [len(members) for members in index.validation]
    available = sum(held_out)
    validated = min(config.validation.most or available, available)
    validations, samplings = _times(setup, config.validation.every), _times(setup, config.sample.every)
    each = sum(count * size for count, size in zip(held_out, areas, strict=True)) / max(available, 1)
    directions = SLIDER_BASE + 2 if config.slider.on else 1
    validation = validations * validated * config.validation.timesteps * directions * each
    pictures, evaluations, seeds = _pictures(setup), evaluations_of(setup), config.evaluate.seeds
    sampling, evaluation = samplings * sum(pictures), evaluations * seeds * sum(pictures)
    whole = trained + validation + sampling + evaluation
    return Shares(training=trained / whole, validation=validation / whole, sampling=sampling / whole,
                  evaluation=evaluation / whole, validated=validated, validations=validations,
                  pictures=len(pictures), samplings=samplings, evaluated=seeds * len(pictures) if evaluations else 0,
                  evaluations=evaluations)


def _passes(setup: Setup) -> int:
    """Passes for each trained sample; of pairs, whose pixels are those of both pictures, for each picture."""
    config, preserve = setup.config, setup.config.preserve
    once = TRAINED + config.recomputes
    base = (preserve.unmasked > 0 and setup.masked) or (preserve.prior and setup.manifest.document["samples"]["prior"])
    return ((2 * once + SLIDER_BASE if config.slider.on else once) + bool(base)
            + (once + 1 if preserve.prompted else 0))


def evaluations_of(setup: Setup) -> int:
    """How many checkpoints a run evaluates from its beginning."""
    every, interval = setup.config.evaluate.every, setup.interval(setup.config.checkpoint.every)
    saved = interval.count(setup.steps)
    at_end = not (interval.is_due(setup.steps) and saved % max(every, 1) == 0)
    return saved // every + at_end if every else 0


def _times(setup: Setup, every: int | str) -> int:
    """How often something is done: at step 0, after each interval, and at the last step."""
    if not every:
        return 0
    interval = setup.interval(every)
    return 1 + interval.count(setup.steps) + (not interval.is_due(setup.steps))


def _pictures(setup: Setup) -> list[float]:
    """Passes times pixels of each picture that is drawn at a time."""
    settings, family = setup.config.sample, setup.family
    prompts = setup.manifest.document["prompts"]
    counts = [len(members) for members in setup.index.training]
    usual, references = setup.manifest.shapes[counts.index(max(counts))]
    own = [(PromptSettings.of_document(each.get("settings", {})),
            tuple((wide, high) for wide, high in (shown["bucket"] for shown in each.get("references", ()))))
           for each in prompts["samples"]]
    if not own and prompts["file"] is None:
        own = [(PromptSettings(), () if setup.index.paired else references)] * CAPTIONS
    costs = []
    for prompt, shown in own:
        known = (prompt.guidance, settings.guidance, family.sampling.guidance)
        guidance = next(value for value in known if value is not None)
        twice = guidance > 1 and not family.takes_guidance
        width, height = settings.size or usual
        pixels = pixels_of(((prompt.width or width, prompt.height or height), shown))
        costs.append(float((prompt.steps or settings.steps) * (1 + twice) * pixels))
    return costs


def notes_on_shares(setup: Setup) -> list[str]:
    """A note if most of a long run does not train, and one if checkpoints are removed that it evaluates."""
    shares, config = shares_of(setup), setup.config
    every = config.validation.every, config.sample.every
    often = shares.evaluations > 1 or any(part and setup.interval(part).count(setup.steps) > 1 for part in every)
    notes = [_largest(shares)] if shares.training < MUCH and often else []
    span = (shares.evaluations - 1) * config.evaluate.every + 1  # checkpoints from the first that is evaluated
    if 0 < config.checkpoint.keep < span:
        notes.append(f"{shares.evaluations} checkpoints are evaluated, but only the newest {config.checkpoint.keep} "
                     "are kept, and one of these is proposed at the end: --set checkpoint.keep=0 keeps all")
    return notes


def _largest(shares: Shares) -> str:
    """What takes most beside training, and what makes it less."""
    if shares.evaluation > max(shares.validation, shares.sampling):
        return (f"evaluating checkpoints takes about {shares.evaluation:.0%} of the run: fewer of them "
                "(evaluate.every), fewer seeds (evaluate.seeds) or fewer steps (sample.steps) take less")
    if shares.validation >= shares.sampling:
        fewer = f"fewer samples (--set validation.most={FEW}) or " if shares.validated > FEW else ""
        return (f"validation takes about {shares.validation:.0%} of the run: {fewer}a longer interval "
                "(validation.every) takes less")
    return (f"sample pictures take about {shares.sampling:.0%} of the run: a longer interval (sample.every), fewer "
            "prompts or fewer steps (sample.steps) take less")
