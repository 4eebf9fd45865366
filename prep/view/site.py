"""What all pages share: the manifest, its samples and pictures, the run, and the card of a sample."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from prep.batching.split import ROLES
from prep.formatting import format_size
from prep.manifest.opened import OpenedManifest
from prep.manifest.select import Selector
from prep.report.pages.parts import plural
from prep.runs.losses import Hardness
from prep.view.pictures import Pictures
from prep.view.render import render
from prep.view.run import RunFiles

if TYPE_CHECKING:
    from prep.view.model import ViewedModel  # which imports torch

LETTERS = 240  # of a caption on a card


@dataclass(frozen=True, kw_only=True)
class Site:
    """What all pages need."""

    base: str  # of addresses: "/" and the token
    opened: OpenedManifest
    selector: Selector
    pictures: Pictures
    run: RunFiles | None = None
    model: ViewedModel | None = None
    root: str = ""  # of the manifest that this one is compared with, or that is compared with this one

    @property
    def name(self) -> str:
        """The manifest's name, for titles."""
        return self.opened.manifest.path.name

    def render(self, template: str, **values: Any) -> str:
        """A page of this site."""
        return render(template, base=self.base, name=self.name, codes=self.selector.codes, has_run=self.run is not None,
                      root=self.root, **values)

    def hardness(self) -> Hardness | None:
        """How hard each sample was for the run until now, which the selector then knows, too."""
        if self.run is None:
            return None
        found = self.run.hardness
        self.selector.learn(found.ratio)
        return found


def card_of(site: Site, number: int, hard: Hardness | None) -> dict[str, Any]:
    """A sample in a list, for the macro `card`."""
    samples = site.selector.samples
    captions, bucket = samples.captions(number), site.opened.manifest.buckets[samples.bucket[number]]
    coverage = float(samples.coverage[number])
    return {"number": number, "name": samples.name(number), "caption": captions[0][:LETTERS],
            "letters": len(captions[0]), "more": len(captions) - 1, "role": ROLES[samples.role[number]],
            "size": format_size((int(samples.width[number]), int(samples.height[number]))),
            "bucket": format_size(bucket), "part": None if np.isnan(coverage) else coverage,
            "loss": "" if hard is None or not hard.shown[number] else
                    f"{hard.ratio[number]:.2f} times the usual loss, shown {plural(int(hard.shown[number]), 'time')}"}
