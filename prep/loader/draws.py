"""Draws a view, a text, a latent, a timestep and noise for each showing of a sample. Draws are keyed, without generator
state.

A draw depends only on (seed, epoch, sample, occurrence, purpose): it is the same on any number of ranks and after any
resume, and differs for each repeat. Validation keys omit the seed, so validation losses compare between runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from prep.batching.plan import MicroBatch, StepPlan
from prep.batching.rng import draw_key, philox
from prep.cache.ledger.columns import Column
from prep.loader.index import Index
from prep.loader.noise import PLAIN, Noise
from prep.loader.timesteps import UNIFORM, Timesteps

NO_TEXT = -1  # the unconditional row
_VALIDATION_SEED = 0  # fixed: validation noise and timesteps never depend on the run's seed


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """One showing of one sample."""

    sample: int
    view: int  # index into the flat columns of views
    text: int  # index into the flat columns of texts, or NO_TEXT
    timestep: int
    noise: tuple[int, int]  # Philox key
    weight: float  # of its loss
    # Philox key of the noise that draws its latent from the posterior; None: the latent is the mean. That holds for all
    # of validation, so that its loss compares between runs, and with caches that have only the mean.
    posterior: tuple[int, int] | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RankShare:
    """The part of one of several ranks in each micro-batch: some of its samples, nearly as many for each rank."""

    rank: int
    world: int
    # Whether every rank makes as many forward passes as any other; padding passes show samples that do not count.
    pad_ranks: bool = False

    def of(self, number: int, part: MicroBatch, plan: StepPlan) -> range:
        """The samples of this rank in `part`, micro-batch `number` of a step.

        Ranks change places from one micro-batch to the next, so that no rank has all the larger parts; with a
        partitioned shuffle they keep their places, which have parts of the buckets of their own.
        """
        ends = split_points(part, plan, self.world)
        place = (self.rank - rotation(number, plan)) % self.world
        return range(int(ends[place]), int(ends[place + 1]))

    def passes(self, number: int, part: MicroBatch, plan: StepPlan, most: int | None) -> int:
        """The forward passes of this rank in that micro-batch, of at most `most` samples each."""
        if self.world == 1:
            return len(_starts(len(part.occurrences), most))
        sizes = np.diff(split_points(part, plan, self.world))
        own = int(sizes.max()) if self.pad_ranks else len(self.of(number, part, plan))
        return len(_starts(own, most))


def rotation(number: int, plan: StepPlan) -> int:
    """The number of places by which ranks are rotated in micro-batch `number` of a step."""
    return 0 if plan.partitioned else number


def split_points(part: MicroBatch, plan: StepPlan, world: int) -> Column:
    """[world + 1]: the points that split a micro-batch among so many ranks, the first 0 and the last its size."""
    if part.places is None:
        return np.arange(world + 1) * len(part.occurrences) // world
    ends: Column = np.searchsorted(part.places, np.arange(world + 1) * plan.micro_batch // world)
    return ends


def ranks_of(number: int, part: MicroBatch, plan: StepPlan, world: int) -> Column:
    """[n]: the rank, of `world`, that shows each occurrence of `part`, micro-batch `number` of a step."""
    places = np.repeat(np.arange(world), np.diff(split_points(part, plan, world)))
    ranks: Column = (places + rotation(number, plan)) % world
    return ranks


WHOLE = RankShare(rank=0, world=1)


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchRequest:
    """One micro-batch to read and draw."""

    bucket: int
    draws: tuple[Draw, ...]
    noise: Noise = PLAIN  # how the noise of each draw's key is drawn
    padding: bool = False  # made only because other ranks make a forward pass meanwhile


def training(index: Index, plan: StepPlan, first: int, total: int, *, dropout: float, timesteps: int,
             chances: Sequence[Timesteps] = (), noise: Noise = PLAIN, most: int | None = None,
             share: RankShare = WHOLE) -> Iterator[BatchRequest]:
    """Yields one rank's requests for the micro-batches of steps `first` to `total` - 1, in order, in forward passes of
    at most `most` samples; `passes` counts those of a step.

    Splitting changes no step: it keeps the same samples with the same draws. `chances`: by bucket; uniform if empty.
    """
    by_bucket = chances or [UNIFORM] * len(plan.counts)
    for step in range(first, total):
        parts = plan.at(step)
        epoch = step // plan.steps_per_epoch
        for number, part in enumerate(parts):
            timestep = partial(by_bucket[part.bucket].draw, count=timesteps)
            places = share.of(number, part, plan)
            draws = tuple(_draws(index, part, places, (plan.seed, epoch), dropout, timestep))
            for start in _starts(len(places), most):
                yield BatchRequest(bucket=part.bucket, draws=draws[start : start + (most or len(draws))], noise=noise)
            missing = share.passes(number, part, plan, most) - len(_starts(len(places), most))
            for _ in range(missing):
                padding = tuple(_draws(index, part, range(1), (plan.seed, epoch), dropout, timestep))
                yield BatchRequest(bucket=part.bucket, draws=padding, noise=noise, padding=True)


def passes(plan: StepPlan, step: int, *, most: int | None = None, share: RankShare = WHOLE) -> int:
    """The forward passes of one rank in a step; 0 if there are fewer samples than ranks."""
    return sum(share.passes(number, part, plan, most) for number, part in enumerate(plan.at(step)))


def _starts(count: int, most: int | None) -> range:
    """The first draw of each forward pass over `count` draws."""
    return range(0, count, most or max(count, 1))


def validation(index: Index, micro_batch: int, *, count: int, timesteps: int, most: int = 0) -> Iterator[BatchRequest]:
    """The validation samples at `count` fixed timesteps, first view and first text, in micro-batches.

    At most `most` samples (0: all), the same each time and evenly spread over all of them.
    """
    total, first = sum(len(members) for members in index.validation), 0
    chosen = {number * total // most for number in range(most)} if 0 < most < total else set(range(total))
    for bucket, members in enumerate(index.validation):
        draws = [_fixed(index, int(sample), at) for number, sample in enumerate(members, first) if number in chosen
                 for at in spread(count, timesteps)]
        first += len(members)
        for start in range(0, len(draws), micro_batch):
            yield BatchRequest(bucket=bucket, draws=tuple(draws[start : start + micro_batch]))


def trial(index: Index, plan: StepPlan, most: int, world: int = 1) -> BatchRequest:
    """A forward pass of at most `most` samples that needs about as much memory as any of training: the most pixels, and
    of so many the samples with the longest texts, where rows of text differ in tokens.

    Fewer pixels with longer texts may take a little more. `world` ranks divide a micro-batch.
    """
    longest = _longest(index)

    def size(bucket: int) -> tuple[int, int]:
        width, height = index.manifest.buckets[bucket]
        members = index.training[bucket]
        return (min(most, _samples(plan, bucket, world)) * width * height,
                int(longest[members].max()) if len(members) else 0)

    bucket = max(range(len(plan.counts)), key=size)
    members = index.training[bucket]
    members = members[np.argsort(-longest[members], kind="stable")]
    count = min(most, _samples(plan, bucket, world))
    draws = tuple(_tried(index, int(members[number % len(members)])) for number in range(count))
    return BatchRequest(bucket=bucket, draws=draws)


def accumulates(plan: StepPlan, most: int, world: int = 1) -> bool:
    """Whether a step has several forward passes of a rank: those after the first hold its gradients."""
    parts = plan.per_step if plan.underfill == "repeat" else min(plan.per_step, sum(plan.batches))
    return parts > 1 or any(_samples(plan, bucket, world) > most for bucket in range(len(plan.counts)))


def _samples(plan: StepPlan, bucket: int, world: int) -> int:
    """The most samples of a micro-batch of this bucket that one of `world` ranks has."""
    count = plan.counts[bucket]
    largest = min(plan.micro_batch, plan.micro_batch if plan.underfill == "repeat" and count else count)
    each = -(-largest // world)
    if plan.partitioned:  # places of a micro-batch that is not full are not divided evenly
        each = min(each + 1, -(-plan.micro_batch // world))
    return each


def _longest(index: Index) -> Column:
    """Tokens of each sample's longest text; 0 where all texts have the same."""
    lengths: Column = np.maximum.reduceat(index.tokens[index.samples.texts["shard"]], index.samples.text_offsets[:-1])
    return lengths


