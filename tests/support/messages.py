"""The messages that a user can be told, read from the sources, and the strings that tests expect.

A message is the first argument of each `Problem` or `Unparsed` that is made: constant pieces between holes, as far as
that can be told without running it.
"""

from __future__ import annotations

import ast
import inspect
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from sources_parsed import PATHS, ROOT, children_of, nodes_of, tree_of

from prep import errors
from prep.runtime import gc_disabled

KINDS = {name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, errors.Problem)}
KINDS |= {"Unparsed"}
LONG = 10  # characters from which a piece says something of its own

Pieces = tuple[str, ...]
HOLE = "\0"  # stands for a value while a message is put together
BETWEEN = "\n\0\n"  # two literals
MARKS = " ,;:'()"  # at the ends of a piece, say nothing


def pieces_of(text: str) -> Pieces:
    """The words between the holes."""
    return tuple(piece for piece in (part.strip(MARKS) for part in text.split(HOLE)) if piece)


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message (or hint) that a line of the sources can give."""

    where: str  # file:line
    text: str  # with HOLE for each value

    @property
    def pieces(self) -> Pieces:
        return pieces_of(self.text)


@dataclass(frozen=True, kw_only=True, slots=True)
class Module:
    """A parsed file."""

    name: str
    tree: ast.Module

    def functions(self) -> Iterator[ast.FunctionDef]:
        return (node for node in nodes_of(self.tree) if isinstance(node, ast.FunctionDef))


def modules_of() -> list[Module]:
    """The program's files, without the scripts that made the demo model."""
    return [Module(name=path.relative_to(ROOT).as_posix(), tree=tree_of(path))
            for path in PATHS if not path.name.startswith("pretrain")]


def messages_of(modules: Sequence[Module], *, hints: bool = False) -> list[Message]:
    """Every message (or hint) of `modules`, in each form that conditions in it give it; none without own words."""
    helpers = {function.name: function for module in modules for function in module.functions()
               if any(isinstance(node, ast.Return) and _is_problem(node.value) for node in nodes_of(function))}
    found: list[Message] = []
    for module in modules:
        for scope, call in _calls(module.tree):
            for text in _told(scope, call, helpers.get(_name(call.func)), hints):
                found.append(Message(where=f"{module.name}:{call.lineno}", text=text))
    return [message for message in found if hints or message.pieces]


def _calls(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef | None, ast.Call]]:
    """Each call with the innermost function around it."""
    left: list[tuple[ast.AST, ast.FunctionDef | None]] = [(tree, None)]
    while left:
        node, scope = left.pop()
        for inner in children_of(node):
            if isinstance(inner, ast.Call):
                yield scope, inner
            left.append((inner, inner if isinstance(inner, ast.FunctionDef) else scope))


def _told(scope: ast.FunctionDef | None, call: ast.Call, helper: ast.FunctionDef | None, hints: bool) -> list[str]:
    if _name(call.func) in KINDS:
        given = next((word.value for word in call.keywords if word.arg == "hint"), None) if hints else call.args[0]
        return [] if given is None else _texts(given, _assigned(scope))
    if helper is None or hints:
        return []
    known = _assigned(scope)
    values = [_texts(arg, known) for arg in call.args]
    names = [arg.arg for arg in helper.args.args if arg.arg != "self"]
    bound = {name: [ast.Constant(text) for text in texts] for name, texts in zip(names, values, strict=False)}
    made = next(node.value for node in ast.walk(helper) if isinstance(node, ast.Return) and _is_problem(node.value))
    return _texts(made.args[0], {**_assigned(helper), **bound})


def _is_problem(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Call) and _name(node.func) in KINDS


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _assigned(scope: ast.FunctionDef | None) -> dict[str, list[ast.expr]]:
    """What is assigned to each name in a function."""
    known: dict[str, list[ast.expr]] = {}
    for node in ast.walk(scope) if scope is not None else ():
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            known.setdefault(node.targets[0].id, []).append(node.value)
    return known


def _texts(node: ast.expr, known: Mapping[str, Sequence[ast.expr]]) -> list[str]:
    """The texts that an expression can come to, as far as it can be told without running it."""
    if isinstance(node, ast.Constant):
        return [node.value if isinstance(node.value, str) else HOLE]
    if isinstance(node, ast.FormattedValue):
        return _texts(node.value, known) if node.conversion == -1 else [HOLE]
    if isinstance(node, ast.JoinedStr):
        return ["".join(parts) for parts in itertools.product(*(_texts(value, known) for value in node.values))]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [left + right for left in _texts(node.left, known) for right in _texts(node.right, known)]
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, known), *_texts(node.orelse, known)]
    if isinstance(node, ast.Name) and node.id in known:
        rest = {name: values for name, values in known.items() if name != node.id}
        return [text or HOLE for value in known[node.id] for text in _texts(value, rest)]
    return [HOLE]


def literals_of(root: Path) -> list[str]:
    """The strings in the tests (of f-strings: with holes), without docstrings and this file."""
    found: list[str] = []
    for path in sorted((root / "tests").rglob("*.py")):
        if path.name == Path(__file__).name:
            continue
        with gc_disabled():
            nodes = list(nodes_of(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.JoinedStr):
                found += _texts(node, {})
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                found.append(node.value)
    return [text.replace("\\", "").replace(".*", HOLE) for text in found if len(text) >= LONG]  # some are patterns


def untested(messages: Iterable[Message], literals: Sequence[str]) -> list[Message]:
    """Messages whose words no literal has: neither a long piece that is theirs alone, nor all of them in order."""
    messages = list(messages)
    places = {(piece, message.where) for message in messages for piece in message.pieces}
    shared = Counter(piece for piece, _ in places)
    literals = list(dict.fromkeys(literals))
    together = BETWEEN.join(literals)  # quicker to look through than one after another
    parts: dict[str, set[str]] = {}  # by how they begin
    for part in (part for literal in literals for part in pieces_of(literal) if len(part) >= LONG and " " in part):
        parts.setdefault(part[:LONG], set()).add(part)

    def has_a_part(piece: str) -> bool:
        return any(piece.startswith(part, at) for at in range(len(piece) - LONG + 1)
                   for part in parts.get(piece[at:at + LONG], ()))

    def is_told(message: Message) -> bool:
        pieces = message.pieces
        own = [piece for piece in pieces if len(piece) >= LONG and shared[piece] == 1]
        return (any(has_a_part(piece) or piece in together for piece in own)
                or (all(piece in together for piece in pieces)
                and any(_in_order(pieces, literal) for literal in _having(max(pieces, key=len), together))))

    return [message for message in messages if not is_told(message)]


def _having(piece: str, together: str) -> Iterator[str]:
    """The literals that have a piece."""
    end = -1
    while (at := together.find(piece, end + 1)) >= 0:
        end = together.find(BETWEEN, at)
        yield together[together.rfind(BETWEEN, 0, at) + 1:end if end >= 0 else None]
        if end < 0:
            return


def _in_order(pieces: Pieces, literal: str) -> bool:
    at = 0
    for piece in pieces:
        at = literal.find(piece, at)
        if at < 0:
            return False
        at += len(piece)
    return True
