"""Renders the templates in `templates/`, of snapshots and of live pages; all values are escaped.

Jinja2 escapes every value, and `_printable` spells out control characters before that, so a name or a caption stays
text. Only this module and `snapshot.py` mark text as HTML: their own style and script, and base64.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from prep.formatting import printable

STATIC = {"page.css": "text/css; charset=utf-8", "view.css": "text/css; charset=utf-8",
          "page.js": "text/javascript; charset=utf-8", "view.js": "text/javascript; charset=utf-8",
          "edit.js": "text/javascript; charset=utf-8", "run.js": "text/javascript; charset=utf-8",
          "studio.js": "text/javascript; charset=utf-8",
          "icon.svg": "image/svg+xml",
          "missing.svg": "image/svg+xml", "undecodable.svg": "image/svg+xml"}
_UNBROKEN = 16  # characters that stay in one line
_DIRECTORIES, _WORDS = re.compile(r"(?<=[^/]/)"), re.compile(r"(?<=[^_-][_-])")


def render(template: str, **values: Any) -> str:
    """Renders a page. The same values give the same bytes."""
    return _environment().get_template(template).render(**values) + "\n"


@cache
def static_file(name: str) -> tuple[bytes, str] | None:
    """Returns a style, script or icon of the pages, and its media type; `None` for any other name."""
    if name not in STATIC:
        return None
    return files("prep.pages").joinpath("static", name).read_bytes(), STATIC[name]


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("prep.pages"), autoescape=True, finalize=_printable, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"breakable": _breakable, "thousands": _thousands}
    environment.globals |= {"version": version("latentry")}
    return environment


def _printable(value: Any) -> Any:
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
