"""Assigns pictures to buckets from their sizes alone: pure, in exact integers, the same on every machine.

A picture goes to the bucket nearest in |log(aspect ratio)|, is scaled to cover it, and is cropped at the center or as
`views` says. It is not enlarged unless the rules allow it: a picture too small for its bucket gets a bucket of about
its own area, with the same step, or none if the rules say so.
Sizes are (width, height) in pixels; `sizes.Rules` defines the buckets.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from prep.buckets.sizes import Rules, buckets_of
from prep.findings import Finding
from prep.geometry import BucketShape, Placement, Size, cover, crop_loss, enlarges, nearest

Group = tuple[int, Size]  # number of pictures, and the smallest width and height among them


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One picture and its bucket."""

    index: int  # index in the input
    name: str
    size: Size
    resolution: int  # the resolution of the rules that assigned this bucket
    views: tuple[Placement, ...]  # all in one bucket and at one scale; at least one
    references: tuple[tuple[Placement, ...], ...] = ()  # of each view, in the order of the picture's; (): it has none

    @property
    def placement(self) -> Placement:
        """The first view."""
        return self.views[0]

    @property
    def shape(self) -> BucketShape:
        """The bucket, and the sizes of the references."""
        return self.placement.bucket, tuple(place.bucket for place in self.references[0]) if self.references else ()

    @property
    def scale(self) -> float:
        """The factor by which the picture is scaled, before rounding to whole pixels."""
        (width, height), (wide, high) = self.size, self.placement.bucket
        return max(wide / width, high / height)

    @property
    def upscaled(self) -> bool:
        """Whether the picture is enlarged."""
        return enlarges(self.size, self.placement.bucket)

    @property
    def crop_loss(self) -> float:
        """Percent of the picture's area that is cropped away."""
        return crop_loss(self.placement)


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """A bucket with too few pictures, and the bucket that took them."""

    bucket: Size
    into: Size
    pictures: int
    before: float = field(default=0.0, compare=False)  # percent of their area cropped away, on average ...
    after: float = field(default=0.0, compare=False)  # ... in their bucket and in the one that took them


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignments:
    """The bucket of every picture; `findings` has pictures without one, and buckets that stayed too small."""

    rules: tuple[Rules, ...]  # one for each resolution
    buckets: tuple[Size, ...]  # those with pictures, sorted
    pictures: tuple[Assignment, ...]  # in input order; of several resolutions one after the other
    findings: tuple[Finding, ...]
    merges: tuple[Merge, ...]

    @property
    def shapes(self) -> tuple[BucketShape, ...]:
        """The buckets, each once for each list of sizes of references, sorted."""
        return tuple(sorted({assignment.shape for assignment in self.pictures}))


def assign_buckets(pictures: Iterable[tuple[str, Size]], rules: Rules, *more: Rules) -> Assignments:
    """Assigns every (name, size) a bucket and placement, once per rules; the same bucket twice counts once.

    So a picture that is too small for a second resolution gets no second sample equal to its first.
    Raises `ConfigError` for contradictory rules.
    """
    entries, every = list(pictures), (rules, *more)
    runs = [_placed([size for _, size in entries], each) for each in every]
    placed, findings = [], []
    alone = {place: (place,) for placements, _ in runs for place in placements.values()}  # shared by many pictures
    for index, (name, size) in enumerate(entries):
        resolutions: dict[Placement, int] = {}
        for each, (placements, _) in zip(every, runs, strict=True):
            if size in placements:
                resolutions.setdefault(placements[size], each.resolution)
        placed += [Assignment(index=index, name=name, size=size, resolution=resolution, views=alone[placement])
                   for placement, resolution in resolutions.items()]
        if not resolutions:
            findings.append(_too_small(name, size, rules))
    used = tuple(sorted({assignment.placement.bucket for assignment in placed}))
    return Assignments(rules=every, buckets=used, pictures=tuple(placed),
                       findings=(*findings, *_still_small(placed, rules)),
                       merges=tuple(merge for _, merges in runs for merge in merges))


def _placed(sizes: Sequence[Size], rules: Rules) -> tuple[dict[Size, Placement], tuple[Merge, ...]]:
    """Placements by size, and the merges that led to them; a size that no bucket takes is missing."""
    buckets = buckets_of(rules)
    homes = {size: assign(size, buckets, rules) for size in set(sizes)}
    members: dict[Size, Group] = {}
    for size in sizes:
        home = homes[size]
        if home is not None:
            members[home] = _crowd(members.get(home, (0, size)), (1, size))
    moves, merges = merge_small(members, rules)
    return {size: cover(size, moves.get(home, home)) for size, home in homes.items() if home is not None}, (
        _priced(merges, Counter((homes[size], size) for size in sizes)) if merges else ())


