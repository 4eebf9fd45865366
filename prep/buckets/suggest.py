"""Suggests the buckets and batch size with the smallest loss, of all kinds × steps × `min_bucket` × batch sizes.

The loss is the sum of three terms, each in percent:

    crop    cropped area of the pictures that are used
    unused  pictures that no bucket takes
    empty   empty slots in an epoch's micro-batches, since a bucket's last one is not full

The suggestion is the largest batch size within `TOLERANCE` of the smallest loss. Batch size 1 never has empty slots,
which says nothing of the buckets, so it is left out of that unless all others lose more by `MUCH`.
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
STEPS = (16, 32, 64)  # multiples of the recipe's or family's step to try
MIN_BUCKETS = (1, 2, 4, 8, 16)  # values of `min_bucket` to try
BATCHES = (1, 2, 4, 8, 16, 32)
TOLERANCE = 1.0  # percent
MUCH = 20.0  # percent


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketSuggestion:
    """One set of buckets with one batch size, and its losses in percent."""

    kind: Kind
    step: int
    min_bucket: int
    batch_size: int
    buckets: int  # buckets with pictures
    crop: float
    unused: float
    empty: float

    @property
    def score(self) -> float:
        """The total loss."""
        return self.crop + self.unused + self.empty

    def as_json(self) -> dict[str, Any]:
        """The suggestion as `prep bucket --json` has it."""
        return {"buckets": self.kind, "step": self.step, "min_bucket": self.min_bucket, "batch_size": self.batch_size,
                "used_buckets": self.buckets, "crop": round(self.crop, 2), "unused": round(self.unused, 2),
                "empty": round(self.empty, 2), "score": round(self.score, 2)}


def as_command_options(choice: Mapping[str, Any]) -> str:
    """A suggestion from `as_json` as command-line options."""
    return (f"--buckets {choice['buckets']} --step {choice['step']} --min-bucket {choice['min_bucket']} "
            f"--batch-size {choice['batch_size']}")


Sizes = Mapping[Size, tuple[int, int]]  # number of pictures of a size, and their showings per epoch


def suggest_buckets(sizes: Sizes, rules: Sequence[Rules]) -> list[BucketSuggestion]:
    """The best suggestion, then the best of each batch size; empty if none uses any picture.

    `rules` has one entry per resolution; their steps and multiples of these are tried, and everything else is kept.
    """
    suggestions = [choice for candidate in _candidates(rules) for choice in _choices(sizes, candidate)]
    best = [min((choice for choice in suggestions if choice.batch_size == batch), key=_order)
            for batch in BATCHES if suggestions]
    if not best:
        return []
    alone, *larger = best
    least = min(suggestion.score for suggestion in larger)
    near = [suggestion for suggestion in larger if suggestion.score <= least + TOLERANCE]
    return [near[-1] if least <= alone.score + MUCH else alone, *best]


def _order(suggestion: BucketSuggestion) -> tuple[float, int, int, int]:
    """The sort key: among equals fewer buckets first, then the larger step, then less merging."""
    return round(suggestion.score, 6), suggestion.buckets, -suggestion.step, suggestion.min_bucket


def _candidates(rules: Sequence[Rules]) -> Iterator[tuple[Rules, ...]]:
    for kind in KINDS:
        for step in sorted({least := rules[0].step, *(step for step in STEPS if step % least == 0)}):
            candidate = tuple(replace(rule, kind=kind, step=step, sizes=()) for rule in rules)
            try:
                for rule in candidate:
                    buckets_of(rule)
            except ConfigError:  # this kind has no buckets at this resolution and step
                continue
            yield candidate


def _choices(sizes: Sizes, rules: Sequence[Rules]) -> Iterator[BucketSuggestion]:
    """A suggestion for each `min_bucket` and batch size with these buckets."""
    homes = [{size: assign(size, buckets_of(rule), rule) for size in sizes} for rule in rules]
    members = [_members(sizes, each) for each in homes]
    for least in MIN_BUCKETS:
        moves = [merge_small(inside, replace(rule, min_bucket=least))[0]
                 for rule, inside in zip(rules, members, strict=True)]
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
            yield BucketSuggestion(kind=rules[0].kind, step=rules[0].step, min_bucket=least, batch_size=batch,
                                   crop=cut / used,
                                   buckets=sum(map(bool, counts.values())), unused=100 * unused / whole,
                                   empty=100 * (places - used) / places)


def _members(sizes: Sizes, homes: Mapping[Size, Size | None]) -> dict[Size, Group]:
    groups: dict[Size, Group] = {}
    for size, (count, _) in sizes.items():
        home = homes[size]
        if home is not None:
            before, (width, height) = groups.get(home, (0, size))
            groups[home] = before + count, (min(width, size[0]), min(height, size[1]))
    return groups
