"""Draws a view, a text, a latent, a timestep and noise for each showing of a sample. Draws are keyed, without generator
state.

A draw depends only on (seed, epoch, sample, occurrence, purpose): it is the same on any number of ranks and after any
resume, and differs for each repeat. Validation keys omit the seed, so validation losses compare between runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np

from prep.batching.plan import MicroBatch, StepPlan
from prep.batching.rng import draw_key, philox
from prep.batching.split import ROLES
from prep.cache.ledger.columns import Column
from prep.errors import ConfigError
from prep.geometry import pixels_of
from prep.loader.index import Index
from prep.loader.noise import PLAIN, Noise
from prep.loader.timesteps import UNIFORM, Timesteps

NO_TEXT = -1  # the unconditional row
_PRIOR = ROLES.index("prior")
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
    references: tuple[int, ...] = ()  # those it is shown with, as numbers in their flat columns
    kept: tuple[int, ...] = ()  # the places of these among the references of its sample
    prior: bool = False  # whether its sample has that role


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropout:
    """The probabilities with which a showing lacks some of its conditions."""

    caption: float = 0.0  # its text: it gets the unconditional row
    references: float = 0.0  # all of its references
    each_reference: float = 0.0  # each of them, by itself

    def kept(self, count: int, key: tuple[int, int, bytes, int]) -> tuple[int, ...]:
        """Which of so many references a showing keeps, by their places."""
        if not count or not (self.references or self.each_reference):
            return tuple(range(count))
        chances = philox(draw_key(*key, "references")).random(1 + count)
        if chances[0] < self.references:
            return ()
        return tuple(np.flatnonzero(chances[1:] >= self.each_reference).tolist())


NO_DROPOUT = Dropout()


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

    def busiest(self, number: int, part: MicroBatch, plan: StepPlan) -> list[range]:
        """The samples of each rank whose forward passes this one's must be as many as: its own, or those of all."""
        if self.world == 1 or not self.pad_ranks:
            return [self.of(number, part, plan)]
        ends = split_points(part, plan, self.world).tolist()
        return [range(start, end) for start, end in pairwise(ends)]


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


def training(index: Index, plan: StepPlan, first: int, total: int, *, timesteps: int,
             dropout: Dropout = NO_DROPOUT, chances: Sequence[Timesteps] = (), noise: Noise = PLAIN,
             most: int | None = None, share: RankShare = WHOLE) -> Iterator[BatchRequest]:
    """Yields one rank's requests for the micro-batches of steps `first` to `total` - 1, in order, in forward passes of
    at most `most` samples with as many references; `passes` counts those of a step.

    Splitting changes no step: it keeps the same samples with the same draws. `chances`: by bucket; uniform if empty.
    """
    by_bucket = chances or [UNIFORM] * len(plan.counts)
    for step in range(first, total):
        parts = plan.at(step)
        epoch = step // plan.steps_per_epoch
        for number, part in enumerate(parts):
            timestep = partial(by_bucket[part.bucket].draw, count=timesteps)
            places = share.of(number, part, plan)
            key, made = (plan.seed, epoch), 0
            for draws in _groups(_draws(index, part, places, key, dropout, timestep)):
                for start in _starts(len(draws), most):
                    yield BatchRequest(bucket=part.bucket, draws=draws[start : start + (most or len(draws))],
                                       noise=noise)
                    made += 1
            for _ in range(_passes(index, plan, number, part, key, dropout, most, share) - made):
                padding = tuple(_draws(index, part, range(1), key, dropout, timestep))
                yield BatchRequest(bucket=part.bucket, draws=padding, noise=noise, padding=True)


def passes(index: Index, plan: StepPlan, step: int, *, dropout: Dropout = NO_DROPOUT, most: int | None = None,
           share: RankShare = WHOLE) -> int:
    """The forward passes of one rank in a step; 0 if there are fewer samples than ranks."""
    key = plan.seed, step // plan.steps_per_epoch
    return sum(_passes(index, plan, number, part, key, dropout, most, share)
               for number, part in enumerate(plan.at(step)))


def _passes(index: Index, plan: StepPlan, number: int, part: MicroBatch, key: tuple[int, int], dropout: Dropout,
            most: int | None, share: RankShare) -> int:
    """The forward passes of a rank in micro-batch `number` of a step; `key` is seed and epoch."""
    references = len(index.manifest.shapes[part.bucket][1])
    counts = []
    for places in share.busiest(number, part, plan):
        sizes = Counter(dropout.kept(references, (*key, index.samples.ids[sample].tobytes(), showing))
                        for sample, showing in _showings(index, part, places)).values() if references else [len(places)]
        counts.append(sum(len(_starts(size, most)) for size in sizes))
    return max(counts)


def _groups(draws: Iterable[Draw]) -> Iterable[tuple[Draw, ...]]:
    """The draws of a micro-batch, those with references of equal sizes together, in the order of the first of each."""
    groups: dict[tuple[int, ...], list[Draw]] = {}
    for draw in draws:
        groups.setdefault(draw.kept, []).append(draw)
    return map(tuple, groups.values())


