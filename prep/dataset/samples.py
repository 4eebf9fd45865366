"""Makes samples of a recipe's pictures, each with its role and id."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from prep.batching.split import ROLES, Role, choose_validation
from prep.buckets.assign import Assignment, Assignments
from prep.dataset.bucketing import family_of
from prep.dataset.ingest import Ingested, KnownItem
from prep.dataset.prior import balance_prior, prior_notes
from prep.errors import ConfigError
from prep.findings import CHOSEN, Finding, apply_policy
from prep.formatting import counted, grouped, join_names, printable_name, shell_name
from prep.fs.blob import Blob
from prep.fs.place import Place, name_from
from prep.geometry import PAIR, Placement, Size
from prep.keys import sample_id
from prep.recipe.layout import REPEATED
from prep.recipe.schema import Recipe
from prep.recipe.validate import NO_FOCUS
from prep.sources.item import Item
from prep.sources.walk import is_tars


def settle_masks(recipe: Recipe, items: Sequence[KnownItem]) -> Recipe:
    """`recipe` with the mask setting "auto" replaced: "sidecar" if masks were found, else "none".

    Raises `ConfigError` if the crop needs masks and there are none.
    """
    settled = recipe.settle_masks(any(item.mask is not None for item in items))
    if settled.image.crop == "focus" and {settled.mask_of(number) for number in range(len(recipe.sources))} == {"none"}:
        raise ConfigError(NO_FOCUS, hint="a mask is NAME-masklabel.png beside its picture, or in the directory of "
                          "--mask; --crop centre needs none")
    return settled


def _unread_repeats(recipe: Recipe, items: Sequence[KnownItem]) -> tuple[str, ...]:
    """A note on directories named N_class in a source without a recipe: their repeats are not read."""
    if recipe.file is not None or is_tars(recipe.sources[0].path):
        return ()
    parts = (part for item in items for part in item.item.name.split("/")[:-1])
    folders = dict.fromkeys(part for part in parts if REPEATED.fullmatch(part))
    root = recipe.sources[0].path
    names = [root.name] if REPEATED.fullmatch(root.name) else list(folders)
    if not names:
        return ()
    return (f"note: {join_names(names, 3)}: repeats are not read from names of directories, only from a recipe; "
            f"to write one, run prep init {shell_name(str(root.parent if folders == {} else root))}",)


def roles_of(recipe: Recipe, items: Sequence[KnownItem]) -> tuple[list[Role], tuple[str, ...]]:
    """The role of each item, from its source and its picture's digest; and notes to the user."""
    roles: list[Role] = [recipe.sources[item.item.source].role for item in items]
    train = [item.picture for item, role in zip(items, roles, strict=True) if role == "train"]
    if not recipe.validation:
        return roles, ()
    chosen, notice = choose_validation(train, str(recipe.validation))
    changed: list[Role] = ["validation" if role == "train" and item.picture in chosen else role
                           for item, role in zip(items, roles, strict=True)]
    return changed, () if notice is None else (notice,)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedItem:
    """A surveyed item in its bucket: a sample without its rows."""

    id: str
    item: KnownItem
    role: Role
    views: tuple[Placement, ...]
    repeats: int  # showings per epoch
    references: tuple[tuple[Placement, ...], ...] = ()  # of each view, in the order of the item's; (): it has none

    @property
    def bucket(self) -> Size:
        """The bucket of all its views."""
        return self.views[0].bucket


def placed_items(recipe: Recipe, items: Sequence[KnownItem], roles: Sequence[Role], bucketing: Assignments,
                 *, taken_from: list[KnownItem] | None = None) -> Iterator[PlacedItem]:
    """The placed items of a bucketing of `items` with these `roles`, in the order of source and name.

    A validation sample has only its first view, since validation uses no other. Samples of role "prior" have the
    repeats of `balance_prior`; samples with no repeats are skipped. `taken_from` are the items in a list that lets go
    of each once it has been placed: their place is taken by the last.
    """
    copies: Counter[tuple[str, Size, tuple[str, ...]]] = Counter()
    repeated = _repeated(item.picture for item in items)
    order, role_repeats = _role_repeats(recipe, items, roles, bucketing)
    for placed, repeats in zip(order, balance_prior(role_repeats), strict=True):
        item, role = items[placed.index], roles[placed.index]
        if taken_from is not None:
            taken_from[placed.index] = taken_from[-1]
        digests = tuple(reference.picture for reference in item.references)
        same = (item.picture, placed.placement.bucket, digests)
        views = placed.views[:1] if role == "validation" else placed.views
        if repeats:
            yield PlacedItem(id=sample_id(*same[:2], copies[same], digests), item=item, role=role, views=views,
                             repeats=repeats,
                             references=placed.references[:len(views)])
            if item.picture in repeated:
                copies[same] += 1


