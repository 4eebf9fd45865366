"""Every sample that a recipe's pictures make, with its role and id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from prep.batching.split import Role, choose_validation
from prep.buckets.assign import Bucketing
from prep.dataset.ingest import Surveyed
from prep.geometry import Placement, Size
from prep.keys import sample_id
from prep.recipe.schema import Recipe


def roles_of(recipe: Recipe, items: Sequence[Surveyed]) -> tuple[list[Role], tuple[str, ...]]:
    """The role of each item, by its source and by its picture's digest; and what the user should know of it."""
    given: list[Role] = [recipe.sources[item.item.source].role for item in items]
    train = [item.picture for item, role in zip(items, given, strict=True) if role == "train"]
    if not recipe.validation:
        return given, ()
    chosen, notice = choose_validation(train, str(recipe.validation))
    moved: list[Role] = ["validation" if role == "train" and item.picture in chosen else role
                         for item, role in zip(items, given, strict=True)]
    return moved, () if notice is None else (notice,)


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """A surveyed item in its bucket: a sample but for its rows."""

    id: str
    item: Surveyed
    role: Role
    views: tuple[Placement, ...]

    @property
    def bucket(self) -> Size:
        """The bucket of all its views."""
        return self.views[0].bucket


def seats_of(items: Sequence[Surveyed], roles: Sequence[Role], bucketing: Bucketing) -> Iterator[Seat]:
    """The seats of a bucketing of `items` with these `roles`, in the order of source and name.

    A validation sample has its first view only, since no other is looked at.
    """
    copies: Counter[tuple[str, Size]] = Counter()
    for placed in sorted(bucketing.pictures, key=lambda one: _order(items[one.index])):
        item, role = items[placed.index], roles[placed.index]
        same = (item.picture, placed.placement.bucket)
        views = placed.views[:1] if role == "validation" else placed.views
        yield Seat(id=sample_id(*same, copies[same]), item=item, role=role, views=views)
        copies[same] += 1


def _order(item: Surveyed) -> tuple[int, str]:
    return item.item.source, item.item.name
