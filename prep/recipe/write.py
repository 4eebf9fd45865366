"""Writes a recipe as `dataset.toml` with comments; `prep.recipe.load` reads the same recipe back.

It writes keys that differ from their defaults, and those that the caller wants shown. Untrusted strings are escaped,
for TOML and for terminals.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from prep.captions.options import CaptionOptions
from prep.errors import PathError
from prep.formatting import printable
from prep.models.named import moved
from prep.recipe.schema import MASKS, SETTINGS, Recipe, Source

WIDTH = 118  # columns of a comment

@dataclass(frozen=True, kw_only=True, slots=True)
class Comment:
    """A comment, and its place in the recipe."""

    at: str  # "" (the top), "image", "image.resolution", "source[2]", "source[2].mask" …
    text: str


def render_recipe(recipe: Recipe, *, base: Path, remarks: Sequence[Comment] = (), shown: Collection[str] = ()) -> str:
    """The text of a recipe for the directory `base`; keys in `shown` are written even at their default.

    Raises `PathError` for a path that is not UTF-8.
    """
    writer = _RecipeWriter(base=base, remarks=remarks, shown=shown)
    said = [*writer.comments(""), ""] if any(not remark.at for remark in remarks) else []
    lines = [*said, *writer.section("model", _changed(recipe.model, shown, "model")),
             *writer.section("image", _changed(recipe.image, shown, "image")),
             *writer.section("caption", _changed(recipe.caption, shown, "caption")),
             *writer.section("mask", _masks(recipe, shown))]
    lines += writer.section("references", _references(recipe, shown))
    lines += writer.section("embed", {"model": recipe.embed} if recipe.embed else {})
    lines += writer.section("similarity", _changed(recipe.similarity, shown, "similarity"))
    lines += writer.section("edits", {} if recipe.edits is None else {"from": recipe.edits})
    lines += writer.section("cache", {} if recipe.cache is None else {"path": recipe.cache})
    scan = _changed(recipe.scan, shown, "scan")
    lines += writer.section("scan", scan | ({"severity": dict(recipe.scan.severity)} if "severity" in scan else {}))
    for number, source in enumerate(recipe.sources):
        lines += writer.source(number, source, recipe.caption)
    fraction = {"fraction": recipe.validation} if recipe.validation or "validation.fraction" in shown else {}
    lines += writer.section("validation", fraction)
    lines += writer.section("prompts", {} if recipe.prompts is None else {"file": recipe.prompts})
    return "\n".join(lines).rstrip("\n") + "\n"


def _masks(recipe: Recipe, shown: Collection[str]) -> dict[str, Any]:
    keys = {"from": (recipe.mask, "auto"), "resize": (recipe.mask_resize, "allow"),
            "missing": (recipe.missing_mask, "none")}
    return {key: value for key, (value, usual) in keys.items() if value != usual or f"mask.{key}" in shown}


def _references(recipe: Recipe, shown: Collection[str]) -> dict[str, Any]:
    keys = {"from": (recipe.references, None), "missing": (recipe.missing_reference, "reject"),
            "fit": (recipe.reference_fit, "family"), "resolution": (recipe.reference_resolution, 0)}
    return {key: value for key, (value, usual) in keys.items()
            if value != usual or (value is not None and f"references.{key}" in shown)}


def _changed(record: Any, shown: Collection[str], section: str) -> dict[str, Any]:
    """The fields of a record that differ from their defaults, or are in `shown`."""
    default = type(record)()
    return {field.name: getattr(record, field.name) for field in fields(record)
            if getattr(record, field.name) != getattr(default, field.name) or f"{section}.{field.name}" in shown}


@dataclass(frozen=True, kw_only=True, slots=True)
class _RecipeWriter:
    base: Path
    remarks: Sequence[Comment]
    shown: Collection[str]

    def section(self, name: str, keys: Mapping[str, Any]) -> Iterator[str]:
        """A section with its comments; nothing if it has neither keys nor comments."""
        if not keys and not any(remark.at == name or remark.at.startswith(f"{name}.") for remark in self.remarks):
            return
        yield f"[{name}]"
        yield from self._body(name, keys)

    def source(self, number: int, source: Source, caption: CaptionOptions) -> Iterator[str]:
        """One `[[source]]`, with those keys of its `[caption]` that differ from the recipe's `caption`."""
        keys = {field.name: getattr(source, field.name) for field in fields(source)}
        default = {field.name: field.default for field in fields(source)}
        here = f"source[{number}]"
        values = {name: value for name, value in keys.items() if name == "path" or value != default[name]
                  or f"{here}.{name}" in self.shown}
        if source.caption is not None:
            values["caption"] = {field.name: getattr(source.caption, field.name) for field in fields(caption)
                                 if getattr(source.caption, field.name) != getattr(caption, field.name)}
        yield "[[source]]"
        yield from self._body(here, values)

    def comments(self, at: str) -> Iterator[str]:
        """The remarks for one place as lines."""
        for remark in self.remarks:
            if remark.at == at:
                yield from comment_lines(remark.text)

    def _body(self, name: str, keys: Mapping[str, Any]) -> Iterator[str]:
        yield from self.comments(name)
        kind = name.partition("[")[0]
        known = {f"{name}.{key}" for key in keys}
        for key, value in keys.items():
            yield from self.comments(f"{name}.{key}")
            line = f"{key} = {self._spelled(value, f'{kind}.{key}')}"
            means = "" if f"{kind}.{key}" == "source.path" else SETTINGS[f"{kind}.{key}"].meaning
            fits = max(len(line), 27) + len(means) < WIDTH
            if not fits:
                yield from comment_lines(means)
            yield f"{line:<27} # {means}" if means and fits else line
        for at in dict.fromkeys(remark.at for remark in self.remarks if remark.at.startswith(f"{name}.")):
            if at not in known:
                yield from self.comments(at)
        yield ""

    def _spelled(self, value: Any, key: str) -> str:
        if isinstance(value, Path):
            text = relative_to(value, self.base)
            return quoted(f"./{text}" if key.startswith(("mask.", "source.mask")) and text in MASKS else text)
        if key in ("model.path", "embed.model") and value:
            return quoted(moved(value, lambda path: relative_to(path, self.base)))
        if isinstance(value, str):
            return quoted(value)
        if isinstance(value, bool):
            return "true" if value else "false"
        if isinstance(value, tuple | list):
            return f"[{', '.join(self._spelled(item, key) for item in value)}]"
        if isinstance(value, dict):
            inner = (f"{name} = {self._spelled(item, f'{key}.{name}')}" for name, item in value.items())
            return "{" + ", ".join(inner) + "}"
        return repr(value)  # integers and floats, which TOML spells as Python does


