"""Which buckets and batch size lose least of a data set: all kinds × steps × `min_bucket` × batch sizes, counted.

What is lost is a sum of three, each in percent:

    crop    of the area of the pictures that are used, cut away
    unused  of the pictures, that no bucket takes
    empty   of the places in an epoch's micro-batches, since a bucket's last one is not full

The batch size of 1 leaves no place empty, so the largest batch is named that loses at most `NEAR` more than the least.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prep.buckets.assign import Group, assign, merge_small
from prep.buckets.sizes import Kind, Rules, buckets_of
from prep.errors import ConfigError
from prep.geometry import Size, cover, crop_loss

KINDS: tuple[Kind, ...] = ("step", "ratio", "sdxl-40", "single")
STEPS = (16, 32, 64)  # multiples of the recipe's step, or the family's, are tried
MIN_BUCKETS = (1, 2, 4, 8, 16)  # of `min_bucket`
BATCHES = (1, 2, 4, 8, 16, 32)
TOLERANCE = 1.0  # percent


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """One set of buckets with one batch size, and what is lost with it; in percent."""

    kind: Kind
    step: int
    min_bucket: int
    batch_size: int
    buckets: int  # that have pictures
    crop: float
    unused: float
    empty: float

    @property
    def score(self) -> float:
        """All that is lost."""
        return self.crop + self.unused + self.empty

    def as_json(self) -> dict[str, Any]:
        """The choice in `prep bucket --json`."""
        return {"buckets": self.kind, "step": self.step, "min_bucket": self.min_bucket, "batch_size": self.batch_size,
                "used_buckets": self.buckets, "crop": round(self.crop, 2), "unused": round(self.unused, 2),
                "empty": round(self.empty, 2), "score": round(self.score, 2)}


def as_command_options(choice: Mapping[str, Any]) -> str:
    """A choice, as `as_json` has it, as one types it."""
    return (f"--buckets {choice['buckets']} --step {choice['step']} --min-bucket {choice['min_bucket']} "
            f"--batch-size {choice['batch_size']}")


Sizes = Mapping[Size, tuple[int, int]]  # how many pictures are of a size, and how often an epoch shows one of them


def suggest_buckets(sizes: Sizes, rules: Sequence[Rules]) -> list[Suggestion]:
    """The best choice, then the best of each batch size; nothing where no choice uses any picture.

    Of `rules`, one for each resolution, all is kept that is not tried; their step, and multiples of it, are.
    """
    tried = [choice for one in _candidates(rules) for choice in _choices(sizes, one)]
    best = [min((one for one in tried if one.batch_size == batch), key=_order) for batch in BATCHES if tried]
    if not best:
        return []
    least = min(one.score for one in best)
    return [max((one for one in best if one.score <= least + TOLERANCE), key=lambda one: one.batch_size), *best]


def _order(one: Suggestion) -> tuple[float, int, int, int]:
    """Of equals the fewer buckets, then the larger step, then the less merging."""
    return round(one.score, 6), one.buckets, -one.step, one.min_bucket


def _candidates(rules: Sequence[Rules]) -> Iterator[tuple[Rules, ...]]:
    for kind in KINDS:
        for step in sorted({least := rules[0].step, *(step for step in STEPS if step % least == 0)}):
            tried = tuple(replace(one, kind=kind, step=step, sizes=()) for one in rules)
            try:
                for one in tried:
                    buckets_of(one)
            except ConfigError:  # this kind has no buckets at this resolution and step
                continue
            yield tried


def _choices(sizes: Sizes, rules: Sequence[Rules]) -> Iterator[Suggestion]:
    """What each `min_bucket` and batch size lose with these buckets."""
    homes = [{size: assign(size, buckets_of(one), one) for size in sizes} for one in rules]
    members = [_members(sizes, each) for each in homes]
    for least in MIN_BUCKETS:
        moves = [merge_small(inside, replace(one, min_bucket=least))[0]
                 for one, inside in zip(rules, members, strict=True)]
        counts, cut, unused = Counter[Size](), 0.0, 0
        for size, (pictures, count) in sizes.items():
            ends = {move.get(home, home) for move, each in zip(moves, homes, strict=True) if (home := each[size])}
            unused += 0 if ends else pictures
            for bucket in ends:
                counts[bucket] += count
                cut += count * crop_loss(cover(size, bucket))
        used, whole = sum(counts.values()), sum(pictures for pictures, _ in sizes.values())
        for batch in BATCHES if used else ():
            places = sum(-(-count // batch) * batch for count in counts.values())
            yield Suggestion(kind=rules[0].kind, step=rules[0].step, min_bucket=least, batch_size=batch,
                             crop=cut / used,
                             buckets=sum(map(bool, counts.values())), unused=100 * unused / whole,
                             empty=100 * (places - used) / places)


def _members(sizes: Sizes, homes: Mapping[Size, Size | None]) -> dict[Size, Group]:
    found: dict[Size, Group] = {}
    for size, (count, _) in sizes.items():
        home = homes[size]
        if home is not None:
            before, (width, height) = found.get(home, (0, size))
            found[home] = before + count, (min(width, size[0]), min(height, size[1]))
    return found