def _priced(merges: Iterable[Merge], members: Mapping[tuple[Size | None, Size], int]) -> tuple[Merge, ...]:
    """The merges with their crop losses; `members` counts (bucket, size) before any merge."""
    inside: dict[Size, Counter[Size]] = defaultdict(Counter)
    for (home, size), count in members.items():
        if home is not None:
            inside[home][size] += count
    priced = []
    for merge in merges:
        sizes = inside.pop(merge.bucket)
        before, after = (sum(count * crop_loss(cover(size, bucket)) for size, count in sizes.items()) / merge.pictures
                         for bucket in (merge.bucket, merge.into))
        priced.append(replace(merge, before=before, after=after))
        inside[merge.into] += sizes
    return tuple(priced)


def assign(size: Size, buckets: Sequence[Size], rules: Rules) -> Size | None:
    """The bucket for a picture of `size`, or None if it is too small for all."""
    if min(size) < rules.min_picture_side:
        return None
    reach, best = rules.max_bucket(size), nearest(size, buckets)
    if reach is None or not enlarges(reach, best):
        return best
    if rules.upscale == "reject":
        return None
    if rules.kind in ("list", "single"):  # the user listed the sizes: make no others
        fitting = [bucket for bucket in buckets if not enlarges(reach, bucket)]
        return nearest(size, fitting) if fitting else None
    return own_bucket(size, rules, reach)


def own_bucket(size: Size, rules: Rules, reach: Size) -> Size | None:
    """The bucket for a picture too small for the others: as large as possible within `reach`, with little cropping.

    Sweeps like `step_buckets`, with each side limited by `reach`, and takes the size nearest in aspect ratio.
    """
    step, area, (_, longest) = rules.step, rules.resolution * rules.resolution, rules.side_range
    wide, high = (min(side, longest) // step * step for side in reach)
    swept = [(width, min(high, area // width // step * step)) for width in range(step, wide + 1, step)]
    swept += [(min(wide, area // height // step * step), height) for height in range(step, high + 1, step)]
    inside = [bucket for bucket in swept if min(bucket) > 0]
    return nearest(size, inside) if inside else None


def merge_small(members: dict[Size, Group], rules: Rules) -> tuple[dict[Size, Size], tuple[Merge, ...]]:
    """Moves (bucket to final bucket) and merges that leave as few buckets as possible below `rules.min_bucket`.

    The bucket with the fewest pictures is merged first, into the one nearest in aspect ratio for which none of its
    pictures is too small, and which has at least half its area: merging must not shrink a picture to a thumbnail.
    A bucket without such a neighbor stays.
    """
    groups, moves, stuck = dict(members), dict[Size, Size](), set[Size]()
    merges: list[Merge] = []
    while small := [bucket for bucket in groups if groups[bucket][0] < rules.min_bucket and bucket not in stuck]:
        bucket = min(small, key=lambda size: (groups[size][0], size))
        count, least = groups[bucket]
        targets = [size for size in groups if size != bucket and 2 * size[0] * size[1] >= bucket[0] * bucket[1]
                   and ((reach := rules.max_bucket(least)) is None or not enlarges(reach, size))]
        if not targets:
            stuck.add(bucket)
            continue
        into = nearest(bucket, targets)
        merges.append(Merge(bucket=bucket, into=into, pictures=count))
        groups[into] = _crowd(groups[into], groups.pop(bucket))
        moves = {**{start: into if end == bucket else end for start, end in moves.items()}, bucket: into}
    return moves, tuple(merges)


def _crowd(group: Group, other: Group) -> Group:
    return group[0] + other[0], (min(group[1][0], other[1][0]), min(group[1][1], other[1][1]))


def _too_small(name: str, size: Size, rules: Rules) -> Finding:
    """The finding for a picture that no bucket takes."""
    short = below_least_side(name, size, rules)
    if short is not None:
        return short
    more = f" by more than {float(rules.upscale):g}" if isinstance(rules.upscale, Fraction) else ""
    return Finding(path=name, code="too-small", severity="error",
                   detail=f"picture is {size[0]}x{size[1]}, expected one that needs no enlarging{more} for a bucket of "
                   f"kind '{rules.kind}'")


def below_least_side(name: str, size: Size, rules: Rules) -> Finding | None:
    """The finding for a picture whose shorter side is below the least that is used."""
    least = rules.min_picture_side
    return None if min(size) >= least else Finding(
        path=name, code="too-small", severity="error",
        detail=f"picture is {size[0]}x{size[1]}, expected at least {least} pixels on the short side")


def _still_small(placed: Sequence[Assignment], rules: Rules) -> list[Finding]:
    """One finding per picture in a bucket that `min_bucket` wanted merged and that nothing could take."""
    counts: dict[Size, int] = {}
    for assignment in placed:
        counts[assignment.placement.bucket] = counts.get(assignment.placement.bucket, 0) + 1
    small = [(assignment.name, bucket) for assignment in placed
             if counts[bucket := assignment.placement.bucket] < rules.min_bucket]
    return [Finding(path=name, code="small-bucket", severity="warning",
                    detail=f"bucket {bucket[0]}x{bucket[1]} has {counts[bucket]} of at least {rules.min_bucket} "
                           "pictures wanted, and no other bucket can take them") for name, bucket in small]
