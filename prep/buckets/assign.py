"""Buckets and placements from names and sizes alone: pure, exact integers, the same on every machine.

A picture goes to the bucket nearest in |log(aspect ratio)|, is scaled to cover it and cropped in the centre,
or as `views` says. It is never enlarged unless asked: one too small for its bucket gets a bucket of its own area, in
the same step, or none where the rules say so.
Sizes are (width, height) in pixels; `sizes.Rules` says which buckets there are.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

from prep.buckets.sizes import Rules, buckets_of
from prep.findings import Finding
from prep.geometry import Placement, Size, cover, crop_loss, enlarges, nearest

Group = tuple[int, Size]  # how many pictures, and the shortest width and height among them


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """One picture and where it went."""

    index: int  # place in the input
    name: str
    size: Size
    resolution: int  # of the rules that gave it this bucket
    views: tuple[Placement, ...]  # in one bucket and at one scale; at least one

    @property
    def placement(self) -> Placement:
        """The first view."""
        return self.views[0]

    @property
    def scale(self) -> float:
        """Factor from picture to scaled picture, before rounding to whole pixels."""
        (width, height), (wide, high) = self.size, self.placement.bucket
        return max(wide / width, high / height)

    @property
    def upscaled(self) -> bool:
        """Whether the picture is enlarged."""
        return enlarges(self.size, self.placement.bucket)

    @property
    def crop_loss(self) -> float:
        """Percent of the picture's area that is cut away."""
        return crop_loss(self.placement)


@dataclass(frozen=True, kw_only=True, slots=True)
class Merge:
    """A bucket that had too few pictures, and where they went."""

    bucket: Size
    into: Size
    pictures: int
    before: float = field(default=0.0, compare=False)  # percent of their area that is cut away, on average ...
    after: float = field(default=0.0, compare=False)  # ... in the bucket and where they went


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignments:
    """Where every picture goes; `findings` has those that go nowhere, and buckets that stayed too small."""

    rules: tuple[Rules, ...]  # one for each resolution
    buckets: tuple[Size, ...]  # those with pictures, sorted
    pictures: tuple[Assignment, ...]  # in the order given; at several resolutions, one after the other
    findings: tuple[Finding, ...]
    merges: tuple[Merge, ...]


def assign_buckets(pictures: Iterable[tuple[str, Size]], rules: Rules, *more: Rules) -> Assignments:
    """Bucket and placement of every (name, size), once for each of the rules; but twice in one bucket is once.

    So a picture that is too small for a second resolution has no second sample that is the same as its first.
    Raises `ConfigError` for rules that make no sense.
    """
    given, every = list(pictures), (rules, *more)
    runs = [_placed([size for _, size in given], each) for each in every]
    placed, findings = [], []
    for index, (name, size) in enumerate(given):
        found: dict[Placement, int] = {}
        for each, (placements, _) in zip(every, runs, strict=True):
            if size in placements:
                found.setdefault(placements[size], each.resolution)
        placed += [Assignment(index=index, name=name, size=size, resolution=resolution, views=(placement,))
                   for placement, resolution in found.items()]
        if not found:
            findings.append(_too_small(name, size, rules))
    used = tuple(sorted({one.placement.bucket for one in placed}))
    return Assignments(rules=every, buckets=used, pictures=tuple(placed),
                       findings=(*findings, *_still_small(placed, rules)),
                       merges=tuple(merge for _, merges in runs for merge in merges))


def _placed(sizes: Sequence[Size], rules: Rules) -> tuple[dict[Size, Placement], tuple[Merge, ...]]:
    """Where pictures of these sizes go, and the merges on the way; a size that no bucket takes is not in it."""
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
    """The merges, each with what it cuts away of the pictures it moves; `members` counts (bucket, size) before all."""
    inside: dict[Size, Counter[Size]] = defaultdict(Counter)
    for (home, size), count in members.items():
        if home is not None:
            inside[home][size] += count
    found = []
    for merge in merges:
        moved = inside.pop(merge.bucket)
        before, after = (sum(count * crop_loss(cover(size, bucket)) for size, count in moved.items()) / merge.pictures
                         for bucket in (merge.bucket, merge.into))
        found.append(replace(merge, before=before, after=after))
        inside[merge.into] += moved
    return tuple(found)


