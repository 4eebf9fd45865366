"""Holds what all pages share: the samples and their pictures, the run, and the card of a sample."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prep.batching.split import ROLES
from prep.cache.ledger.columns import Column
from prep.manifest.describe import describe_columns
from prep.manifest.select import LIKENESS, Query, Selector
from prep.pages.cards import REFERENCES, described_references, more_references, sample_card
from prep.pages.layout import render
from prep.pages.overlay import Shot
from prep.pages.parts import Card, CardReference
from prep.pages.run import loss_facts
from prep.runs.losses import Hardness
from prep.view.data import Data, Shows
from prep.view.edit.editor import Editor
from prep.view.pictures import Pictures
from prep.view.run import RunFiles
from prep.view.similar.state import OF_EMBEDDINGS, PATIENCE, Similar
from prep.view.source.origins import Origins

if TYPE_CHECKING:
    from prep.view.model import ViewedModel  # which imports torch

LETTERS = 240  # of a caption on a card


@dataclass(frozen=True, kw_only=True)
class Site:
    """The data, pictures, run and model that pages show."""

    base: str  # of addresses: "/" and the token
    home: str = ""  # the address of the project that these pages are part of
    state: Callable[[], Data]  # what is shown now
    pictures: Shows
    rows: Pictures | None = None  # of the cache; None: nothing is encoded
    similar: Similar | None = None  # None: samples have no embeddings
    run: RunFiles | None = None
    model: ViewedModel | None = None
    editor: Editor | None = None
    origins: Origins | None = None  # of captions; None: nothing is known of them
    edit_token: str = ""  # in a header of what our own pages send
    compares: bool = False  # whether there is a page of two runs beside each other
    root: str = ""  # of the manifest that this one is compared with, or that is compared with this one

    @property
    def data(self) -> Data:
        """The data set as it is now. A page asks once: the next answer may be another."""
        return self.state()

    @property
    def selector(self) -> Selector:
        """The selector of the data set as it is now."""
        return self.state().selector

    def render(self, template: str, **values: Any) -> str:
        """A page of this site."""
        data = self.data
        return render(template, **{
            "base": self.base, "name": data.name, "kind": data.kind, "codes": data.selector.codes,
            "has_run": self.run is not None, "home": self.home, "root": self.root, "edits": self.editor is not None,
            "encoded": self.rows is not None, "embedded": self.similar is not None, "compares": self.compares,
            "paired": data.paired,
            **values})

    def select(self, data: Data, query: Query) -> Column:
        """The numbers of the samples that fit, in the query's order."""
        if query.made and self.origins is not None:
            data.selector.judge(self.origins.column())
        if self.similar is not None and (known := self.similar.compared) is not None:
            data.selector.compare(known)
        return data.selector.select(query)

    def lacks(self, query: Query) -> bool:
        """Whether a query asks what embeddings say before that is known; they are compared, then. Raises `Problem`."""
        asks = query.cluster is not None or query.sort in LIKENESS or query.finding in OF_EMBEDDINGS
        similar = self.similar
        return asks and similar is not None and not similar.wait(PATIENCE)

    def hardness(self) -> Hardness | None:
        """The hardness of each sample for the run until now, which the selector then knows, too."""
        if self.run is None:
            return None
        hard = self.run.hardness
        self.selector.learn(hard.ratio)
        return hard


def card_of(site: Site, data: Data, number: int, *, query: str = "", facts: Sequence[str] = ()) -> Card:
    """Makes the card of a sample, with a link to its page; `query` is the query string of the list."""
    samples = data.selector.samples
    coverage, shape = float(samples.coverage[number]), data.shapes[samples.bucket[number]]
    references: tuple[CardReference, ...] = ()
    if shape[1]:
        row = describe_columns(samples, data.shapes, number, lambda *_: None)
        facts = (*facts, *more_references(row, REFERENCES))
        references = described_references(
            row, [f"{site.base}/thumbnail/{number}/{place}" for place in range(REFERENCES)], cropped=False,
            paired=data.paired)
    return sample_card(
        Shot(name=samples.name(number), address=f"{site.base}/thumbnail/{number}", lazy=True),
        role=ROLES[samples.role[number]], size=(int(samples.width[number]), int(samples.height[number])),
        bucket=shape[0], captions=samples.captions(number), most=1, letters=LETTERS,
        coverage=None if np.isnan(coverage) else coverage, facts=facts, references=references,
        link=f"{site.base}/sample/{number}{query}")


def loss_of(hard: Hardness | None, number: int) -> tuple[str, ...]:
    """The facts of a sample's card on its losses in the run."""
    if hard is None or not hard.shown[number]:
        return ()
    return loss_facts(float(hard.ratio[number]), float(hard.loss[number]), int(hard.shown[number]))
