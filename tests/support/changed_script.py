"""Applies a page's diff to a script, statement by statement.

A line `-STATEMENT` removes the one statement of the script that begins so; `…` in it stands for the rest. A line `-…`
removes all statements between that of the line before and that of the line after. Lines with `+` come in the place of
what was removed before them, those without anything removed before them after the script's imports.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import groupby


def changed(script: str, diff: str) -> str:
    """The script with the diff applied. Raises `ValueError` for a statement that it does not have exactly once."""
    lines: list[str | None] = list(script.splitlines())
    added: dict[int, list[str]] = {}
    statements = list(_statements(script))
    for hunk in _hunks(diff):
        removed = [line[1:].strip() for line in hunk if line.startswith("-")]
        wanted = [line[1:] for line in hunk if line.startswith("+")]
        places = [None if line == "…" else _found(statements, line) for line in removed]
        spans = [place if place is not None else (places[at - 1][1] + 1, places[at + 1][0] - 1)
                 for at, place in enumerate(places)]
        for first, last in spans:
            lines[first:last + 1] = [None] * (last + 1 - first)
        after = spans[-1][1] if spans else _end_of_imports(script)
        added[after] = wanted
    return "\n".join(line for at, line in enumerate(lines) for line in (line, *added.get(at, ())) if line is not None)


def _hunks(diff: str) -> Iterator[list[str]]:
    for blank, some in groupby(diff.splitlines(), key=lambda line: not line.strip()):
        if not blank:
            yield list(some)


def _statements(script: str) -> Iterator[tuple[str, int, int]]:
    """Each statement on one line, with its first and last line from 0."""
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.stmt):
            source = ast.get_source_segment(script, node) or ""
            yield _squeezed(source), node.lineno - 1, (node.end_lineno or 0) - 1


def _found(statements: list[tuple[str, int, int]], line: str) -> tuple[int, int]:
    start = _squeezed(line.partition("…")[0])
    there = [(first, last) for source, first, last in statements if source.startswith(start)]
    if len(there) != 1:
        raise ValueError(f"{len(there)} statements begin with '{start}', expected one")
    return there[0]


def _squeezed(source: str) -> str:
    """Without space: scripts break lines in several ways."""
    return "".join(source.split())


def _end_of_imports(script: str) -> int:
    body = ast.parse(script).body
    return max((node.end_lineno or 0) - 1 for node in body if isinstance(node, ast.Import | ast.ImportFrom))
