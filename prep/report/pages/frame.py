"""What all our pages share: one file, no script, no address, light and dark; every text escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path

from prep.formatting import printable
from prep.fs.paths import NamedPath, check_disjoint, check_replaceable

POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def check_page_file(path: Path, apart: Iterable[NamedPath]) -> None:
    """Raises `PathError` unless a page may be written to `path`: apart from these, over nothing but a page."""
    for place in apart:
        check_disjoint([place, NamedPath(role="page", path=path)])
    check_replaceable(path, "page", lambda start: not start or POLICY.encode() in start)


def render_page(title: str, body: str) -> str:
    """A whole page of a title and a body."""
    name = words(title)
    return (f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
            f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{name}</title>\n'
            f"<style>\n{_css()}</style></head>\n<body>\n<h1>{name}</h1>\n{body}\n</body></html>\n")


def sections(parts: Iterable[tuple[str, str]]) -> str:
    """Sections of a heading and a body each."""
    return "\n".join(f"<section><h2>{title}</h2>\n{inner}\n</section>" for title, inner in parts)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int] = ()) -> str:
    """An HTML table of escaped cells; columns in `numbers` are flush right."""
    def cells(tag: str, row: Sequence[str]) -> str:
        kinds = (' class="number"' if number in numbers else "" for number in range(len(row)))
        return "".join(f"<{tag}{kind}>{words(cell)}</{tag}>" for kind, cell in zip(kinds, row, strict=True))

    head = f"<thead><tr>{cells('th', heads)}</tr></thead>" if any(heads) else ""
    body = "\n".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f"<table>{head}<tbody>\n{body}\n</tbody></table>"


def words(text: str) -> str:
    """Text from anywhere, escaped."""
    return escape(printable(text))


def _css() -> str:
    return files("prep.report.pages").joinpath("page.css").read_text(encoding="utf-8")
