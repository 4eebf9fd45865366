"""Options that several `prep` commands share, and their conversion to a recipe."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from prep.batching import policy
from prep.cli.signature import Command, choice, complete, expand, option_of, parameter
from prep.encode.options import DEVICES, EncodeOptions
from prep.encode.options import JOBS as JOBS
from prep.errors import UsageError
from prep.fs.place import Place, place_of
from prep.recipe.options import BY_NAME, RECIPE_OPTIONS, RecipeOption, choices_of
from prep.setting import rows_of

if TYPE_CHECKING:
    from prep.recipe.schema import Recipe

UNDERFILL = get_args(policy.Underfill)

SourceArg = Annotated[Path, typer.Argument(
    metavar="SOURCE", help="a directory of pictures, here or in a store (s3://bucket/photos), a .tar (braces and globs "
    "allowed), or a recipe .toml", show_default=False)]
ManifestArg = Annotated[Path, typer.Argument(metavar="MANIFEST", help="a manifest.json, here or in an object store: "
                                             "s3://bucket/dataset/manifest.json", show_default=False)]
CacheArg = Annotated[Path, typer.Argument(metavar="CACHE", help="a cache: a directory or a URL", show_default=False)]
Output = Annotated[Path, typer.Option("-o", "--output", help="the manifest to write: a file or a URL")]
Device = Annotated[str, choice(help="where models run", words=DEVICES, other="cuda:N")]
Underfill = Annotated[str, choice(help="what to do with a bucket's last micro-batch if it is short", words=UNDERFILL)]
_OF_ENCODE = {row.field: row for row in rows_of(EncodeOptions)}
Download = Annotated[bool, option_of(_OF_ENCODE["download"])]
Jobs = Annotated[int, option_of(_OF_ENCODE["jobs"])]
Rehash = Annotated[bool, option_of(_OF_ENCODE["rehash"])]
Strict = Annotated[bool, typer.Option("--strict", help="exit with 1 if pictures are skipped")]
Every = Annotated[bool, typer.Option("--all", help="list all findings and names, not only the first, with a count")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress and no notices")]
Given = Mapping[str, Any]  # values of recipe options by parameter name; None: not given


def with_recipe_options(*, without: Collection[str] = ()) -> Callable[[Command], Command]:
    """A decorator that replaces a command's parameter `given` by all recipe options except those in `without`."""
    shown = [option for option in RECIPE_OPTIONS if option.name not in without]
    parameters = [parameter(option.name, Annotated[option.kind | None, _option(option)], None) for option in shown]
    return lambda command: expand(command, "given", parameters)


def _option(option: RecipeOption) -> Any:
    flags = (option.flag, *option.aliases)
    if option.choices:
        return choice(*flags, help=option.help, words=option.choices, other=option.other)
    return typer.Option(*flags, help=option.help, metavar="DIR" if option.kind == list[Path] else None)


Sources = Annotated[str | None, _option(BY_NAME["sources"])]
References = Annotated[list[Path] | None, _option(BY_NAME["references"])]
MissingMask = Annotated[str | None, _option(BY_NAME["missing_mask"])]
MissingReference = Annotated[str | None, _option(BY_NAME["missing_reference"])]


CacheOrNone = Annotated[Path | None, typer.Option(
    "--cache", help="the cache, created if missing: a directory, or a URL like s3://bucket/cache (default: that of the "
    "recipe's [cache], or cache beside the recipe)", show_default=False)]


MovedCache = Annotated[Path | None, typer.Option(
    "--cache", help="where the cache is, if it has moved (default: as the manifest says)", show_default=False)]


def cache_of(cache: Path | None, recipe: Recipe) -> Place:
    """The cache that is named, or else that of the recipe. Raises `UsageError` if neither is."""
    if cache is not None:
        return place_of(cache)
    named = recipe.cache or (None if recipe.file is None else recipe.file.parent / "cache")
    if named is None:
        raise UsageError("--cache is missing: where should the encoded data go?", hint="add --cache cache, or name a "
                         "recipe: prep init SOURCE writes one")
    return named


def codes_option(*flags: str, help: str) -> Any:  # noqa: A002
    """An option that takes a finding's code, and completes it."""
    def completed(incomplete: str) -> Any:
        from prep.findings import CODES

        return complete({code: facts[1] for code, facts in CODES.items()})(incomplete)

    return typer.Option(*flags, help=help, metavar="CODE", autocompletion=completed)


ENGINES = ("local", "ray")
Address = Annotated[str | None, typer.Option(
    metavar="ADDRESS", help="with --engine ray: the cluster, as HOST:PORT or auto; without, one is started on this "
    "machine", show_default=False)]


def is_ray(engine: str, options: Mapping[str, object]) -> bool:
    """Whether --engine is ray. Raises `UsageError` for another word, and for `options` that are given without it."""
    if engine not in ENGINES:
        raise UsageError(f"--engine is '{engine}', expected {' or '.join(ENGINES)}")
    for flag, value in options.items():
        if engine != "ray" and value is not None:
            raise UsageError(f"{flag} is given without --engine ray, expected both", hint="add --engine ray")
    return engine == "ray"


def seconds_of(text: str, option: str) -> float:
    """The seconds of a time like 0, 90s, 30m, 12h or 7d. Raises `UsageError`."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if not match or (not match[2] and int(match[1])):
        raise UsageError(f"{option} is '{text}', expected 0, or a whole number with s, m, h or d: 30m, 12h, 7d")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]


def recipe_from_options(source: Place, **values: Any) -> Recipe:
    """The recipe of SOURCE, overridden by the command's options (by parameter name). Raises `ConfigError`, `PathError`.
    """
    from prep.recipe.load import load_recipe  # here: --help needs no TOML and no sources

    return load_recipe(place_of(source), choices=choices_of(values))


def recipe_to_edit(source: Place, values: Given, *, sidecars: bool) -> tuple[Recipe, Path | None]:
    """As `recipe_from_options`, and the directory that captions and masks are written to: that of --edits, which need
    not exist, or the usual one of SOURCE; `None` with --sidecars: beside the pictures. Raises `UsageError`, too."""
    from prep.dataset.edits.places import check_folder, folder_of
    from prep.fs.paths import resolve
    from prep.recipe.edits import NONE

    named = values["edits"]
    recipe = recipe_from_options(source, **{**values, "edits": None if named is None else NONE})
    if sidecars:
        hidden = recipe.edits if named in (None, NONE) else named
        if hidden is not None:
            raise UsageError("--sidecars is given beside a directory of edits, which would hide what is written",
                             hint=f"leave --sidecars out, or the edits of {hidden}: --edits none")
        return recipe, None
    if named == NONE:
        raise UsageError("--edits is none, expected a directory to write to",
                         hint="leave --edits out, or add --sidecars: edits are then written beside the pictures")
    folder = resolve(named or recipe.edits or folder_of(place_of(source)))
    check_folder(recipe, folder)
    return replace(recipe, edits=folder, notes=()), folder


def recorder_of(recipe: Recipe, folder: Path | None) -> Callable[[], str]:
    """Notes in the file of a recipe, if it has one, that edits are in `folder`, and says so."""
    from prep.dataset.edits.record import Recorder

    return str if folder is None or recipe.file is None else Recorder(recipe.file, folder)


def quiet_pillow() -> None:
    from prep.images.decode import quiet_pillow

    quiet_pillow()
