"""Renders pages: one self-contained file without links to other sites, light and dark, all text escaped.

A page may have one script, `page.js`, which its policy allows by its digest, and data for it; no other script runs.

Templates are in `templates/`. Jinja2 escapes every value, and `_spelled_out` spells out control characters before that,
so a name or a caption stays text. Only this module may mark text as HTML.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from prep.formatting import printable
from prep.fs.mirror import shown
from prep.fs.paths import NamedPath, check_disjoint, check_replaceable
from prep.recipe.schema import Recipe
from prep.report.pages.parts import Head, Section

MARK = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"  # the start of the policy identifies our pages
POLICY = f"{MARK}; base-uri 'none'; form-action 'none'"  # of pages without a script
MOST_BYTES = 10 << 20  # of a page's pictures in base64; the page stays below 15 MB
PLACES = 5  # sources named in the head
_KINDS = {b"\x89PNG\r\n\x1a\n": "png", b"\xff\xd8\xff": "jpeg", b"RIFF": "webp"}
_UNBROKEN = 16  # characters that stay in one line
_DIRECTORIES, _WORDS = re.compile(r"(?<=[^/]/)"), re.compile(r"(?<=[^_-][_-])")


@dataclass(frozen=True, kw_only=True, slots=True)
class Origin:
    """The data set of a page, and the page's date."""

    name: str  # of the data set, for titles
    places: tuple[str, ...]  # its paths, as the user wrote them
    made: date


def origin_of(recipe: Recipe, made: date) -> Origin:
    """Returns the origin of a page about a recipe's pictures."""
    places = [shown(source.path) for source in recipe.sources]
    if len(places) > PLACES:
        places[PLACES:] = [f"and {len(places) - PLACES} more sources"]
    return Origin(name=name_of(recipe), places=tuple(places), made=made)


def name_of(recipe: Recipe) -> str:
    """The name of a recipe's pictures, for titles: that of their directories."""
    names = list(dict.fromkeys(_name_of(source.path) for source in recipe.sources))
    more = f" and {len(names) - 2} more" if len(names) > 2 else ""
    return ", ".join(names[:2]) + more


def _name_of(path: Path) -> str:
    """The last part of a path; `.` and `..` are resolved first."""
    return (path.name if path.name not in ("", "..") else path.resolve().name) or str(path)


def check_page_file(path: Path, apart: Iterable[NamedPath]) -> None:
    """Raises `PathError` unless a page may be written to `path`: outside `apart`, over an earlier page only."""
    for place in apart:
        check_disjoint([place, NamedPath(role="page", path=path)])
    check_replaceable(path, "page", lambda start: not start or MARK.encode() in start)


def render_page(template: str, origin: Origin, *, head: Head, sections: Iterable[Section], data: str | None = None,
                scripted: bool = False, **values: Any) -> str:
    """Renders a template with its head, its sections in order, and their values.

    With `data`, which `cards_json` makes, the page has the script that reads it; so it has if `scripted`, which lets
    its tables be sorted. The same values give the same bytes.
    """
    by_id = {one.id: one for one in sections}
    script = _script() if scripted or data is not None else ""
    policy = POLICY if not script else POLICY.replace(MARK, f"{MARK}; script-src '{_hash_of(script)}'")
    # Safe: the script is ours, and cards_json escapes what could end its element.
    return _environment().get_template(template).render(
        origin=origin, head=head, sections=by_id, policy=Markup(policy), script=Markup(script),
        data=None if data is None else Markup(data), **values) + "\n"


@cache
def _script() -> str:
    return files("prep.report.pages").joinpath("page.js").read_text(encoding="utf-8")


def _hash_of(script: str) -> str:
    """The source expression of an inline script: CSP Level 3, 2.3.1."""
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode('ascii')}"


class Pictures:
    """Embeds the pictures of one page as `data:` addresses, at most `most` bytes of them in all."""

    def __init__(self, most: int | None = None) -> None:
        self.left = MOST_BYTES if most is None else most  # bytes of base64
        self.refused = 0  # pictures that did not fit

    def add(self, data: bytes | None) -> str:
        """Returns the `data:` address of a PNG, JPEG or WebP; "" for `None`, another format, or a full page."""
        kind = next((kind for start, kind in _KINDS.items() if data is not None and data.startswith(start)), None)
        if data is None or kind is None:
            return ""
        length = (len(data) + 2) // 3 * 4
        if length > self.left:
            self.refused += 1
            return ""
        self.left -= length
        # Safe: base64 contains only letters, digits, "+", "/" and "=". Markup, so that no filter scans megabytes.
        return Markup(f"data:image/{kind};base64,{base64.b64encode(data).decode('ascii')}")


def environment_of(*packages: str) -> Environment:
    """An environment with the templates of some packages, then those of this one; every value is escaped."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(name) for name in (*packages, "prep.report.pages")]), autoescape=True,
        finalize=_spelled_out, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "thousands": _thousands}
    environment.globals |= {"version": version("latentry")}
    return environment


@cache
def _environment() -> Environment:
    environment = environment_of()
    css = files("prep.report.pages").joinpath("page.css").read_text(encoding="utf-8")
    environment.globals |= {"css": Markup(css)}
    return environment


def _spelled_out(value: Any) -> Any:
    """Spells out the control characters of text; leaves the HTML of our macros as it is."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _breakable(text: str) -> Markup:
    """Allows line breaks in long paths and identifiers: after directories, and inside long names."""
    return Markup(" ").join(_breakable_word(word) for word in printable(text).split(" "))


def _breakable_word(word: str) -> Markup:
    return Markup("<wbr>").join(escape(piece) for part in _DIRECTORIES.split(word) for piece in _pieces(part))


def _pieces(part: str) -> Iterator[str]:
    """Splits a name longer than `_UNBROKEN` characters after words, and longer words anywhere."""
    line = ""
    for word in [part] if len(part) <= _UNBROKEN else _WORDS.split(part):
        if line and len(line) + len(word) > _UNBROKEN:
            yield line
            line = ""
        line += word
        while len(line) > _UNBROKEN:
            yield line[:_UNBROKEN]
            line = line[_UNBROKEN:]
    yield line


def _thousands(number: int) -> str:
    """A number with thousands separators: 12,345."""
    return f"{number:,}"
