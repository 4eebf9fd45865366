"""What the pages say of edits: the forms of a sample, and what was edited and what it costs."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from prep.formatting import counted
from prep.images.thumbnail import shrunk_size
from prep.report.pages.parts import Column, Table
from prep.view.edit.cost import Cost
from prep.view.edit.editor import KINDS
from prep.view.edit.refused import Refused
from prep.view.site import Site

BOARD = 4096  # pixels of the longer side of what is painted on
COLUMNS = (Column(head="row"), Column(head="to encode"), Column(head="in the cache"))
ROWS = 500  # edits that are listed


def edit_of(site: Site, number: int) -> dict[str, Any] | None:
    """What the forms of a sample's page need; `None` without --edit."""
    editor = site.editor
    if editor is None:
        return None
    found: dict[str, Any] = {"token": site.edit_token, "caption": None, "mask": None, "lines": (),
                             "no_caption": "", "no_mask": editor.no_masks(number),
                             "size": shrunk_size(editor.source.shown.seats[number].item.size, BOARD)}
    for kind in KINDS:
        try:
            found[kind] = None if found[f"no_{kind}"] else editor.editable(number, kind)
        except Refused as error:
            found[f"no_{kind}"] = error.message
    return {**found, "lines": () if found["caption"] is None else editor.lines(number)}


def edits_page(site: Site, cost: Cost | None) -> str:
    """What was edited, and with `cost` what encoding again would make."""
    editor = site.editor
    assert editor is not None, "the page has an address only with --edit"
    changed, entries, seats = editor.changed(), editor.log.entries(), editor.source.shown.seats
    numbers = {}
    for number, seat in enumerate(seats):
        for kind in KINDS:
            with suppress(Refused):
                numbers[editor.places.of(seat.item.item, kind).name] = number
    return site.render(
        "edits.html", changed=told(changed), cost=None if cost is None else _table(cost),
        can_cost=editor.edits.cost is not None, command=editor.edits.command,
        folder="" if editor.places.folder is None else str(editor.places.folder),
        more=len(entries) if len(entries) > ROWS else 0,
        rows=[{"place": one.place, "number": numbers.get(one.place),
               "what": f"{one.kind} {'replaced' if one.before else 'written anew'}"} for one in entries[:ROWS]])


def told(changed: dict[str, int]) -> str:
    """Like "2 captions and 1 mask"."""
    return " and ".join(counted(changed[kind], kind) for kind in KINDS)


def _table(cost: Cost) -> Table:
    rows = tuple((field, f"{new:,}", f"{cost.reused[field]:,}") for field, new in cost.new.items())
    return Table(caption="Rows that prep encode would make now", columns=COLUMNS,
                 rows=rows)
