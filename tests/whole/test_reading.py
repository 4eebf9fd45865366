"""Rules of reading, for the whole code: a limit is no amount to ask for, and files are opened by what refuses pipes."""

from __future__ import annotations

import ast
import importlib
import io
from collections.abc import Iterator

from sources_parsed import PATHS, ROOT, nodes_of, tree_of

from prep.fs.untrusted import read_up_to

MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in PATHS}
PART = 1 << 20  # bytes that code may ask for at a time, whatever there is

# Where files are opened without a look at what they are, and why that is safe. All else goes through
# `prep.fs.untrusted` (no links), `prep.fs.blob` and `prep.fs.text` (links are followed), or `prep.models.files`.
OPENS = {
    "prep.fs": "what opens, writes and locks files for the others",
    "prep.models.files": "the same for models",
    "prep.cache.remote": "copies of what is in stores, in a directory of the user's own that this program fills",
    "train.runs.stored": "the same of runs",
    "prep.cache.damage": "a lock",
    "train.runs.directory": "a directory, to lock it",
    "train.runs.losses": "to append to what was just put there whole",
    **dict.fromkeys(("prep.runtime", "prep.runs.heartbeat", "prep.models.device.host", "prep.models.device.allocator"),
                    "files of the system"),
    "prep.cli.console": "the null device", "prep.workers.worker": "the null device",
    "prep.pages.layout": "files of this package",
    "train.parallel.code": "files of this package",
    "prep.demo.tiny_model": "a model that it has just written",
    "prep.models.checkpoints": "a model that is being written",
    "prep.sources.tar_members": "a tar in what was opened before", "prep.export.run": "a tar that is being written",
    "prep.imports.npz": "a member of a zip", "prep.cli.serving": "a browser",
}


def calls(tree: ast.Module, *names: str) -> Iterator[ast.Call]:
    for node in nodes_of(tree):
        if isinstance(node, ast.Call):
            called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if called in names:
                yield node


def test_no_limit_is_an_amount():
    """`handle.read(MOST)` makes a buffer of that size for a file of a few bytes."""
    for module, path in MODULES.items():
        for call in calls(tree_of(path), "read", "read1", "recv"):
            of_system = isinstance(call.func, ast.Attribute) and ast.unparse(call.func) == "os.read"
            if len(call.args) == 1 + of_system and (amount := value_of(call.args[-1], module)) is not None:
                assert amount <= PART, f"{module}: {ast.unparse(call)} asks for {amount} bytes; use read_up_to"


def value_of(expression: ast.expr, module: str) -> int | None:
    """The number that an expression of constants has; `None` for all others."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    known = vars(importlib.import_module(module)) if names and all(name.isupper() for name in names) else {}
    if names - known.keys():
        return None
    found = eval(compile(ast.Expression(expression), module, "eval"), dict(known))
    return found if isinstance(found, int) else None


def test_files_are_opened_by_what_looks_at_them():
    seen = set()
    for module, path in MODULES.items():
        for call in calls(tree_of(path), "open", "read_text", "read_bytes"):
            if isinstance(call.func, ast.Name) and call.func.id != "open":
                continue  # a function of that name
            above = {name for name in OPENS if module == name or module.startswith(f"{name}.")}
            assert above, f"{module}: {ast.unparse(call)} opens what may be a pipe or a link"
            seen |= above
    assert seen == OPENS.keys()


def test_what_is_read_is_asked_for_in_parts():
    asked = []

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            asked.append(size)
            return super().read(min(size or 0, 3))

    assert read_up_to(Slow(b"12345678"), 1 << 40) == b"12345678" and max(asked) <= PART
    assert read_up_to(Slow(b"12345678"), 5) == b"12345" and read_up_to(Slow(b""), 5) == b""


def test_the_rule_of_amounts_sees_names():
    def amount(text: str) -> int | None:
        return value_of(ast.parse(text, mode="eval").body.args[0], "prep.fs.untrusted")

    assert amount("handle.read(_PART + 1)") == PART + 1 and amount("handle.read(size)") is None
    assert amount("handle.read(9)") == 9 and amount("handle.read(min(_PART, left))") is None