def _repeated(digests: Iterable[str]) -> set[str]:
    """Those that are there more than once: a set's pictures are hardly ever equal, and to count each takes memory."""
    seen: set[str] = set()
    repeated: set[str] = set()
    for digest in digests:
        (repeated if digest in seen else seen).add(digest)
    return repeated


def reference_name(item: Item, reference: Blob, source: Place) -> str:
    """The name of an item's reference in a table: its path from the item's source, perhaps with `..`; in the same tar,
    below the tar's name, as those of pictures. The file's own name if no path leads there."""
    if reference.member:
        tar = item.name.removesuffix(item.picture.member) if reference.file == item.picture.file else ""
        return printable_name(f"{tar}{reference.member}" if tar else reference.name)
    return printable_name(f"{_way(reference.place.parent.absolute(), source.absolute())}{reference.name}")


@lru_cache(maxsize=1 << 14)
def _way(folder: Place, source: Place) -> str:
    """The path from a source to a directory, with a slash at its end; "" for the source itself, or if there is none."""
    way = name_from(source, folder)
    return "" if way in (None, ".") else f"{way}/"


def _chosen(recipe: Recipe, surveyed: Ingested) -> Iterator[str]:
    """Yields a line for each code of findings on things that were used instead of others."""
    by_code: dict[str, list[Finding]] = {}
    for finding in apply_policy(surveyed.findings, recipe.scan):
        if finding.code in CHOSEN:
            by_code.setdefault(finding.code, []).append(finding)
    for code, (first, *others) in by_code.items():
        more = f" (and {grouped(len(others))} more, which prep scan lists)" if others else ""
        yield f"{first.severity}: {shell_name(first.path)}: {code}: {first.detail}{more}"


def dataset_notes(recipe: Recipe, surveyed: Ingested, bucketing: Assignments) -> tuple[str, ...]:
    """Notes to the user on validation, regularization, unused masks, unread repeats, and what was used instead of
    something else."""
    roles, notices = roles_of(recipe, surveyed.items)
    unused = (finding for finding in surveyed.findings if finding.code == "masks-unused")
    paired = recipe.reference_fit == PAIR  # where each picture has a reference, with or without a model
    referring = 0 if paired else sum(bool(item.references) for item in surveyed.items)
    if referring and family_of(recipe.model) is None:
        notices = (*notices, f"note: {counted(referring, 'picture')} with references, which count for nothing without "
                             "a model: [model] in a recipe names it")
    return (*recipe.notes, *notices, *prior_notes(_role_repeats(recipe, surveyed.items, roles, bucketing)[1]),
            *(f"note: {'' if finding.path == '.' else f'{finding.path}: '}{finding.detail}" for finding in unused),
            *(() if paired else _without_references(recipe, surveyed.items)), *_unread_repeats(recipe, surveyed.items),
            *_chosen(recipe, surveyed))


def _without_references(recipe: Recipe, items: Sequence[KnownItem]) -> Iterator[str]:
    """A note on each source of which some pictures have references, and others have none."""
    bare = Counter(item.item.source for item in items if not item.references)
    for source, count in sorted(Counter(item.item.source for item in items).items()):
        if 0 < bare[source] < count:
            yield (f"note: {printable_name(recipe.sources[source].path.name)}: {grouped(bare[source])} of "
                   f"{counted(count, 'picture')} have no references, and train without any")


def _role_repeats(recipe: Recipe, items: Sequence[KnownItem], roles: Sequence[Role],
           bucketing: Assignments) -> tuple[list[Assignment], list[tuple[Role, int]]]:
    """The assignments in the order of source and name, and for each its role and the repeats of its source."""
    order = sorted(bucketing.pictures, key=lambda assignment: _order(items[assignment.index]))
    repeats = {(number, role): (role, source.repeats)  # as one object for many pictures
               for number, source in enumerate(recipe.sources) for role in ROLES}
    return order, [repeats[items[assignment.index].item.source, roles[assignment.index]] for assignment in order]


def _order(item: KnownItem) -> tuple[int, str]:
    return item.item.source, item.item.name
