"""What manifests/troubleshooting.md quotes is what a command says, with the exit code of its section."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest
from sources_parsed import PATHS, ROOT, children_of, tree_of

from prep import errors
from prep.cache.remote import quota
from prep.errors import Problem
from prep.fs.remote import errors as remote

HOLE = "\0"  # stands for a value in a message
PAGE = ROOT / "manifests" / "troubleshooting.md"
SECTIONS = {title: text for title, _, text in
            (part.partition("\n") for part in PAGE.read_text(encoding="utf-8").split("\n## ")[1:])}
QUOTES = [(title, quote) for title, text in SECTIONS.items()
          for quote in re.findall(r"^\| `(.+?)` \|", text, re.MULTILINE)]
CLASSES = {name: kind for module in (errors, quota, remote) for name, kind in vars(module).items()
           if isinstance(kind, type) and issubclass(kind, Problem)}


def codes_of(title: str) -> set[int]:
    return set(map(int, re.findall(r"\b\d+\b", title.partition(":")[0])))


@pytest.fixture(scope="module")
def told() -> list[tuple[str, int]]:
    """The messages in the sources, with the exit code that each has."""
    return [one for path in PATHS for one in messages_in(tree_of(path))]


def messages_in(tree: ast.AST, kind: type[Problem] | None = None) -> Iterator[tuple[str, int]]:
    """`kind` is the class whose body `tree` is part of, if it is that of a problem."""
    for node in children_of(tree):
        if isinstance(node, ast.Call) and node.args:
            name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
            made = kind if name == "__init__" else CLASSES.get(name)
            if made is not None:
                said = node.args[0]
                for text in (said.body, said.orelse) if isinstance(said, ast.IfExp) else (said,):
                    yield spelled(text), made.exit_code
        bases = [CLASSES[base.id] for base in getattr(node, "bases", []) if getattr(base, "id", "") in CLASSES]
        yield from messages_in(node, bases[0] if bases else kind)


def spelled(node: ast.expr) -> str:
    """A text with `HOLE` for each value in it."""
    if isinstance(node, ast.JoinedStr):
        return "".join(map(spelled, node.values))
    return str(node.value) if isinstance(node, ast.Constant) else HOLE


def said_by(quote: str, text: str) -> bool:
    """Whether a message of the sources is spelled as the quote; `…` stands for anything."""
    parts = [re.escape(part) for part in quote.split("…")]
    return re.fullmatch("(?s:.*)".join(parts), text) is not None


def test_every_exit_code_has_a_section():
    told = {code for title in SECTIONS for code in codes_of(title)}
    assert told == {1, 70, 130} | {kind.exit_code for kind in Problem.__subclasses__()}
    assert len(QUOTES) > 30


@pytest.mark.parametrize(("title", "quote"), QUOTES)
def test_a_quoted_message_is_one_that_is_told_with_that_exit_code(title, quote, told):
    codes = {code for text, code in told if said_by(quote, text)}
    assert codes, f"no message is spelled so: {quote}"
    assert codes & codes_of(title)


def test_a_quote_that_nothing_says_is_noticed():
    assert said_by("shard … is missing", f"shard {HOLE} is missing")
    assert not said_by("shard … is missing", f"shard {HOLE} is lost")
    assert not said_by("shard … is missing", f"a shard {HOLE} is missing")
