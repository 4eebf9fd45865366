"""Reads a recipe, which decides the value of every row, from `dataset.toml`, command options, or both.

Paths in a recipe are relative to its file; paths on the command line are relative to the current directory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.captions.options import CaptionOptions
from prep.errors import ConfigError, PathError
from prep.formatting import shell_name
from prep.fs.paths import check_directory
from prep.fs.place import Place, place_below, require_local
from prep.fs.text import parse_toml, read_text
from prep.models.named import beside
from prep.parse import Unparsed, brief, expect, list_of
from prep.recipe.checks import path_check
from prep.recipe.edits import NONE, with_usual_edits
from prep.recipe.elsewhere import check_keys
from prep.recipe.options import FLAGS, SOURCES
from prep.recipe.schema import MASKS, OWN, SECTIONS, SETTINGS, ModelOptions, Recipe, Source, setting_of
from prep.recipe.validate import validate_recipe
from prep.setting import rows_of
from prep.sources.item import MaskFrom
from prep.sources.tar_paths import HINT
from prep.sources.walk import is_tars, places_of

_STORED = 'the sources that it names may be in a store: path = "s3://bucket/photos"'

def load_recipe(source: Place, *, choices: Mapping[str, Any]) -> Recipe:
    """The recipe of the directory or `.toml` at `source`, overridden by the command's `choices`.

    `choices` maps keys like "image.resolution" to values; `None` means not given.
    Raises `ConfigError` (exit 3) for bad keys and values, `PathError` (exit 5) for a missing source.
    """
    values = {name: value for name, value in choices.items() if value is not None}
    try:
        recipe = (_read(require_local(source, "recipe", _STORED)) if source.suffix == ".toml" else
                  Recipe(sources=(Source(path=_existing(source)),)))
        resolved = _overridden(recipe, values)
        if resolved.edits == NONE:
            resolved = replace(resolved, edits=None)
        elif not resolved.edits:
            resolved = with_usual_edits(resolved)
        for role, path in (("edits", resolved.edits), ("prompt file", resolved.prompts)):
            if path is not None and path != NONE:
                require_local(path, role)
        if resolved.edits is not None and not resolved.edits.is_dir():
            raise PathError(f"edits {resolved.edits} is not a directory",
                            hint=f"mkdir -p {shell_name(str(resolved.edits))}, or leave --edits and [edits] out")
        return _settle_beside_alpha(resolved)
    except Unparsed as error:
        where = f"{source}: " if source.suffix == ".toml" else ""
        raise ConfigError(f"{where}{error}") from None


def _overridden(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The valid recipe with these `values`. Raises `ConfigError` for a value of an option, `Unparsed` for others."""
    try:
        return validate_recipe(_enabled(replace(_override(recipe, values), options=_options(recipe, values))))
    except Unparsed as error:
        flags = [flag for name, flag in FLAGS.items() if name in values
                 and str(error).startswith(f"{name if name == SOURCES else setting_of(name).name} is ")]
        if not flags:
            raise
        raise ConfigError(f"{flags[0]}: {error}") from None


def _existing(source: Place) -> Place:
    """The source itself. Raises `PathError` if it is no directory and no tars; whether a prefix in a store has objects
    is seen when they are listed."""
    if is_tars(source):
        places_of(source)
    else:
        check_directory(source, HINT)
    return source


def _read(path: Path) -> Recipe:
    try:
        table = parse_toml(read_text(path), str(path))
    except OSError as error:
        raise PathError(f"cannot read recipe {path}: {error.strerror or error}") from None
    except Unparsed as error:
        raise ConfigError(f"{path}: {error}") from None
    check_keys(table, ("model", "image", "caption", "mask", "references", "embed", "similarity", "edits", "scan",
                       "source", "validation", "prompts", "cache"), "the recipe")
    caption = _record("caption", table, "caption")
    sources = list_of(table.get("source", []), lambda entry, at: _source(entry, at, path.parent, caption), "source")
    if not sources:
        raise Unparsed("the recipe has no [[source]], expected at least one with a path")
    model: ModelOptions = _record("model", table, "model")
    return Recipe(sources=tuple(sources), model=replace(model, path=beside(model.path, path.parent)),
                  image=_record("image", table, "image"), caption=caption, scan=_record("scan", table, "scan"),
                  similarity=_record("similarity", table, "similarity"), file=path, **_own(table, path.parent))


def _own(table: Mapping[str, Any], base: Path) -> dict[str, Any]:
    """The recipe's own fields that the file has: mask, prompts, … Paths are relative to `base`."""
    fields: dict[str, Any] = {}
    for section in dict.fromkeys(row.name.partition(".")[0] for row in OWN.values()):
        keys = {row.name.partition(".")[2]: row for row in OWN.values() if row.name.startswith(f"{section}.")}
        for key, value in _section(table, section, tuple(keys)).items():
            row = keys[key]
            value = row.spec.check(value, row.name)
            if row.field == "mask":
                value = _mask(value, base)
            elif row.field == "embed":
                value = beside(value, base)
            elif row.field == "references":
                value = tuple(place_below(base, folder) for folder in value)
            elif row.spec.check is path_check:
                value = NONE if value == str(NONE) and row.field != "cache" else place_below(base, value)
            fields[row.field] = value
    return fields


