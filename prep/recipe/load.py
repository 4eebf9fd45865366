"""Reads a recipe, which decides the value of every row, from `dataset.toml`, command options, or both.

Paths in a recipe are relative to its file; paths on the command line are relative to the current directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, TypeVar

from prep.captions.options import CaptionOptions
from prep.errors import ConfigError, PathError
from prep.findings import SEVERITIES, ScanOptions, parse_code
from prep.formatting import shell_name
from prep.fs.mirror import check_here, is_url, shown, split_url
from prep.fs.text import parse_toml, read_text
from prep.parse import Unparsed, brief, expect, known_keys, list_of, one_of
from prep.recipe.edits import NONE, with_usual_edits
from prep.recipe.elsewhere import check_keys
from prep.recipe.options import FLAGS
from prep.recipe.schema import MASK_RESIZE, MASKS, ImageOptions, ModelOptions, Recipe, Source
from prep.recipe.validate import upscale, validate_recipe
from prep.sources.globs import chosen_by
from prep.sources.item import MaskFrom
from prep.sources.tar_paths import HINT, tars_of
from prep.sources.walk import is_tars

T = TypeVar("T")
_IN_FILE = {"mask": "mask.from", "validation": "validation.fraction"}  # what messages call these keys


def load_recipe(source: Path, *, choices: Mapping[str, Any]) -> Recipe:
    """The recipe of the directory or `.toml` at `source`, overridden by the command's `choices`.

    `choices` maps keys like "image.resolution" to values; `None` means not given.
    Raises `ConfigError` (exit 3) for bad keys and values, `PathError` (exit 5) for a missing source.
    """
    given = {name: value for name, value in choices.items() if value is not None}
    try:
        if source.suffix == ".toml" and is_url(source):
            raise PathError(f"recipe {shown(source)} is in an object store, expected a file on this computer",
                            hint='the sources that it names may be in a store: path = "s3://bucket/photos"')
        recipe = _read(source) if source.suffix == ".toml" else Recipe(sources=(Source(path=_existing(source)),))
        found = _overridden(recipe, given)
        found = replace(found, edits=None) if found.edits == NONE else found if found.edits else with_usual_edits(found)
        for role, path in (("edits", found.edits), ("prompt file", found.prompts)):
            if path is not None and path != NONE:
                check_here(path, role)
        if found.edits is not None and not found.edits.is_dir():
            raise PathError(f"edits {found.edits} is not a directory",
                            hint=f"mkdir -p {shell_name(str(found.edits))}, or leave --edits and [edits] out")
        return _settle_beside_alpha(found)
    except Unparsed as error:
        where = f"{source}: " if source.suffix == ".toml" else ""
        raise ConfigError(f"{where}{error}") from None


def assumed_recipe(family: str, resolution: int, *, choices: Mapping[str, Any]) -> Recipe:
    """The recipe of pictures that are not there yet, for a plan: the defaults for `family` at `resolution`, with no
    picture too small, overridden by the command's `choices`. Raises `ConfigError`.
    """
    recipe = Recipe(sources=(Source(path=Path("pictures")),), model=ModelOptions(family=family),
                    image=ImageOptions(resolution=resolution, upscale="allow"))
    try:
        found = _overridden(recipe, {name: value for name, value in choices.items() if value is not None})
    except Unparsed as error:
        raise ConfigError(str(error)) from None
    return found.settle_masks(found=False)


def _overridden(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    """The valid recipe with what was `given`. Raises `ConfigError` for a value of an option, `Unparsed` for others."""
    try:
        return validate_recipe(_enabled(replace(_override(recipe, given), options=_options(recipe, given))))
    except Unparsed as error:
        flags = [flag for name, flag in FLAGS.items() if name in given
                 and str(error).startswith(f"{_IN_FILE.get(name, name)} is ")]
        if not flags:
            raise
        raise ConfigError(f"{flags[0]}: {error}") from None


def _existing(source: Path) -> Path:
    """The source itself. Raises `PathError` if it is no directory and no tars; whether a prefix in a store has objects
    is seen when they are listed."""
    if is_url(source):
        split_url(source)
    elif is_tars(source):
        tars_of(source)
    elif not source.exists():
        raise PathError(f"source {source} does not exist", hint=HINT)
    elif not source.is_dir():
        raise PathError(f"source {source} is not a directory", hint=HINT)
    return source


def _read(path: Path) -> Recipe:
    try:
        table = parse_toml(read_text(path), str(path))
    except OSError as error:
        raise PathError(f"cannot read recipe {path}: {error.strerror or error}") from None
    except Unparsed as error:
        raise ConfigError(f"{path}: {error}") from None
    check_keys(table, ("model", "image", "caption", "mask", "edits", "scan", "source", "validation", "prompts",
                       "cache"), "the recipe")
    caption = _record(CaptionOptions, table, "caption")
    sources = list_of(table.get("source", []), lambda one, at: _source(one, at, path.parent, caption), "source")
    if not sources:
        raise Unparsed("the recipe has no [[source]], expected at least one with a path")
    masks = _section(table, "mask", ("from", "resize"))
    fraction = _section(table, "validation", ("fraction",)).get("fraction", 0.0)
    prompts = _section(table, "prompts", ("file",)).get("file")
    edits = _section(table, "edits", ("from",)).get("from")
    cache = _section(table, "cache", ("path",)).get("path")
    return Recipe(
        sources=tuple(sources),
        model=_model(_record(ModelOptions, table, "model"), path.parent),
        image=_record(ImageOptions, table, "image"),
        caption=caption,
        mask=_mask(expect(masks.get("from", "auto"), str, "mask.from"), path.parent),
        mask_resize=one_of(masks.get("resize", "allow"), MASK_RESIZE, "mask.resize"),
        edits=None if edits is None else NONE if edits == str(NONE) else _path(edits, "edits.from", path.parent),
        scan=scan_choice(table.get("scan", {})),
        validation=expect(fraction, float, "validation.fraction"),
        prompts=None if prompts is None else NONE if prompts == str(NONE) else _path(prompts, "prompts.file",
                                                                                     path.parent),
        cache=None if cache is None else _path(cache, "cache.path", path.parent),
        file=path,
    )


def _source(value: Any, where: str, base: Path, caption: CaptionOptions) -> Source:
    table = expect(value, dict, where)
    if "path" not in table:
        raise Unparsed(f"{where} has no 'path'")
    apart = {"path", "mask", "caption", "include", "exclude", "table"}
    plain = {name: read for name, read in _readers(Source).items() if name not in apart}
    check_keys(table, (*apart, *plain), f"[{where}]")
    own = table.get("caption")
    mask, captions = table.get("mask"), table.get("table")
    return Source(
        path=_path(table["path"], f"{where}.path", base),
        include=_globs(table, "include", where), exclude=_globs(table, "exclude", where),
        table=None if captions is None else _path(captions, f"{where}.table", base),
        mask=None if mask is None else _mask(expect(mask, str, f"{where}.mask"), base),
        caption=None if own is None
        else _record(CaptionOptions, {f"{where}.caption": own}, f"{where}.caption", caption),
        **{name: read(table[name], f"{where}.{name}") for name, read in plain.items() if name in table},
    )


def _path(value: Any, where: str, base: Path) -> Path:
    text = expect(value, str, where)
    if "\0" in text:
        raise Unparsed(f"{where} is {brief(text)}, expected a path without NUL")
    return _below(base, text)


def _below(base: Path, text: str) -> Path:
    """A path relative to `base`, or a URL."""
    if not is_url(text):
        return base / text
    split_url(text)
    return Path(text)


def _globs(table: Mapping[str, Any], name: str, where: str) -> tuple[str, ...]:
    found = _texts(table.get(name, []), f"{where}.{name}")
    if bad := [one for one in found if not one or one.startswith("/") or ".." in one.split("/")]:
        raise Unparsed(f"{where}.{name} has {bad[0]!r}, expected a glob of names below the source, like 'cats/**'")
    try:
        chosen_by(found, ())
    except Unparsed as error:
        raise Unparsed(f"{where}.{name}: {error}") from None
    return found


def _section(table: Mapping[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    section: dict[str, Any] = expect(table.get(name, {}), dict, f"[{name}]")
    check_keys(section, known, f"[{name}]")
    return section


def _record(kind: type[T], table: Mapping[str, Any], name: str, base: T | None = None) -> T:
    """A `kind` from the table's section, over `base` or the defaults; each value must have its field's type."""
    readers = _readers(kind)
    section = _section(table, name, tuple(readers))
    given = {key: readers[key](value, f"{name}.{key}") for key, value in section.items()}
    return kind(**given) if base is None else replace(base, **given)  # type: ignore[type-var]  # a dataclass


def _readers(kind: type) -> dict[str, Callable[[Any, str], Any]]:
    return {one.name: _READ[str(one.type)] for one in fields(kind) if str(one.type) in _READ}


def _texts(value: Any, where: str) -> tuple[str, ...]:
    return tuple(list_of(value, lambda one, at: expect(one, str, at), where))


def resolutions(value: Any, where: str) -> int | tuple[int, ...]:
    """A whole number, or several, ascending and without duplicates. Raises `Unparsed`."""
    if not isinstance(value, list):
        return expect(value, int, where)
    found = sorted(set(list_of(value, lambda one, at: expect(one, int, at), where)))
    if not found:
        raise Unparsed(f"{where} is [], expected a whole number of pixels, or several")
    return found[0] if len(found) == 1 else tuple(found)


# Parsers of values, by the annotation of the field.
_READ: Mapping[str, Callable[[Any, str], Any]] = {
    "str": lambda value, where: expect(value, str, where), "Role": lambda value, where: expect(value, str, where),
    "int": lambda value, where: expect(value, int, where), "float": lambda value, where: expect(value, float, where),
    "bool": lambda value, where: expect(value, bool, where),
    "Path": lambda value, where: Path(expect(value, str, where)),
    "tuple[str, ...]": _texts, "int | tuple[int, ...]": resolutions, "str | float": upscale,
}


def _model(model: ModelOptions, base: Path) -> ModelOptions:
    """Resolves a path that exists relative to the recipe; anything else may be a Hub id."""
    local = base / model.path
    return replace(model, path=str(local)) if model.path and local.exists() else model


def _mask(text: str, base: Path) -> MaskFrom:
    return text if text in MASKS else _below(base, text)  # type: ignore[return-value]  # one of MASKS


def _settle_beside_alpha(recipe: Recipe) -> Recipe:
    """Turns "auto" masks into "none" if some source takes masks from alpha: a recipe has one kind of mask."""
    alpha = any(recipe.mask_of(number) == "alpha" for number in range(len(recipe.sources)))
    return recipe.settle_masks(found=False) if alpha else recipe


def _override(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    for name, value in given.items():
        section, _, key = name.partition(".")
        if key:
            recipe = replace(recipe, **{section: replace(getattr(recipe, section), **{key: value})})
        elif section == "mask":
            recipe = replace(recipe, mask=_mask(value, Path()))
        elif section == "sources":
            recipe = replace(recipe, sources=_chosen(recipe, value))
        else:
            recipe = replace(recipe, **{section: value})
    return recipe


def _chosen(recipe: Recipe, names: Sequence[str]) -> tuple[Source, ...]:
    """The sources, of which those with these names are enabled: paths, as in the recipe, or the last part of them.

    Raises `Unparsed` for a name of no source, or of several.
    """
    base = Path() if recipe.file is None else recipe.file.parent
    spelled = [shown(one.path.relative_to(base) if one.path.is_relative_to(base) else one.path)
               for one in recipe.sources]
    numbers = set()
    for name in names:
        found = [number for number, one in enumerate(recipe.sources)
                 if name.rstrip("/") in (spelled[number].rstrip("/"), shown(one.path), one.path.name)]
        if len(found) != 1:
            raise Unparsed(f"sources is {brief(name)}, which names {len(found) or 'none'} of them, expected one of: "
                           f"{', '.join(spelled)}")
        numbers.add(found[0])
    return tuple(replace(one, enabled=number in numbers) for number, one in enumerate(recipe.sources))


def _enabled(recipe: Recipe) -> Recipe:
    """The recipe with the sources that are used. Raises `Unparsed` if there are none."""
    if not (used := tuple(one for one in recipe.sources if one.enabled)):
        raise Unparsed("no [[source]] is used: each has enabled = false")
    return replace(recipe, sources=used, unused=(*recipe.unused, *(one.path for one in recipe.sources
                                                                   if not one.enabled)))


def _options(base: Recipe, given: Mapping[str, Any]) -> tuple[str | Path, ...]:
    """The options that turn `base` into what was `given`, so that messages can show the command."""
    changed = _override(base, given)
    words: list[str | Path] = []
    for name, flag in FLAGS.items():
        value = _at(changed, name)
        if value == _at(base, name):
            continue
        is_path = (isinstance(value, Path) and value != NONE) or (name == "model.path" and Path(value).is_dir())
        value = given[name] if name == "sources" else value
        spelled = ",".join(map(str, value)) if isinstance(value, tuple) else str(value)
        words += [flag, Path(value) if is_path else spelled]
    return tuple(words)


def _at(recipe: Recipe, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(recipe, section), key) if key else getattr(recipe, section)


def scan_choice(value: Any) -> ScanOptions:
    """The options in a recipe's [scan]. Raises `Unparsed`."""
    table = expect(value, dict, "[scan]")
    known_keys(table, ("ignore", "severity"), "[scan]")
    severity = expect(table.get("severity", {}), dict, "scan.severity")
    return ScanOptions(
        ignore=tuple(list_of(table.get("ignore", []), parse_code, "scan.ignore")),
        severity=tuple((parse_code(code, "scan.severity"), one_of(kind, SEVERITIES, f"scan.severity.{code}"))
                       for code, kind in severity.items()))
