"""Cards that a page's script finds, filters, orders and pages: their data, as JSON in the page.

The first cards are in the page's HTML, too, so a page says as much without its script as one without any.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prep.findings import Finding
from prep.formatting import printable
from prep.pages.overlay import Overlay, Shot
from prep.pages.parts import Caption, Card, CardReference

EXAMPLE = Card(  # has every part of a card: the page's script fills copies of it
    shot=Shot(name="", address="data:,", size=(1, 1), overlays=(Overlay(shade="data:,", outlined=True),)),
    references=(CardReference(number=1, shot=Shot(name="", address="data:,", size=(1, 1),
                                                  overlays=(Overlay(shade="data:,", outlined=True),)), fact=""),),
    beside=Shot(name="", address="data:,"), facts=("",), captions=(Caption(text="", letters=1),), more_captions=2,
    findings=(Finding(path="", code="", severity="info", detail=""),), part=0.0)
_PREFIX, _BASE64 = "data:image/", ";base64,"


@dataclass(frozen=True, kw_only=True, slots=True)
class CardOrder:
    """An order of cards, by their names or by one of their values."""

    title: str
    descending: bool
    by_name: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCard:
    """A card with what it is found by, in the order of a page's groups and orders."""

    card: Card
    groups: tuple[str, ...]
    values: tuple[float | None, ...]  # one for each order, ignored if it is by name; None comes last


def cards_json(cards: Sequence[FoundCard], orders: Sequence[CardOrder], *, fixed: int) -> str:
    """The data of cards for the page's script; of the first `fixed`, which HTML has already, only what finds them.

    Text for a `script` element of type application/json: no `<`, `>` or `&` is in it. Ten thousand cards fit a page if
    each takes few bytes: keys are letters, what is empty is left out, and groups are numbers.
    """
    count = len(cards[0].groups) if cards else 0
    groups = [sorted({entry.groups[number] for entry in cards}) for number in range(count)]
    places = [{name: place for place, name in enumerate(names)} for names in groups]
    rows = []
    for number, entry in enumerate(cards):
        row = {"n": printable(entry.card.shot.name), "c": [_caption(caption) for caption in entry.card.captions],
               "e": [[finding.severity, finding.code, printable(finding.detail)] for finding in entry.card.findings],
               "g": [place[name] for place, name in zip(places, entry.groups, strict=True)],
               "v": [None if order.by_name else _number(value)
                     for order, value in zip(orders, entry.values, strict=True)],
               **({} if number < fixed else _drawn(entry.card))}
        rows.append({key: value for key, value in row.items() if value not in (None, "", 0, [])})
    text = json.dumps({"orders": [[order.by_name, order.descending] for order in orders],
                       "groups": [[printable(name) for name in names] for names in groups], "cards": rows},
                      ensure_ascii=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _number(value: float | None) -> float | int | None:
    short = None if value is None else float(f"{value:.5g}")
    return int(short) if short is not None and short == int(short) else short


def _caption(caption: Caption) -> list[Any]:
    """A caption's text, and the letters of the whole if it is cut."""
    return [printable(caption.text), *([caption.letters] if caption.letters > len(caption.text) else [])]


def _drawn(card: Card) -> dict[str, Any]:
    """t tone, m more captions, x facts, p part, d the picture beside, r references (k their numbers); a, i, z and b of
    the picture itself."""
    return {"t": card.tone, "m": card.more_captions, "x": list(map(printable, card.facts)),
            "p": None if card.part is None else round(card.part, 3) or 1e-9, **_shot(card.shot),
            "d": None if card.beside is None else {"n": printable(card.beside.name), **_shot(card.beside)},
            "r": [{"k": each.number, "n": printable(each.shot.name), "x": each.fact, **_shot(each.shot)}
                  for each in card.references]}


def _shot(shot: Shot) -> dict[str, Any]:
    """a address, without what all have; i what is said instead; z size; b boxes."""
    return {"a": str(shot.address).removeprefix(_PREFIX).replace(_BASE64, ",", 1),
            "i": "" if shot.address else printable(shot.instead), "z": None if shot.size is None else list(shot.size),
            "b": [_box(overlay, alone=len(shot.overlays) == 1) for overlay in shot.overlays]}


def _box(overlay: Overlay, *, alone: bool) -> list[Any]:
    """Left, top, width, height in percent, classes, and the address of a shade."""
    kinds = (kind for kind, applies in (("outlined", overlay.outlined), ("alone", alone), ("flip", overlay.flip),
                                        ("coarse", overlay.coarse)) if applies)
    shade = str(overlay.shade).removeprefix(_PREFIX).replace(_BASE64, ",", 1)
    sides = (overlay.left, overlay.top, overlay.width, overlay.height)
    return [*(_number(round(side, 2)) for side in sides), " ".join(kinds), *([shade] if shade else [])]
