"""Writes the pages of `prep mask --html`: pictures under their masks, a hundred to a page, with links between pages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from prep.findings import finding
from prep.formatting import format_size
from prep.fs.atomic import write_atomic
from prep.fs.blob import blob_at, error_code, read_blob
from prep.images.decode import decode_picture
from prep.images.formats.parts import BadPicture
from prep.images.thumbnail import encode_jpeg, encode_shade, shrink, shrunk_size
from prep.masks.pixels import read_mask, scaled
from prep.masks.run import MaskEntry
from prep.pages.overlay import Overlay, Shot
from prep.pages.parts import Card, Head, Pager, Section, Stat, pager_of, plural
from prep.pages.snapshot import EmbeddedPictures, PageOrigin, check_page_file, render_snapshot

CARDS = 100  # per page: about 4 MB
SIDE = 320  # pixels of a thumbnail's longer side


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parts:
    """The parts of a card."""

    card: Card  # without its pictures
    picture: bytes  # b"": it cannot be read
    shade: bytes  # b"": no mask


def write_sheets(path: Path, origin: PageOrigin, entries: Sequence[MaskEntry], *, jobs: int,
                 tick: Callable[[int], object]) -> tuple[Path, ...]:
    """Writes `path` and, for more than `CARDS` entries, `NAME-2.html` and so on beside it, each atomically.

    Returns their paths. Raises `PathError` if a page would replace a file that is not such a page.
    """
    pages = [entries[start:start + CARDS] for start in range(0, len(entries), CARDS)] or [entries]
    paths = [path if not number else path.with_name(f"{path.stem}-{number + 1}{path.suffix}")
             for number in range(len(pages))]
    for page in paths:
        check_page_file(page, ())
    pool = ThreadPoolExecutor(jobs)
    try:
        for number, (page, inside) in enumerate(zip(paths, pages, strict=True)):
            parts = []
            for entry in pool.map(_show, inside):
                parts.append(entry)
                tick(1)
            write_atomic(page, _page(origin, parts, number, paths, len(entries)).encode())
    finally:
        pool.shutdown(cancel_futures=True)
    return tuple(paths)


def _show(entry: MaskEntry) -> _Parts:
    try:
        picture = decode_picture(read_blob(entry.item.picture), alpha="white")
        mask = read_mask(read_blob(blob_at(entry.mask)), picture.size) if entry.mask.is_file() else None
    except OSError as error:
        return _unreadable(entry, error_code(error), f"cannot be read: {error.strerror or error}")
    except BadPicture as error:
        return _unreadable(entry, error.code, error.detail)
    fact = format_size(picture.size) + ("" if mask is not None else ", no mask: the whole picture trains")
    card = Card(shot=Shot(name=entry.name, address="", size=picture.size), facts=(fact,),
                part=None if mask is None else float(mask.mean()) / 255)
    shade = b"" if mask is None else encode_shade(scaled(mask, shrunk_size(picture.size, SIDE)))
    return _Parts(card=card, picture=encode_jpeg(shrink(picture, SIDE)), shade=shade)


def _unreadable(entry: MaskEntry, code: str, detail: str) -> _Parts:
    said = finding(entry.name, code, detail, as_error=True)
    card = Card(shot=Shot(name=entry.name, address="", instead="This picture cannot be read."), tone="error",
                findings=(said,))
    return _Parts(card=card, picture=b"", shade=b"")


def _page(origin: PageOrigin, parts: Sequence[_Parts], number: int, paths: Sequence[Path], count: int) -> str:
    pictures = EmbeddedPictures()
    cards = [_card(each, pictures) for each in parts]
    kind = "Masks" if len(paths) == 1 else f"Masks, page {number + 1} of {len(paths)}"
    first = number * CARDS
    note = "" if len(paths) == 1 else f"Pictures {first + 1:,} to {first + len(parts):,} of {count:,}, in order."
    return render_snapshot("masks.html", origin, head=_head(kind, cards, count), cards=cards,
                           pager=_pager(number, paths), sections=[
                               Section(id="masks", title="Masks", count=len(cards), note=note)])


def _card(parts: _Parts, pictures: EmbeddedPictures) -> Card:
    """Adds the pictures to a card while the page has room."""
    shot = parts.card.shot
    address, shade = pictures.add(parts.picture), pictures.add(parts.shade)
    size = shot.size if address else None
    instead = shot.instead if not parts.picture else "This page has no room for more pictures."
    overlays = (Overlay(shade=shade),) if shade else ()
    return Card(shot=Shot(name=shot.name, address=address, instead=instead, size=size, overlays=overlays),
                tone=parts.card.tone, facts=parts.card.facts, findings=parts.card.findings, part=parts.card.part)


def _head(kind: str, cards: Sequence[Card], count: int) -> Head:
    masks = [card.part for card in cards if card.part is not None]
    black, broken = sum(part == 0 for part in masks), sum(bool(card.findings) for card in cards)
    mean = sum(masks) / len(masks) if masks else None
    usable = (f"{len(masks):,} of the {plural(len(cards), 'picture')} on this page have a mask"
              + ("" if mean is None else f"; on average {mean:.0%} of the picture trains"))
    todo = "Check the areas shaded red: they do not train. To change a mask, edit its file or run prep mask again."
    if black:
        todo = f"{plural(black, 'mask is', 'masks are')} entirely black: the whole picture would not train. " + todo
    return Head(
        kind=kind, what=plural(count, "picture"), usable=usable, part=mean, todo=todo,
        tone="warning" if black or broken else "good",
        stats=(Stat(value=f"{len(masks):,}", label="with a mask", tone="good"),
               Stat(value=f"{len(cards) - len(masks) - broken:,}", label="without a mask", tone="info"),
               Stat(value=f"{black:,}", label="entirely black", tone="warning"),
               Stat(value=f"{broken:,}", label="unreadable", tone="error")))


def _pager(number: int, paths: Sequence[Path]) -> Pager:
    return pager_of(number, len(paths), lambda other: f"./{quote(os.fsencode(paths[other].name))}")