def _starts(count: int, most: int | None) -> range:
    """The first draw of each forward pass over `count` draws."""
    return range(0, count, most or max(count, 1))


def validation(index: Index, micro_batch: int, *, count: int, timesteps: int, most: int = 0,
               training: bool = False) -> Iterator[BatchRequest]:
    """The validation samples, or those of `training`, at `count` fixed timesteps, first view and first text, in
    micro-batches.

    At most `most` samples (0: all), the same each time and evenly spread over all of them.
    """
    of_buckets = index.training if training else index.validation
    total, first = sum(len(members) for members in of_buckets), 0
    chosen = {number * total // most for number in range(most)} if 0 < most < total else set(range(total))
    for bucket, members in enumerate(of_buckets):
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
        members = index.training[bucket]
        return (min(most, _samples(plan, bucket, world)) * pixels_of(index.manifest.shapes[bucket]),
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


def _draws(index: Index, part: MicroBatch, places: range, key: tuple[int, int], dropout: Dropout,
           timestep: Callable[[np.random.Generator], int]) -> Iterator[Draw]:
    """The showings at these places of a micro-batch; `key` is seed and epoch."""
    for sample, showing in _showings(index, part, places):
        yield _shot(index, sample, (*key, index.samples.ids[sample].tobytes(), showing), dropout, timestep)


def _showings(index: Index, part: MicroBatch, places: range) -> Iterator[tuple[int, int]]:
    """Samples at these places of a micro-batch, and which of the sample's showings in its epoch each is."""
    some = slice(places.start, places.stop)
    shown = index.showings(part.bucket, part.occurrences[some])
    for sample, repeat, turn in zip(*shown, part.turns[some].tolist(), strict=True):
        yield sample, repeat + turn * int(index.samples.repeats[sample])


def _shot(index: Index, sample: int, key: tuple[int, int, bytes, int], dropout: Dropout,
          timestep: Callable[[np.random.Generator], int]) -> Draw:
    def draw(purpose: str) -> np.random.Generator:
        return philox(draw_key(*key, purpose))

    samples = index.samples
    views, texts = _span(samples.view_offsets, sample), _span(samples.text_offsets, sample)
    view = views[0] if len(views) == 1 else views[int(draw("view").integers(len(views)))]
    text = texts[0] if len(texts) == 1 else texts[_weighted(samples.texts["weight"][texts.start : texts.stop],
                                                            draw("text").random())]
    dropped = dropout.caption > 0 and draw("dropout").random() < dropout.caption
    references = samples.references_of(sample, view)
    kept = dropout.kept(len(references), key) if references else ()
    return Draw(sample=sample, view=view, text=NO_TEXT if dropped else text,
                timestep=timestep(draw("timestep")), noise=draw_key(*key, "noise"),
                weight=float(samples.weight[sample]), kept=kept, references=tuple(map(references.__getitem__, kept)),
                posterior=draw_key(*key, "posterior") if index.with_std else None,
                prior=int(samples.role[sample]) == _PRIOR)


def require_shown(index: Index, dropout: Dropout) -> None:
    """Raises `ConfigError` if references are to be dropped whose pixels are in the text rows, too, or which the model
    always takes, or which are no conditions."""
    name = "reference_dropout" if dropout.references else "each_reference_dropout"
    if index.paired and (dropout.references or dropout.each_reference):
        raise ConfigError(f"{name} is above 0, expected 0 for pairs of pictures, of which a slider needs both",
                          hint=f"leave {name} out of the settings")
    if index.inpaints and (dropout.references or dropout.each_reference):
        raise ConfigError(f"{name} is above 0, expected 0 for family '{index.manifest.family}', whose models always "
                          "take the masked picture",
                          hint="a mask that is white everywhere hides all of a picture")
    if index.seeing and (dropout.references or dropout.each_reference):
        raise ConfigError(f"{name} is above 0, expected 0 for family '{index.manifest.family}': its text encoder sees "
                          "the references, so they would stay in the rows of captions",
                          hint="caption_dropout drops the words and keeps the pictures, as the negative prompt does")


def _fixed(index: Index, sample: int, timestep: int) -> Draw:
    key = draw_key(_VALIDATION_SEED, 0, index.samples.ids[sample].tobytes(), timestep, "validation")
    view = int(index.samples.view_offsets[sample])
    references = index.samples.references_of(sample, view)
    return Draw(sample=sample, view=view, noise=key, timestep=timestep, references=tuple(references),
                kept=tuple(range(len(references))),
                text=int(index.samples.text_offsets[sample]), weight=1.0)


def _span(offsets: Column, sample: int) -> range:
    return range(int(offsets[sample]), int(offsets[sample + 1]))


def _weighted(weights: Column, chance: float) -> int:
    """The index drawn with probability proportional to `weights`, from `chance` in [0, 1)."""
    ends = np.cumsum(weights, dtype=np.float64)
    return min(int(np.searchsorted(ends, chance * ends[-1], side="right")), len(ends) - 1)
