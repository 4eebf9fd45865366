"""Renders snapshots: one self-contained file without links to other sites, light and dark.

A page may have one script, `page.js`, which its policy allows by its digest, and data for it; no other script runs.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from markupsafe import Markup

from prep.fs.paths import NamedPath, check_disjoint, check_replaceable, resolve
from prep.fs.place import Place
from prep.pages.layout import render, static_file
from prep.pages.parts import Head, Section
from prep.recipe.schema import Recipe

MARK = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # the start of the policy identifies our pages
POLICY = f"{MARK}; base-uri 'none'; form-action 'none'"  # of pages without a script
MOST_BYTES = 10 << 20  # of a page's pictures in base64; the page stays below 15 MB
PLACES = 5  # sources named in the head
_FORMATS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}


@dataclass(frozen=True, kw_only=True, slots=True)
class PageOrigin:
    """The data set of a page, and the page's date."""

    name: str  # of the data set, for titles
    places: tuple[str, ...]  # its paths, as the user wrote them
    made: date


def origin_of(recipe: Recipe, made: date) -> PageOrigin:
    """Returns the origin of a page about a recipe's pictures."""
    places = [str(source.path) for source in recipe.sources]
    if len(places) > PLACES:
        places[PLACES:] = [f"and {len(places) - PLACES} more sources"]
    return PageOrigin(name=name_of(recipe), places=tuple(places), made=made)


def name_of(recipe: Recipe) -> str:
    """Returns the name of a recipe's pictures, for titles: that of their directories."""
    names = list(dict.fromkeys(_name_of(source.path) for source in recipe.sources))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _name_of(path: Place) -> str:
    """The last part of a path; `.` and `..` are resolved first."""
    return (path.name if path.name not in ("", "..") else resolve(path).name) or str(path)


def check_page_file(path: Path, apart: Iterable[NamedPath]) -> None:
    """Raises `PathError` unless a page may be written to `path`: outside `apart`, over an earlier page only."""
    for place in apart:
        check_disjoint([place, NamedPath(role="page", path=path)])
    check_replaceable(path, "page", lambda start: not start or MARK.encode() in start)


def render_snapshot(template: str, origin: PageOrigin, *, head: Head, sections: Iterable[Section],
                    data: str | None = None, scripted: bool = False, **values: Any) -> str:
    """Renders a template with its head, its sections in order, and their values.

    With `data`, which `cards_json` makes, the page has the script that reads it; so it has if `scripted`, which lets
    its tables be sorted.
    """
    script = _own("page.js") if scripted or data is not None else ""
    policy = POLICY if not script else POLICY.replace(MARK, f"{MARK}; script-src '{_hash_of(script)}'")
    # Safe: style and script are ours, and cards_json escapes what could end its element.
    return render(template, origin=origin, head=head, sections={section.id: section for section in sections},
                  policy=Markup(policy), script=Markup(script), css=Markup(_own("page.css")),
                  data=None if data is None else Markup(data), **values)


@cache
def _own(name: str) -> str:
    file = static_file(name)
    assert file is not None, name
    return file[0].decode("utf-8")


def _hash_of(script: str) -> str:
    """The source expression of an inline script: CSP Level 3, 2.3.1."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}"


class EmbeddedPictures:
    """Embeds the pictures of one page as `data:` addresses, at most `most` bytes of them in all."""

    def __init__(self, most: int | None = None) -> None:
        self.room = MOST_BYTES if most is None else most  # bytes of base64
        self.refused = 0  # pictures that did not fit

    def add(self, data: bytes | None) -> str:
        """Returns the `data:` address of a PNG, JPEG or WebP; "" for `None`, another format, or a full page."""
        name = next((name for start, name in _FORMATS.items() if data is not None and data.startswith(start)), None)
        if data is None or name is None:
            return ""
        length = (len(data) + 2) // 3 * 4
        if length > self.room:
            self.refused += 1
            return ""
        self.room -= length
        # Safe: base64 contains only letters, digits, "+", "/" and "=". Markup, so that no filter scans megabytes.
        return Markup(f"data:image/{name};base64,{base64.b64encode(data).decode('ascii')}")
