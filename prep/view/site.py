"""What all pages share: the samples and their pictures, the run, and the card of a sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import TYPE_CHECKING, Any

import numpy as np

from prep.batching.split import ROLES
from prep.formatting import format_size
from prep.manifest.select import Selector
from prep.pages.layout import render
from prep.pages.parts import plural
from prep.runs.losses import Hardness
from prep.view.data import Data, Shows
from prep.view.edit.editor import Editor
from prep.view.pictures import Pictures
from prep.view.run import RunFiles

if TYPE_CHECKING:
    from prep.view.model import ViewedModel  # which imports torch

LETTERS = 240  # of a caption on a card
WORDS = 600  # of a caption that are compared


@dataclass(frozen=True, kw_only=True)
class Site:
    """What all pages need."""

    base: str  # of addresses: "/" and the token
    state: Callable[[], Data]  # what is shown now
    pictures: Shows
    rows: Pictures | None = None  # of the cache; None: nothing is encoded
    run: RunFiles | None = None
    model: ViewedModel | None = None
    editor: Editor | None = None
    edit_token: str = ""  # in a header of what our own pages send
    root: str = ""  # of the manifest that this one is compared with, or that is compared with this one

    @property
    def data(self) -> Data:
        """What is shown now. A page asks once: the next answer may be another."""
        return self.state()

    @property
    def selector(self) -> Selector:
        """That of what is shown now."""
        return self.state().selector

    def render(self, template: str, **values: Any) -> str:
        """A page of this site."""
        data = self.data
        return render(template, base=self.base, name=data.name, kind=data.kind, codes=data.selector.codes,
                      has_run=self.run is not None, root=self.root, edits=self.editor is not None,
                      encoded=self.rows is not None, **values)

    def hardness(self) -> Hardness | None:
        """How hard each sample was for the run until now, which the selector then knows, too."""
        if self.run is None:
            return None
        found = self.run.hardness
        self.selector.learn(found.ratio)
        return found


def card_of(data: Data, number: int, hard: Hardness | None) -> dict[str, Any]:
    """A sample in a list, for the macro `card`."""
    samples = data.selector.samples
    captions, bucket = samples.captions(number), data.buckets[samples.bucket[number]]
    coverage = float(samples.coverage[number])
    return {"number": number, "name": samples.name(number), "caption": captions[0][:LETTERS],
            "letters": len(captions[0]), "more": len(captions) - 1, "role": ROLES[samples.role[number]],
            "size": format_size((int(samples.width[number]), int(samples.height[number]))),
            "bucket": format_size(bucket), "part": None if np.isnan(coverage) else coverage,
            "loss": "" if hard is None or not hard.shown[number] else
                    f"{hard.ratio[number]:.2f} times the usual loss, shown {plural(int(hard.shown[number]), 'time')}"}


def compared(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The words of the first caption that differs: "same", "gone" or "new", and the text."""
    place = next((place for place, (one, other) in enumerate(zip(old, new, strict=False)) if one != other),
                 min(len(old), len(new)))
    before, after = (captions[place].split()[:WORDS] if place < len(captions) else [] for captions in (old, new))
    for tag, first, last, begin, end in SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if tag == "equal":
            yield "same", " ".join(before[first:last])
            continue
        if last > first:
            yield "gone", " ".join(before[first:last])
        if end > begin:
            yield "new", " ".join(after[begin:end])
