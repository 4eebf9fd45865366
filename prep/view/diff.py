"""Two manifests side by side: which samples differ, why, and the page that shows them."""

from __future__ import annotations

from urllib.parse import urlencode

import numpy as np

from prep.cache.ledger.columns import Column
from prep.manifest.diff_samples import REASONS, Changes
from prep.pages.overlay import Shot
from prep.pages.parts import PairSide, PicturePair, pager_of
from prep.pages.words import compared
from prep.view.site import Site, card_of

PAIRS = 30  # per page
WHAT = {"added": "added", "removed": "removed", "name": "renamed", "source": "from another source",
        "role": "in another split"}


class Diff:
    """The differences between the samples of `before` and of `after`. Threads may share it."""

    def __init__(self, before: Site, after: Site, changes: Changes, called: tuple[str, str]) -> None:
        self.before, self.after, self.called = before, after, called
        names = [np.array(site.selector.samples.table["name"].take(numbers[numbers >= 0]).to_pylist(), object)
                 for site, numbers in ((before, changes.old), (after, changes.new))]
        shown = np.empty(len(changes), object)
        shown[changes.old >= 0] = names[0]
        shown[changes.new >= 0] = names[1]
        self._order = np.argsort(shown, kind="stable")
        self.changes = changes
        self.counts = {why: int(rows.sum()) for why, rows in changes.reasons.items() if rows.any()}

    def rows(self, why: str) -> Column:
        """The rows of a reason, or of all, by name."""
        return self._order if not why else self._order[self.changes.reasons[why][self._order]]


def diff_page(diff: Diff, why: str, page: int) -> str:
    """One page of the samples that differ for a reason, or for any; `page` counts from 0."""
    rows, base = diff.rows(why), diff.after.base
    pages = max(1, -(-len(rows) // PAIRS))
    page = min(page, pages - 1)

    def link(other: int) -> str:
        return f"{base}/diff?{urlencode({name: value for name, value in (('why', why), ('page', other + 1)) if value})}"

    return diff.after.render(
        "diff.html", why=why, counts=[(name, WHAT.get(name, name), count) for name, count in diff.counts.items()],
        told=WHAT.get(why, why), total=len(diff.changes), count=len(rows), before=diff.called[0], after=diff.called[1],
        pairs=[_pair(diff, row) for row in rows[page * PAIRS:(page + 1) * PAIRS].tolist()],
        pager=pager_of(page, pages, link))


def _pair(diff: Diff, row: int) -> PicturePair:
    numbers = int(diff.changes.old[row]), int(diff.changes.new[row])
    sites = diff.before, diff.after
    reasons = [name for name in REASONS if diff.changes.reasons[name][row]]
    captions = [[] if number < 0 else site.selector.samples.captions(number)
                for site, number in zip(sites, numbers, strict=True)]
    return PicturePair(title=", ".join(WHAT.get(name, name) for name in reasons),
                       sides=(_side("before", sites[0], numbers[0]), _side("after", sites[1], numbers[1])),
                       words=compared(*captions) if "caption" in reasons else ())


def _side(label: str, site: Site, number: int) -> PairSide:
    if number < 0:
        return PairSide(label=label, shot=Shot(name="–", address="", instead="not there"))
    card = card_of(site, site.data, number)
    return PairSide(label=label, shot=card.shot, link=card.link, facts=card.facts)
