"""A recipe's pictures as the pages show them: the samples that `prep encode` would make of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from prep.batching.split import ROLES
from prep.buckets.assign import Assignments
from prep.dataset.bucketing import buckets_for, family_of
from prep.dataset.ingest import Ingested, KnownItem
from prep.dataset.samples import PlacedItem, dataset_notes, placed_items, reference_name, roles_of
from prep.findings import Finding
from prep.formatting import counted
from prep.fs.labels import source_prefixes
from prep.geometry import PAIR
from prep.images.drawn_mask import drawn_hole
from prep.manifest.samples import Reference, Sample, Text, View
from prep.manifest.select import Selector
from prep.manifest.unencoded import NO_KEY, Unencoded, unencoded
from prep.pages.snapshot import name_of
from prep.recipe.schema import Recipe
from prep.runtime import gc_disabled
from prep.view.data import Data
from prep.view.source.survey import Survey, mask_of

EVERY = 8  # pixels of a latent cell, whose first one is looked at


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceState:
    """One state of the pictures."""

    survey: Survey
    data: Data
    seats: Sequence[PlacedItem]  # by number of the sample
    notices: Sequence[str]  # on validation, regularization and repeats, for the terminal
    tables: Unencoded
    placing: Sequence[Finding]  # of the buckets


class SourceSet:
    """The pictures, whose state may be replaced by another. Threads may share one."""

    def __init__(self, survey: Survey) -> None:
        self._lock = Lock()
        self._state = state_of(survey)

    @property
    def notices(self) -> Sequence[str]:
        """Notices for the terminal."""
        return self._state.notices

    @property
    def state(self) -> SourceState:
        """The state now."""
        return self._state

    def data(self) -> Data:
        """The data set as it is now."""
        return self._state.data

    def show(self, survey: Survey) -> None:
        """Shows another survey from now on; quickly if only captions and masks differ from those that are shown."""
        with self._lock:
            self._state = edited(self._state, survey) or state_of(survey)


@gc_disabled()
def state_of(survey: Survey) -> SourceState:
    """The samples of a survey, in their buckets."""
    recipe, items = survey.recipe, survey.items
    listed = Ingested(items=items, findings=survey.findings)
    bucketing = buckets_for(recipe, listed, unmasked=True)
    seats = sorted(placed_items(recipe, items, roles_of(recipe, items)[0], bucketing),
                   key=lambda seat: (seat.id, seat.item.item.name))  # the order of the table
    coverage = _coverage(survey, seats)
    samples = [_sample(recipe, seat) for seat in seats]
    crowds, roles = Counter(sample.shape for sample in samples), Counter(seat.role for seat in seats)
    shapes = sorted(crowds)
    tables = unencoded(samples, shapes, coverage,
                       (*survey.findings, *bucketing.findings),
                       source_prefixes([source.path for source in recipe.sources]))
    selector = Selector(tables)
    selector.prepare()
    data = Data(kind="Source", name=name_of(recipe), selector=selector, shapes=shapes,
                sources=[source.path for source in recipe.sources], roles={role: roles[role] for role in ROLES},
                crowds=[crowds[shape] for shape in shapes], rejected=survey.rejected + _unplaced(bucketing),
                facts=_facts(recipe), describe=tables.describe, notes=_notes(survey),
                paired=recipe.reference_fit == PAIR)
    return SourceState(survey=survey, data=data, seats=seats, notices=dataset_notes(recipe, listed, bucketing),
                       tables=tables, placing=bucketing.findings)


def edited(state: SourceState, survey: Survey) -> SourceState | None:
    """`state_of(survey)`, made of `state` and what has changed; `None` if that moves or removes samples."""
    before = state.survey
    if survey.recipe != before.recipe or len(survey.items) != len(before.items):
        return None
    pairs = [(old, new) for old, new in zip(before.items, survey.items, strict=True) if old is not new]
    if any(_placed_by(old) != _placed_by(new) for old, new in pairs):
        return None
    items, again = {new.item.label: new for _, new in pairs}, {id(old): new for old, new in pairs}
    seats = list(state.seats)
    renewed = {number: replace(seats[number], item=again[id(seats[number].item)])
               for number in [number for number, seat in enumerate(seats) if id(seat.item) in again]}
    for number, seat in renewed.items():
        seats[number] = seat
    coverage = _coverage(survey, renewed.values())
    tables = state.tables.renewed(
        {number: _sample(survey.recipe, seat) for number, seat in renewed.items()}, coverage, items,
        [finding for finding in (*survey.findings, *state.placing) if finding.path in items])
    data = replace(state.data, selector=state.data.selector.renewed(tables), describe=tables.describe)
    return replace(state, survey=survey, data=data, seats=seats, tables=tables)


def _coverage(survey: Survey, seats: Iterable[PlacedItem]) -> dict[str, float]:
    """How much of each sample's picture its mask covers, 0 to 1, by id; of a drawn one by the first pixel of each
    latent cell, which takes a third of a millisecond for a picture of 512x512."""
    coverage = {}
    for seat in seats:
        item = seat.item.item
        if item.label in survey.coverage:
            coverage[seat.id] = survey.coverage[item.label]
        elif mask_of(survey.recipe, seat.item) is None and survey.recipe.draws_mask(item.source):
            coverage[seat.id] = float(drawn_hole(seat.item.picture, seat.views[0], every=EVERY).mean()) / 255
    return coverage


def _placed_by(item: KnownItem) -> tuple[object, ...]:
    """The facts that decide which samples a picture makes, and where they are in the table."""
    references = tuple((reference.blob, reference.picture, reference.size) for reference in item.references)
    return item.item.label, item.item.source, item.item.name, item.picture, item.size, item.focus, references


def _sample(recipe: Recipe, seat: PlacedItem) -> Sample:
    item = seat.item
    return Sample(id=seat.id, name=item.item.name, source=item.item.source, role=seat.role, picture=item.picture,
                  size=item.size, bucket=seat.bucket, repeats=seat.repeats,
                  weight=recipe.sources[item.item.source].weight,
                  views=tuple(View(placement=placement, latent=NO_KEY, mask=None,
                                   references=_references(recipe, seat, number))
                              for number, placement in enumerate(seat.views)),
                  texts=tuple(Text(caption=caption, weight=weight, key=NO_KEY) for caption, weight in item.captions))


def _references(recipe: Recipe, seat: PlacedItem, view: int) -> tuple[Reference, ...]:
    if not seat.references:
        return ()
    item = seat.item.item
    return tuple(Reference(name=reference_name(item, reference.blob, recipe.sources[item.source].path),
                           picture=reference.picture, size=reference.size, placement=placement, latent=NO_KEY)
                 for reference, placement in zip(seat.item.references, seat.references[view], strict=True))


def _unplaced(bucketing: Assignments) -> int:
    """Pictures that no bucket takes."""
    return sum(finding.severity == "error" for finding in bucketing.findings)


def _notes(survey: Survey) -> list[str]:
    if not survey.unseen:
        return []
    some = survey.unseen < len(survey.items) + survey.rejected
    were = "changed since the last scan" if some else f"{'was' if survey.unseen == 1 else 'were'} not scanned yet"
    return [f"{counted(survey.unseen, 'picture')} {were}; findings may be missing: start with --scan, or run prep scan "
            "SOURCE first."]


def _facts(recipe: Recipe) -> list[tuple[str, str]]:
    image, family = recipe.image, family_of(recipe.model)
    masks = {"none": "none", "alpha": "the pictures' transparency", "file": "files"}[recipe.mask_origin]
    masks += ", else drawn by chance" if recipe.draws_masks else ""
    return [("model", f"{recipe.model.path or 'none'} ({'of no known family' if family is None else family.name})"),
            ("resolution", ", ".join(map(str, image.resolutions))), ("buckets", image.buckets),
            ("crop", {"centre": "center"}.get(image.crop, image.crop)), ("mirroring", image.flip), ("masks", masks),
            ("recipe", "none: defaults and options" if recipe.file is None else str(recipe.file))]
