"""`prep mask --html`: pictures with their masks over them, a hundred to a page, that need nothing else.

Every name is escaped, and the page's own policy forbids scripts and loading anything.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from html import escape
from pathlib import Path
from urllib.parse import quote

import numpy as np

from prep.formatting import format_size, printable
from prep.fs.atomic import write_atomic
from prep.fs.blob import read_blob
from prep.geometry import Placement, Size
from prep.images.decode import Pixels, decode_picture, encode_png, scale_and_crop
from prep.images.formats.parts import BadPicture
from prep.masks.pixels import read_mask, scaled
from prep.masks.run import Entry
from prep.report.pages.frame import check_page_file, render_page

CARDS = 100  # to a page: about 10 MB
SIDE = 240  # pixels of a thumbnail's longer side
SHADE = (208, 32, 48)  # of what does not train: a red that skin and skies have not
SHADED = 0.65  # part of the shade in it


def write_sheets(path: Path, entries: Sequence[Entry], *, jobs: int, tick: Callable[[int], object]) -> tuple[Path, ...]:
    """Writes `path`, and `NAME-2.html` and so on beside it where there are more than `CARDS`; each whole or not at all.

    Raises `PathError` where one of them would replace something else.
    """
    pages = [entries[start:start + CARDS] for start in range(0, len(entries), CARDS)] or [entries]
    paths = [path if not number else path.with_name(f"{path.stem}-{number + 1}{path.suffix}")
             for number in range(len(pages))]
    for one in paths:
        check_page_file(one, ())
    pool = ThreadPoolExecutor(jobs)
    try:
        for number, (one, shown) in enumerate(zip(paths, pages, strict=True)):
            cards = []
            for card in pool.map(_card, shown):
                cards.append(card)
                tick(1)
            write_atomic(one, _page(path.stem, cards, number, paths, len(entries)).encode())
    finally:
        pool.shutdown(cancel_futures=True)
    return tuple(paths)


def overlaid(picture: Pixels, mask: Pixels) -> Pixels:
    """uint8 [H, W, 3]: `picture`, shaded where `mask` (uint8 [H, W], 255 trains) leaves it out."""
    left_out_HW1 = SHADED * (1 - mask.astype(np.float32)[..., None] / 255)
    mixed_HW3 = picture * (1 - left_out_HW1) + np.array(SHADE, np.float32) * left_out_HW1
    return mixed_HW3.round().astype(np.uint8)


def _card(entry: Entry) -> str:
    name = f"<b><bdi>{escape(printable(entry.name))}</bdi></b>"
    try:
        picture = decode_picture(read_blob(entry.item.picture), alpha="white")
        mask = read_mask(entry.mask.read_bytes(), picture.size) if entry.mask.is_file() else None
    except (OSError, BadPicture) as error:
        why = f'<span class="error">{escape(printable(str(error)))}</span>'
        return f"<figure><figcaption>{name}{why}</figcaption></figure>\n"
    size = _thumbnail(picture.size)
    small = scale_and_crop(picture, Placement(scaled=size, crop=(0, 0), bucket=size))
    facts = "no mask: all of it trains"
    if mask is not None:
        facts = f"{mask.mean() / 255:.0%} trains"
        small = overlaid(small, scaled(mask, size))
    data = base64.b64encode(encode_png(small)).decode("ascii")
    return (f'<figure><img alt="" width="{size[0]}" height="{size[1]}" src="data:image/png;base64,{data}">'
            f'<figcaption>{name}<div class="facts">{format_size(picture.size)}, {facts}</div></figcaption></figure>\n')


def _thumbnail(size: Size) -> Size:
    longer = max(size)
    width, height = (max(1, side * min(SIDE, longer) // longer) for side in size)
    return width, height


def _page(title: str, cards: Sequence[str], number: int, paths: Sequence[Path], count: int) -> str:
    others = " ".join(map(partial(_link, number), range(len(paths)), (one.name for one in paths)))
    links = f"<p>page {others}</p>" if len(paths) > 1 else ""
    return render_page(title, f"<p>{len(cards)} of {count} pictures. What is shaded red does not train.</p>\n{links}\n"
                         f'<div class="gallery">\n{"".join(cards)}</div>\n{links}')


def _link(current: int, number: int, name: str) -> str:
    """The number of a page, as a link unless it is this one."""
    words = str(number + 1)
    return words if number == current else f'<a href="./{escape(quote(name))}">{words}</a>'
