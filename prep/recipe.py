"""The recipe: everything that decides the value of a row, from `dataset.toml`, from command options, or both.

Paths in a recipe are relative to the recipe's file; paths on the command line to the current directory.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

from prep.errors import ConfigError, PathError
from prep.models.family import FAMILIES
from prep.parse import Unparsed, colour_of, expect, known_keys, list_of, one_of, within
from prep.records import Role
from prep.sources.walk import HINT, is_tars, tars_of

MISSING_CAPTION = ("stop", "reject", "empty", "filename", "constant")
STORED_DTYPES = ("bfloat16", "float16", "float32")
MaskFrom = Literal["none", "sidecar", "alpha"] | Path
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Where pictures come from, and what they are for."""

    path: Path
    repeats: int = 1  # times an epoch shows each of its samples
    role: Role = "train"
    weight: float = 1.0  # of its samples' loss


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelChoice:
    """Whose encoders make the rows, and in which numbers."""

    path: str = ""  # a diffusers directory, or a Hub id; "" where none is needed (bucket, masks)
    family: str = ""  # "": inferred from the pipeline's class
    dtype: str = "bfloat16"  # of the stored rows
    compute: str = ""  # of the encoders; "": the same as dtype


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageChoice:
    """How pictures get into buckets."""

    resolution: int = 512  # pixels; the target area is resolution²
    buckets: str = "step"
    step: int = 64  # pixels between bucket sides
    shortest: int = 0  # side of a bucket, in pixels; 0: resolution / 4, but 256 where that is at most resolution / 2
    longest: int = 0  # side of a bucket, in pixels; 0: resolution · 2
    min_side: int = 0  # of a picture, in pixels; one with a shorter side is not used; 0: step
    upscale: bool = False  # enlarge small pictures instead of giving them smaller buckets
    alpha: str = "white"  # colour that transparency is flattened onto, or "reject"
    min_bucket: int = 1  # buckets with fewer pictures merge into their nearest neighbour


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionChoice:
    """What happens to a picture without a caption."""

    missing: str = "stop"
    constant: str = ""  # the caption of `missing = "constant"`


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A whole recipe; complete, whatever the file left out."""

    sources: tuple[Source, ...]
    model: ModelChoice = field(default_factory=ModelChoice)
    image: ImageChoice = field(default_factory=ImageChoice)
    caption: CaptionChoice = field(default_factory=CaptionChoice)
    mask: MaskFrom = "none"  # or a directory of masks
    validation: float = 0.0  # fraction of the pictures
    prompts: Path | None = None
    file: Path | None = None  # where it was read from
    options: tuple[str | Path, ...] = ()  # of the command, as far as they change what file or defaults say


def load(source: Path, *, choices: Mapping[str, Any]) -> Recipe:
    """The recipe of the directory or `.toml` at `source`, with the command's own `choices` above it.

    `choices` maps "image.resolution" and the like to values; `None` means not given.
    Raises `ConfigError` (exit 3) for keys and values, `PathError` (exit 5) for a source that is not there.
    """
    given = {name: value for name, value in choices.items() if value is not None}
    try:
        recipe = _read(source) if source.suffix == ".toml" else Recipe(sources=(Source(path=_existing(source)),))
        return _checked(replace(_override(recipe, given), options=_options(recipe, given)))
    except Unparsed as error:
        where = f"{source}: " if source.suffix == ".toml" else ""
        raise ConfigError(f"{where}{error}") from None


def _existing(source: Path) -> Path:
    """The source itself, when it is there. Raises `PathError`."""
    if is_tars(source):
        tars_of(source)
    elif not source.exists():
        raise PathError(f"source {source} does not exist", hint=HINT)
    elif not source.is_dir():
        raise PathError(f"source {source} is not a directory", hint=HINT)
    return source


def _read(path: Path) -> Recipe:
    try:
        table = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise PathError(f"cannot read recipe {path}: {error.strerror or error}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None
    known_keys(table, ("model", "image", "caption", "mask", "source", "validation", "prompts"), "the recipe")
    sources = list_of(table.get("source", []), lambda one, at: _source(one, at, path.parent), "source")
    if not sources:
        raise Unparsed("the recipe has no [[source]], expected at least one with a path")
    mask = _section(table, "mask", ("from",)).get("from", "none")
    fraction = _section(table, "validation", ("fraction",)).get("fraction", 0.0)
    prompts = _section(table, "prompts", ("file",)).get("file")
    return Recipe(
        sources=tuple(sources),
        model=_model(_record(ModelChoice, table, "model"), path.parent),
        image=_record(ImageChoice, table, "image"),
        caption=_record(CaptionChoice, table, "caption"),
        mask=_mask(expect(mask, str, "mask.from"), path.parent),
        validation=expect(fraction, float, "validation.fraction"),
        prompts=None if prompts is None else path.parent / expect(prompts, str, "prompts.file"),
        file=path,
    )


def _source(value: Any, where: str, base: Path) -> Source:
    table = expect(value, dict, where)
    if "path" not in table:
        raise Unparsed(f"{where} has no 'path'")
    plain = _record(Source, {where: {**table, "path": str(expect(table["path"], str, f"{where}.path"))}}, where)
    return replace(plain, path=base / plain.path)


def _section(table: Mapping[str, Any], name: str, known: tuple[str, ...]) -> dict[str, Any]:
    section: dict[str, Any] = expect(table.get(name, {}), dict, f"[{name}]")
    known_keys(section, known, f"[{name}]")
    return section


def _record(kind: type[T], table: Mapping[str, Any], name: str) -> T:
    """A `kind` from the table's section; each value is of its field's type."""
    types = {one.name: _TYPES[str(one.type)] for one in fields(kind)}  # type: ignore[arg-type]
    section = _section(table, name, tuple(types))
    wired: dict[str, Any] = {key: expect(value, _WIRE[types[key]], f"{name}.{key}") for key, value in section.items()}
    return kind(**{key: types[key](value) for key, value in wired.items()})


_TYPES: Mapping[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "Path": Path, "Role": str}
_WIRE: Mapping[type, type] = {str: str, int: int, float: float, bool: bool, Path: str}


def _model(model: ModelChoice, base: Path) -> ModelChoice:
    """A path that exists beside the recipe is one; anything else may be a Hub id."""
    local = base / model.path
    return replace(model, path=str(local)) if model.path and local.exists() else model


def _mask(text: str, base: Path) -> MaskFrom:
    named: dict[str, MaskFrom] = {"none": "none", "sidecar": "sidecar", "alpha": "alpha"}
    return named.get(text) or base / text


def _override(recipe: Recipe, given: Mapping[str, Any]) -> Recipe:
    for name, value in given.items():
        section, _, key = name.partition(".")
        if key:
            recipe = replace(recipe, **{section: replace(getattr(recipe, section), **{key: value})})
        elif section == "mask":
            recipe = replace(recipe, mask=_mask(value, Path()))
        else:
            recipe = replace(recipe, **{section: value})
    return recipe


# The command option of each choice; a pair: when true, when false.
OPTIONS: Mapping[str, str | tuple[str, str]] = {
    "model.path": "--model", "model.dtype": "--dtype", "model.compute": "--compute",
    "image.resolution": "--resolution", "image.step": "--step", "image.buckets": "--buckets",
    "image.min_bucket": "--min-bucket", "image.upscale": ("--upscale", "--no-upscale"), "image.alpha": "--alpha",
    "caption.missing": "--missing-caption", "mask": "--mask", "validation": "--validation", "prompts": "--prompts",
}


def _options(base: Recipe, given: Mapping[str, Any]) -> tuple[str | Path, ...]:
    """The options that lead from `base` to what was `given`, so that the command can be shown again."""
    changed = _override(base, given)
    words: list[str | Path] = []
    for name, option in OPTIONS.items():
        value = _at(changed, name)
        if value == _at(base, name):
            continue
        if isinstance(option, tuple):
            words.append(option[0] if value else option[1])
        else:
            is_path = isinstance(value, Path) or (name == "model.path" and Path(value).is_dir())
            words += [option, Path(value) if is_path else str(value)]
    return tuple(words)


def _at(recipe: Recipe, name: str) -> Any:
    section, _, key = name.partition(".")
    return getattr(getattr(recipe, section), key) if key else getattr(recipe, section)


def _checked(recipe: Recipe) -> Recipe:
    image, model = recipe.image, recipe.model
    one_of(image.buckets, ("step", "ratio", "sdxl-40", "single"), "image.buckets")
    one_of(recipe.caption.missing, MISSING_CAPTION, "caption.missing")
    one_of(model.dtype, STORED_DTYPES, "model.dtype")
    if model.compute:
        one_of(model.compute, STORED_DTYPES, "model.compute")
    if model.family:
        one_of(model.family, FAMILIES, "model.family")
    if image.alpha != "reject":
        colour_of(image.alpha, "image.alpha", also=("reject",))
    within(image.step, 8, 1024, "image.step")
    within(image.resolution, image.step, 16384, "image.resolution")
    within(image.min_bucket, 1, 1 << 30, "image.min_bucket")
    within(recipe.validation, 0, 0.9, "validation.fraction")
    for source in recipe.sources:
        one_of(source.role, ("train", "validation", "prior"), "source.role")
        within(source.repeats, 1, 10000, "source.repeats")
        within(source.weight, 0, 1000, "source.weight")
    if isinstance(recipe.mask, Path) and not recipe.mask.is_dir():
        raise Unparsed(f"mask.from is {str(recipe.mask)!r}, expected none, sidecar, alpha or an existing directory")
    return recipe