def assign(size: Size, buckets: Sequence[Size], rules: Rules) -> Size | None:
    """The bucket for a picture of `size`, or None where it is too small for any."""
    if min(size) < rules.min_picture_side:
        return None
    reach, best = rules.max_bucket(size), nearest(size, buckets)
    if reach is None or not enlarges(reach, best):
        return best
    if rules.upscale == "reject":
        return None
    if rules.kind in ("list", "single"):  # the user named the shapes: no others are made
        fitting = [bucket for bucket in buckets if not enlarges(reach, bucket)]
        return nearest(size, fitting) if fitting else None
    return own_bucket(size, rules, reach)


def own_bucket(size: Size, rules: Rules, reach: Size) -> Size | None:
    """The bucket for a picture too small for the others: within `reach`, as large as it can be, cutting little.

    Sweeps like `step_buckets`, but every side ends at that of `reach`; of those sizes the nearest in aspect ratio.
    """
    step, area, (_, longest) = rules.step, rules.resolution * rules.resolution, rules.side_range
    wide, high = (min(side, longest) // step * step for side in reach)
    swept = [(width, min(high, area // width // step * step)) for width in range(step, wide + 1, step)]
    swept += [(min(wide, area // height // step * step), height) for height in range(step, high + 1, step)]
    inside = [bucket for bucket in swept if min(bucket) > 0]
    return nearest(size, inside) if inside else None


def merge_small(members: dict[Size, Group], rules: Rules) -> tuple[dict[Size, Size], tuple[Merge, ...]]:
    """Moves (bucket to final bucket) and merges that leave as few buckets as can be below `rules.min_bucket`.

    The bucket with the fewest pictures goes first, into the nearest in aspect ratio that none of its pictures is too
    small for and that has at least half its area: a picture must not shrink to a thumbnail to keep another one company.
    What has no such neighbour stays.
    """
    left, moves, stuck = dict(members), dict[Size, Size](), set[Size]()
    merges: list[Merge] = []
    while small := [bucket for bucket in left if left[bucket][0] < rules.min_bucket and bucket not in stuck]:
        bucket = min(small, key=lambda one: (left[one][0], one))
        count, least = left[bucket]
        targets = [one for one in left if one != bucket and 2 * one[0] * one[1] >= bucket[0] * bucket[1]
                   and ((reach := rules.max_bucket(least)) is None or not enlarges(reach, one))]
        if not targets:
            stuck.add(bucket)
            continue
        into = nearest(bucket, targets)
        merges.append(Merge(bucket=bucket, into=into, pictures=count))
        left[into] = _crowd(left[into], left.pop(bucket))
        moves = {**{start: into if end == bucket else end for start, end in moves.items()}, bucket: into}
    return moves, tuple(merges)


def _crowd(one: Group, other: Group) -> Group:
    return one[0] + other[0], (min(one[1][0], other[1][0]), min(one[1][1], other[1][1]))


def _too_small(name: str, size: Size, rules: Rules) -> Finding:
    """The finding for a picture that no bucket takes."""
    seen = f"picture is {size[0]}x{size[1]}"
    if min(size) < rules.min_picture_side:
        detail = f"{seen}, expected at least {rules.min_picture_side} pixels on the short side"
    else:
        more = f" by more than {float(rules.upscale):g}" if isinstance(rules.upscale, Fraction) else ""
        detail = f"{seen}, expected one that needs no enlarging{more} for a bucket of kind '{rules.kind}'"
    return Finding(path=name, code="too-small", severity="error", detail=detail)


def _still_small(placed: Sequence[Assignment], rules: Rules) -> list[Finding]:
    """One finding per picture in a bucket that `min_bucket` wanted merged and that nothing could take."""
    counts: dict[Size, int] = {}
    for one in placed:
        counts[one.placement.bucket] = counts.get(one.placement.bucket, 0) + 1
    small = [one for one in placed if counts[one.placement.bucket] < rules.min_bucket]
    return [Finding(path=one.name, code="small-bucket", severity="warning",
                    detail=f"bucket {one.placement.bucket[0]}x{one.placement.bucket[1]} has "
                           f"{counts[one.placement.bucket]} of at least {rules.min_bucket} pictures wanted, and no "
                           "other bucket can take them") for one in small]
