"""Fills the templates of the pages in `templates/`; what a user wrote is text, escaped by prep.report.pages.frame."""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Any

from jinja2 import Environment

from prep.report.pages.frame import environment_of

# What `/static/` serves: nothing else is read from the disk by a name in an address.
STATIC = {"page.css": ("prep.report.pages", "page.css", "text/css; charset=utf-8"),
          "view.css": ("prep.view", "static/view.css", "text/css; charset=utf-8"),
          "view.js": ("prep.view", "static/view.js", "text/javascript; charset=utf-8"),
          "edit.js": ("prep.view", "static/edit.js", "text/javascript; charset=utf-8"),
          "run.js": ("prep.view", "static/run.js", "text/javascript; charset=utf-8"),
          "icon.svg": ("prep.view", "static/icon.svg", "image/svg+xml"),
          "missing.svg": ("prep.view", "static/missing.svg", "image/svg+xml")}


def render(template: str, **values: Any) -> str:
    """The HTML of a page."""
    return _environment().get_template(template).render(**values) + "\n"


@cache
def static(name: str) -> tuple[bytes, str] | None:
    """A file of the pages and its media type; `None` if there is none of that name."""
    if name not in STATIC:
        return None
    package, path, kind = STATIC[name]
    return files(package).joinpath(path).read_bytes(), kind


@cache
def _environment() -> Environment:
    return environment_of("prep.view")