def comment_lines(text: str) -> Iterator[str]:
    """`text` as wrapped comments, with control characters escaped."""
    for line in text.split("\n"):
        yield from textwrap.wrap(printable(line), WIDTH, initial_indent="# ", subsequent_indent="#   ",
                                 break_on_hyphens=False) or ["#"]


def quoted(text: str) -> str:
    """`text` as a TOML string on one line. Raises `PathError` for bytes that are not UTF-8."""
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    if character in ('"', "\\"):
        return f"\\{character}"
    if 0xD800 <= ord(character) < 0xE000:
        raise PathError(f"a name has the byte {ord(character) & 0xff:02x}, which is not UTF-8, so a recipe cannot "
                        "contain it", hint="rename the file or directory")
    if character.isprintable():
        return character
    return f"\\u{ord(character):04x}" if ord(character) < 0x10000 else f"\\U{ord(character):08x}"


def relative_to(path: Path, base: Path) -> str:
    """`path` relative to `base`, for a recipe there; absolute if the two have only the root in common."""
    if path.is_relative_to(base):
        return path.relative_to(base).as_posix()
    here, target = os.path.realpath(base), os.path.abspath(path)  # noqa: PTH100  # keep links in the path
    try:
        shared = os.path.commonpath([here, target])
    except ValueError:  # other drives
        return Path(target).as_posix()
    if len(Path(shared).parts) < 2:
        return Path(target).as_posix()
    return Path(os.path.relpath(target, here)).as_posix()