def _source(value: Any, where: str, base: Path, caption: CaptionOptions) -> Source:
    table = expect(value, dict, where)
    if "path" not in table:
        raise Unparsed(f"{where} has no 'path'")
    check_keys(table, ("path", *(row.field for row in rows_of(Source))), f"[{where}]")
    values = _checked("source", {name: value for name, value in table.items() if name != "path"}, where)
    if "table" in values:
        values["table"] = place_below(base, values["table"])
    if "mask" in values:
        values["mask"] = _mask(values["mask"], base)
    if "references" in values:
        values["references"] = tuple(place_below(base, folder) for folder in values["references"])
    if "caption" in values:
        values["caption"] = _record("caption", {f"{where}.caption": values["caption"]}, f"{where}.caption", caption)
    return Source(path=place_below(base, str(path_check(table["path"], f"{where}.path"))), **values)


def _section(table: Mapping[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    section: dict[str, Any] = expect(table.get(name, {}), dict, f"[{name}]")
    check_keys(section, known, f"[{name}]")
    return section


def _record(section: str, table: Mapping[str, Any], name: str, base: Any = None) -> Any:
    """The record of a section, which `table` has under `name`, over `base` or the defaults."""
    kind = SECTIONS[section]
    values = _checked(section, _section(table, name, tuple(row.field for row in rows_of(kind))), name)
    return kind(**values) if base is None else replace(base, **values)


def _checked(section: str, values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The values of a section's settings, as its record has them."""
    return {key: SETTINGS[f"{section}.{key}"].spec.check(value, f"{where}.{key}") for key, value in values.items()}


def _mask(text: str | Place, base: Path) -> MaskFrom:
    return text if isinstance(text, Place) or text in MASKS else place_below(base, text)  # type: ignore[return-value]  # one of MASKS


def _settle_beside_alpha(recipe: Recipe) -> Recipe:
    """Turns "auto" masks into "none" if some source takes masks from alpha: a recipe has one kind of mask."""
    alpha = any(recipe.mask_of(number) == "alpha" for number in range(len(recipe.sources)))
    return recipe.settle_masks(exist=False) if alpha else recipe


def _override(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    for name, value in values.items():
        if name == SOURCES:
            recipe = replace(recipe, sources=_chosen(recipe, value))
            continue
        section, _, key = name.partition(".")
        row = setting_of(name)
        value = row.spec.check(value, row.name)
        if key:
            recipe = replace(recipe, **{section: replace(getattr(recipe, section), **{key: value})})
        else:
            changed: dict[str, Any] = {section: _mask(value, Path()) if section == "mask" else value}
            recipe = replace(recipe, **changed)
    return recipe


def _chosen(recipe: Recipe, names: Sequence[str]) -> tuple[Source, ...]:
    """The sources, with only those of these names enabled: paths, as in the recipe, or the last part of them.

    Raises `Unparsed` for a name of no source, or of several.
    """
    base = Path() if recipe.file is None else recipe.file.parent
    spelled = [str(source.path.relative_to(base) if source.path.is_relative_to(base) else source.path)
               for source in recipe.sources]
    numbers = set()
    for name in names:
        matches = [number for number, source in enumerate(recipe.sources)
                   if name.rstrip("/") in (spelled[number].rstrip("/"), str(source.path), source.path.name)]
        if len(matches) != 1:
            raise Unparsed(f"sources is {brief(name)}, which names {len(matches) or 'none'} of them, expected one of: "
                           f"{', '.join(spelled)}")
        numbers.add(matches[0])
    return tuple(replace(source, enabled=number in numbers) for number, source in enumerate(recipe.sources))


def _enabled(recipe: Recipe) -> Recipe:
    """The recipe with the sources that are used. Raises `Unparsed` if there are none."""
    if not (used := tuple(source for source in recipe.sources if source.enabled)):
        raise Unparsed("no [[source]] is used: each has enabled = false")
    return replace(recipe, sources=used, unused=(*recipe.unused, *(source.path for source in recipe.sources
                                                                   if not source.enabled)))


def _options(base: Recipe, values: Mapping[str, Any]) -> tuple[str | Place, ...]:
    """The options that turn `base` into what was `values`, so that messages can show the command."""
    changed = _override(base, values)
    words: list[str | Place] = []
    for name, flag in FLAGS.items():
        value = _at(changed, name)
        if value == _at(base, name):
            continue
        value = Path(value) if name in ("model.path", "embed") and Path(value).exists() else value
        value = values[name] if name == "sources" else value
        several = value if name == "references" and isinstance(value, tuple) else (value,)
        for one in several or (NONE,):
            spelled = ",".join(map(str, one)) if isinstance(one, tuple) else str(one)
            words += [flag, one if isinstance(one, Place) and one != NONE else spelled]
    return tuple(words)


def _at(recipe: Recipe, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(recipe, section), key) if key else getattr(recipe, section)
