"""Renders the parts of pages about edits: the forms of a sample, and the list of edits with their cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any
from urllib.parse import parse_qsl, urlencode

from prep.dataset.edits.log import UndoEntry
from prep.dataset.edits.made import LOOK
from prep.dataset.edits.refused import Refused
from prep.formatting import counted
from prep.images.thumbnail import shrunk_size
from prep.manifest.select import Query
from prep.pages.parts import CaptionForm, Card, Column, MadeCaption, Table
from prep.pages.words import compared
from prep.view.edit.cost import Cost
from prep.view.edit.editor import KINDS
from prep.view.edit.replace import ReplacePlan, Rewording, address_of, plan
from prep.view.params import address
from prep.view.site import Site, card_of
from prep.view.source.origins import STATES

BOARD = 4096  # pixels of the longer side of what is painted on
COLUMNS = (Column(head="row"), Column(head="to encode"), Column(head="in the cache"))
ROWS = 500  # edits, and captions that are reworded, that are listed


def edit_of(site: Site, number: int) -> dict[str, Any] | None:
    """The values of the edit forms on a sample's page; `None` without --edit."""
    editor = site.editor
    if editor is None:
        return None
    forms: dict[str, Any] = {"token": site.edit_token, "caption": None, "mask": None,
                             "no_caption": "", "no_mask": editor.no_masks(number),
                             "size": shrunk_size(editor.source.state.seats[number].item.size, BOARD)}
    for kind in KINDS:
        try:
            forms[kind] = None if forms[f"no_{kind}"] else editor.editable(number, kind)
        except Refused as error:
            forms[f"no_{kind}"] = error.message
    return forms


def with_form(site: Site, cards: Mapping[int, Card]) -> list[Card]:
    """Adds the form of captions to the card of each sample in the list; without --edit, which model made them."""
    editor, made = site.editor, made_of(site, cards)
    if editor is None:
        return [replace(card, facts=(*card.facts, *((_said(made[number]),) if number in made else ())))
                for number, card in cards.items()]
    entries, samples, filled = editor.log.entries(), site.selector.samples, []
    for number, card in cards.items():
        form = None
        with suppress(Refused):  # its own page says why
            caption = editor.editable(number, "caption", entries)
            form = CaptionForm(
                number=number, sample=editor.source.state.seats[number].id, trains=samples.captions(number)[0],
                save=f"{site.base}/edit/{number}/caption", undo=f"{site.base}/undo/{number}/caption",
                undoable=caption.undo, version=caption.version, lines=caption.lines, made=made.get(number))
        filled.append(replace(card, form=form))
    return filled


def made_of(site: Site, numbers: Iterable[int]) -> dict[int, MadeCaption]:
    """What models and people wrote about a few samples, but for those about which no model wrote anything."""
    origins = site.origins
    if origins is None:
        return {}
    made = {}
    for number, origin in origins.of(numbers).items():
        to_judge = site.editor is not None and origin.state == LOOK
        made[number] = MadeCaption(
            by=origin.by, state=STATES[origin.state], versions=origins.versions(number, origin),
            accept=f"{site.base}/accept/{number}/caption" if to_judge else "",
            again=f"{site.base}/again/{number}/caption" if to_judge else "")
    return made


def _said(made: MadeCaption) -> str:
    return f"by {made.by}, {made.state}"


def plan_of(site: Site, query: Query, wording: Rewording) -> ReplacePlan:
    """The changes that a rewording makes to the samples that a query selects. Raises `Refused`."""
    assert site.editor is not None, "it has an address only with --edit"
    if not wording.find and not wording.prepend:
        return ReplacePlan()
    return plan(site.editor, site.select(site.data, query).tolist(), wording)


def replace_page(site: Site, query: Query, wording: Rewording) -> str:
    """The captions that a rewording changes, before and after; nothing is saved."""
    data, planned = site.data, plan_of(site, query, wording)
    query_string = address(query, data.shapes)
    fields = [*query_fields(query_string), *address_of(wording)]
    return site.render(
        "replace.html", given=query_string, queried=query_fields(query_string), wording=wording, plan=planned,
        edit_token=site.edit_token, action=f"{site.base}/replace?{urlencode(fields)}",
        undo=f"{site.base}/replace/undo",
        cards=[replace(card_of(site, data, change.sent.number), captions=(), more_captions=0, facts=(), part=None,
                       references=(), words=compared(change.before, change.after))
               for change in planned.changes[:ROWS]])


def query_fields(query: str) -> list[tuple[str, str]]:
    """The names and values of a query string."""
    return parse_qsl(query.removeprefix("?"))


def edits_page(site: Site, cost: Cost | None) -> str:
    """Renders the page of edits, and with `cost` of what re-encoding would take."""
    editor = site.editor
    assert editor is not None, "the page has an address only with --edit"
    changed, entries, seats = editor.changed(), editor.log.entries(), editor.source.state.seats
    numbers = {}
    for number, seat in enumerate(seats):
        for kind in KINDS:
            with suppress(Refused):
                numbers[editor.places.of(seat.item.item, kind).name] = number
    return site.render(
        "edits.html", changed=edit_counts(changed), cost=None if cost is None else _table(cost),
        can_cost=editor.edits.cost is not None, command=editor.edits.command,
        folder="" if editor.places.folder is None else str(editor.places.folder),
        more=len(entries) if len(entries) > ROWS else 0,
        rows=[{"place": entry.place, "number": numbers.get(entry.place),
               "what": f"{entry.kind} {_done(entry)}{entry.by and f' by {entry.by}'}"}
              for entry in entries[:ROWS]])


def _done(entry: UndoEntry) -> str:
    return entry.verdict or ("replaced" if entry.before else "created")


def edit_counts(changed: dict[str, int]) -> str:
    """Like "2 captions and 1 mask"."""
    return " and ".join(counted(changed[kind], kind) for kind in KINDS)


def _table(cost: Cost) -> Table:
    rows = tuple((field, f"{new:,}", f"{cost.reused[field]:,}") for field, new in cost.new.items())
    return Table(caption="Rows that prep encode would make now", columns=COLUMNS,
                 rows=rows)