def _tried(index: Index, sample: int) -> Draw:
    """A draw of the sample's longest text."""
    texts = _span(index.samples.text_offsets, sample)
    tokens = index.tokens[index.samples.texts["shard"][texts.start : texts.stop]]
    return replace(_fixed(index, sample, 0), text=texts[int(tokens.argmax())])


def spread(count: int, timesteps: int) -> list[int]:
    """The middles of `count` equal parts of the schedule: 125, 375, 625, 875 for 4 of 1000."""
    return [(2 * number + 1) * timesteps // (2 * count) for number in range(count)]


def _draws(index: Index, part: MicroBatch, places: range, key: tuple[int, int], dropout: float,
           timestep: Callable[[np.random.Generator], int]) -> Iterator[Draw]:
    """The showings at these places of a micro-batch; `key` is seed and epoch."""
    some = slice(places.start, places.stop)
    shown = index.showings(part.bucket, part.occurrences[some])
    for sample, repeat, turn in zip(*shown, part.turns[some].tolist(), strict=True):
        showing = repeat + turn * int(index.samples.repeats[sample])
        yield _shot(index, sample, (*key, index.samples.ids[sample].tobytes(), showing), dropout, timestep)


def _shot(index: Index, sample: int, key: tuple[int, int, bytes, int], dropout: float,
          timestep: Callable[[np.random.Generator], int]) -> Draw:
    def draw(purpose: str) -> np.random.Generator:
        return philox(draw_key(*key, purpose))

    samples = index.samples
    views, texts = _span(samples.view_offsets, sample), _span(samples.text_offsets, sample)
    view = views[0] if len(views) == 1 else views[int(draw("view").integers(len(views)))]
    text = texts[0] if len(texts) == 1 else texts[_weighted(samples.texts["weight"][texts.start : texts.stop],
                                                            draw("text").random())]
    dropped = dropout > 0 and draw("dropout").random() < dropout
    return Draw(sample=sample, view=view, text=NO_TEXT if dropped else text,
                timestep=timestep(draw("timestep")), noise=draw_key(*key, "noise"),
                weight=float(samples.weight[sample]),
                posterior=draw_key(*key, "posterior") if index.with_std else None)


def _fixed(index: Index, sample: int, timestep: int) -> Draw:
    key = draw_key(_VALIDATION_SEED, 0, index.samples.ids[sample].tobytes(), timestep, "validation")
    return Draw(sample=sample, view=int(index.samples.view_offsets[sample]), noise=key, timestep=timestep,
                text=int(index.samples.text_offsets[sample]), weight=1.0)


def _span(offsets: Column, sample: int) -> range:
    return range(int(offsets[sample]), int(offsets[sample + 1]))


def _weighted(weights: Column, chance: float) -> int:
    """The index drawn with probability proportional to `weights`, from `chance` in [0, 1)."""
    ends = np.cumsum(weights, dtype=np.float64)
    return min(int(np.searchsorted(ends, chance * ends[-1], side="right")), len(ends) - 1)
