"""Plans step k of epoch e: a pure function of counts per bucket, seed, batch size, micro-batch and policy.

Two keyed permutations, each looked up in O(1): one of a bucket's occurrences, cut into micro-batches of one bucket;
then one of the epoch's micro-batches, cut into steps. Nothing is stored or shuffled: any step can be computed first.
With shuffle `partitioned`, a bucket's occurrences are permuted in parts, one for each place of a micro-batch
(`prep.batching.parts`), so that each of several computers needs its own part of the rows.
An *occurrence* is one showing of a sample in an epoch: a bucket with samples of repeats 1 and 3 has occurrences 0..3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from prep.batching.parts import Division, outside_rest
from prep.batching.permutation import permute, permute_each
from prep.batching.policy import Shuffle, Underfill
from prep.batching.rng import plan_key, plan_number
from prep.errors import ConfigError, EmptyPlanError
from prep.formatting import format_bucket, join_names
from prep.geometry import BucketShape

Indices = NDArray[np.int64]
_Made = tuple[Indices, Indices, Indices | None]  # occurrences, turns and places of a micro-batch
STEPS_AT_ONCE, OCCURRENCES_AT_ONCE = 64, 1 << 14


@dataclass(frozen=True, kw_only=True, eq=False)
class MicroBatch:
    """Occurrences of one bucket for one forward pass; at most `micro_batch` of them."""

    bucket: int
    occurrences: Indices  # [n]
    turns: Indices  # [n]; 0: first showing in this epoch; above 0: repeated to fill a batch, with draws of its own
    places: Indices | None = None  # [n]; in a full micro-batch, where ranks have places of their own; None: from 0 on

    @property
    def repeated(self) -> NDArray[np.bool_]:
        """[n]: which entries only fill the batch."""
        return self.turns > 0


@dataclass(frozen=True, kw_only=True)
class StepPlan:
    """The steps of any epoch.

    With `drop` and `repeat` every step has `batch_size` samples: `drop` drops what does not fill a micro-batch of
    its bucket or the last step, `repeat` fills both by repeating some samples. `partial` shows everything once: a
    bucket's last micro-batch may be short, and the last step may have fewer micro-batches.
    """

    counts: tuple[int, ...]  # occurrences by bucket
    seed: int
    batch_size: int
    micro_batch: int
    underfill: Underfill
    shuffle: Shuffle = "global"

    @property
    def partitioned(self) -> bool:
        """Whether each place of a micro-batch has its own part of each bucket, and so each rank."""
        return self.shuffle == "partitioned"

    @cached_property
    def batches(self) -> tuple[int, ...]:
        """Micro-batches by bucket."""
        spare = 0 if self.underfill == "drop" else self.micro_batch - 1
        return tuple((count + spare) // self.micro_batch for count in self.counts)

    @property
    def per_step(self) -> int:
        """Micro-batches of a full step."""
        return self.batch_size // self.micro_batch

    @property
    def steps_per_epoch(self) -> int:
        """Steps of every epoch; 0 if the policy drops everything."""
        spare = 0 if self.underfill == "drop" else self.per_step - 1
        return (sum(self.batches) + spare) // self.per_step

    def step(self, epoch: int, number: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of one step, in the order in which ranks take turns."""
        assert 0 <= number < self.steps_per_epoch, f"step {number} of {self.steps_per_epoch}"
        return self._at(epoch, self._places(number))

    def at(self, step: int) -> tuple[MicroBatch, ...]:
        """The micro-batches of step `step`, counted from the start of training.

        Many steps are permuted at once, and the last of them kept: one after another they cost a tenth of `step`.
        """
        at_once = max(1, min(STEPS_AT_ONCE, OCCURRENCES_AT_ONCE // self.batch_size))
        return _steps(self, step - step % at_once, at_once)[step % at_once]

    def sizes(self, epoch: int) -> Indices:
        """[steps_per_epoch]: how many samples each step of the epoch has."""
        whole = np.full(self.steps_per_epoch, self.batch_size)
        if self.underfill != "partial" or not self.steps_per_epoch:
            return whole
        total = int(self._starts[-1])
        short = np.zeros(total, np.int64)  # what each micro-batch lacks
        for end, count in zip(self._starts[1:].tolist(), self.counts, strict=True):
            if count:
                short[end - 1] = -count % self.micro_batch
        lacking = np.full(self.steps_per_epoch * self.per_step, self.micro_batch)
        lacking[:total] = short[permute(np.arange(total), total, plan_key("steps", self.seed, epoch))]
        sizes: Indices = whole - lacking.reshape(-1, self.per_step).sum(axis=1)
        return sizes

    def left_out(self, epoch: int) -> dict[int, Indices]:
        """Occurrences that the epoch drops, sorted, by bucket; the cost is proportional to their number."""
        if self.underfill != "drop":
            return {}
        missing: dict[int, list[Indices]] = {}
        for bucket, (count, batches) in enumerate(zip(self.counts, self.batches, strict=True)):
            rest = np.arange(batches * self.micro_batch, count)
            missing.setdefault(bucket, []).append(
                self._division(epoch, bucket).rest() if self.partitioned
                else permute(rest, count, self._bucket_key(epoch, bucket)))
        for batch in self._at(epoch, np.arange(self.steps_per_epoch * self.per_step, sum(self.batches))):
            missing[batch.bucket].append(batch.occurrences)
        dropped = {bucket: np.sort(np.concatenate(parts)) for bucket, parts in missing.items()}
        return {bucket: occurrences for bucket, occurrences in dropped.items() if len(occurrences)}

    def repeated(self, epoch: int) -> dict[int, Indices]:
        """Occurrences repeated to fill batches, sorted, by bucket; one entry per extra showing."""
        if self.underfill != "repeat" or not self.steps_per_epoch:
            return {}
        again: dict[int, list[Indices]] = {}
        for bucket, batches in enumerate(self.batches):
            if batches:
                (last,) = self._micro_batches(*(np.array([value]) for value in (epoch, bucket, batches - 1, 0)))
                again.setdefault(bucket, []).append(last.occurrences[last.repeated])
        for batch in self._at(epoch, np.arange(sum(self.batches), self.steps_per_epoch * self.per_step)):
            again[batch.bucket].append(batch.occurrences)
        extra = {bucket: np.sort(np.concatenate(parts)) for bucket, parts in again.items()}
        return {bucket: occurrences for bucket, occurrences in extra.items() if len(occurrences)}

    @cached_property
    def _starts(self) -> Indices:
        """[buckets + 1]: how many micro-batches the buckets before each have."""
        return np.concatenate([[0], np.cumsum(self.batches, dtype=np.int64)]).astype(np.int64)

    def _places(self, number: int) -> Indices:
        """The places of step `number` of an epoch in the order of its micro-batches."""
        end = (number + 1) * self.per_step
        if self.underfill == "partial":
            end = min(end, int(self._starts[-1]))
        return np.arange(number * self.per_step, end)

    def _at(self, epochs: Indices | int, places: Indices) -> tuple[MicroBatch, ...]:
        """The micro-batches at `places` of the order of `epochs`, one for each place or for all; places past the end
        start another lap."""
        total = int(self._starts[-1])
        if not len(places):
            return ()
        used, which = np.unique(np.broadcast_to(epochs, places.shape), return_inverse=True)
        keys = [plan_key("steps", self.seed, epoch) for epoch in used.tolist()]
        laps, order = places // total, permute_each(places % total, which, [total] * len(keys), keys)
        buckets = np.searchsorted(self._starts, order, side="right") - 1
        return self._micro_batches(used[which], buckets, order - self._starts[buckets], laps)

    def _micro_batches(self, epochs: Indices, buckets: Indices, numbers: Indices, laps: Indices
                       ) -> tuple[MicroBatch, ...]:
        """Micro-batch numbers[i] of buckets[i], on its laps[i]-th showing in epochs[i]; all permuted at once."""
        used, which = np.unique(np.stack([epochs, buckets]), axis=1, return_inverse=True)
        pairs: list[tuple[int, int]] = [(epoch, bucket) for epoch, bucket in used.T.tolist()]
        permuted = self._permuted_in_parts if self.partitioned else self._permuted
        made = permuted(pairs, which.ravel(), numbers)
        laps_turns = [lap * -(-self.batches[bucket] * self.micro_batch // self.counts[bucket])  # no two share a number
                      for bucket, lap in zip(buckets.tolist(), laps.tolist(), strict=True)]
        return tuple(MicroBatch(bucket=bucket, occurrences=some, turns=turns + lap, places=places)
                     for bucket, (some, turns, places), lap in zip(buckets.tolist(), made, laps_turns, strict=True))

    def _permuted(self, pairs: Sequence[tuple[int, int]], which: Indices, numbers: Indices) -> Iterator[_Made]:
        """The occurrences and turns of micro-batch numbers[i] of pairs[which[i]], an epoch and a bucket."""
        spans, turns = [], []
        for number, pair in zip(numbers.tolist(), which.tolist(), strict=True):
            count, end = self.counts[pairs[pair][1]], (number + 1) * self.micro_batch
            places = np.arange(number * self.micro_batch, end if self.underfill == "repeat" else min(end, count))
            spans.append(places % count)
            turns.append(places // count)
        ends = np.cumsum([len(span) for span in spans])
        occurrences = permute_each(np.concatenate(spans), np.repeat(which, np.diff(ends, prepend=0)),
                                   [self.counts[bucket] for _, bucket in pairs],
                                   [self._bucket_key(epoch, bucket) for epoch, bucket in pairs])
        return zip(np.split(occurrences, ends[:-1]), turns, [None] * len(turns), strict=True)

    def _permuted_in_parts(self, pairs: Sequence[tuple[int, int]], which: Indices, numbers: Indices) -> Iterator[_Made]:
        """Like `_permuted`, each part by itself; and the places that the occurrences have in a full micro-batch."""
        divisions = [self._division(epoch, bucket) for epoch, bucket in pairs]
        slots = [divisions[pair].slots(number, fill=self.underfill == "repeat")
                 for number, pair in zip(numbers.tolist(), which.tolist(), strict=True)]
        ends = np.cumsum([len(each.places) for each in slots])
        of = np.repeat(which, np.diff(ends, prepend=0))
        places, rows, known = (np.concatenate([each[number] for each in slots]) for number in range(3))
        sizes = [max(each.size, 1) for each in divisions]
        inside = permute_each(rows, of, sizes, [self._bucket_key(epoch, bucket) for epoch, bucket in pairs], places)
        count, start = (np.array(values)[of] for values in ([each.count for each in divisions],
                                                            [each.start for each in divisions]))
        occurrences = outside_rest(places * np.array(sizes)[of] + inside, count, count % self.micro_batch, start)
        return zip(np.split(np.where(known < 0, occurrences, known), ends[:-1]), [each.turns for each in slots],
                   [each.places for each in slots], strict=True)

    def _division(self, epoch: int, bucket: int) -> Division:
        count = self.counts[bucket]
        start, fill = (plan_number(name, max(count, 1), self.seed, epoch, bucket) for name in ("rest", "fill"))
        return Division(count=count, micro_batch=self.micro_batch, start=start, fill=fill)

    def _bucket_key(self, epoch: int, bucket: int) -> bytes:
        return plan_key("bucket", self.seed, epoch, bucket)


@lru_cache(maxsize=4)  # of the thread that reads ahead, and of the loop
def _steps(plan: StepPlan, first: int, count: int) -> tuple[tuple[MicroBatch, ...], ...]:
    """The micro-batches of steps `first` to `first + count` - 1 of training."""
    epochs, numbers = np.divmod(np.arange(first, first + count), plan.steps_per_epoch)
    places = [plan._places(number) for number in numbers.tolist()]
    sizes = [len(each) for each in places]
    batches = iter(plan._at(np.repeat(epochs, sizes), np.concatenate(places)))
    return tuple(tuple(islice(batches, size)) for size in sizes)


def step_plan(
    counts: Sequence[int],
    *,
    seed: int,
    batch_size: int,
    micro_batch: int | None = None,
    underfill: Underfill = "partial",
    shuffle: Shuffle = "global",
) -> StepPlan:
    """The plan for `counts` occurrences by bucket; `micro_batch` defaults to `batch_size`. Raises `ConfigError`."""
    micro = batch_size if micro_batch is None else micro_batch
    for name, value in (("batch_size", batch_size), ("micro_batch", micro)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 1")
    if batch_size % micro:
        raise ConfigError(f"batch_size is {batch_size}, expected a multiple of micro_batch, {micro}",
                          hint=f"batch_size = {-(-batch_size // micro) * micro}")
    for name, chosen, kinds in (("underfill", underfill, Underfill), ("shuffle", shuffle, Shuffle)):
        if chosen not in get_args(kinds):
            raise ConfigError(f"{name} is '{chosen}', expected one of: {', '.join(get_args(kinds))}")
    return StepPlan(counts=tuple(int(count) for count in counts), seed=seed, batch_size=batch_size, micro_batch=micro,
                    underfill=underfill, shuffle=shuffle)


def require_steps(plan: StepPlan, shapes: Sequence[BucketShape], names: Sequence[str] = ()) -> None:
    """Raises `EmptyPlanError`, with policy, counts by bucket and some sample `names`, if the plan has no step."""
    if plan.steps_per_epoch:
        return
    if not sum(plan.counts):
        raise EmptyPlanError("there is no training sample, expected at least 1",
                             hint="see why with: prep scan SOURCE, or lower validation.fraction")
    buckets = [f"{format_bucket(shape)}: {count}" for shape, count in zip(shapes, plan.counts, strict=True) if count]
    who = f" ({join_names(names, 10)})" if names else ""
    raise EmptyPlanError(
        f"underfill '{plan.underfill}' drops all {sum(plan.counts)} samples{who}, expected at least one step of "
        f"batch_size {plan.batch_size} in micro-batches of {plan.micro_batch}; samples by bucket: {', '.join(buckets)}",
        hint="--underfill partial, or a smaller --batch-size or --micro-batch",
    )
