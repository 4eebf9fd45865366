"""The recipe keys that are also command options, in one table.

The commands' signatures and help, the values that override the recipe, the options that a manifest records, and the
documentation all come from `RECIPE_OPTIONS`. This module imports nothing heavy, so that `--help` is fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.captions.options import CaptionOptions
from prep.errors import UsageError
from prep.fs.place import Place, place_of
from prep.recipe.checks import path_check
from prep.recipe.schema import Recipe, setting_of


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeOption:
    """A setting of a recipe as a command option; its help, type and choices are those of the setting."""

    key: str  # in the recipe, with its section: image.min_bucket
    flag: str
    aliases: tuple[str, ...] = ()  # of the flag
    more: str = ""  # help that the setting's own does not give
    parse: Callable[[Any], Any] | None = None  # command-line text to recipe value

    @property
    def help(self) -> str:
        """The setting's help, and more help on the option."""
        return self.more if self.key == SOURCES else setting_of(self.key).spec.meaning + self.more

    @property
    def choices(self) -> tuple[str, ...]:
        """The accepted words."""
        return () if self.key == SOURCES else setting_of(self.key).spec.choices

    @property
    def other(self) -> str:
        """The other values that the option accepts, as help shows them: NUMBER."""
        return "" if self.key == SOURCES else setting_of(self.key).spec.other

    @property
    def kind(self) -> type:
        """The type of the value on the command line."""
        if self.key == "references":
            return list[Path]
        if self.parse is not None or self.key == "mask":
            return str
        row = setting_of(self.key)
        return Path if row.spec.check is path_check else type(row.default)

    @property
    def name(self) -> str:
        """The parameter's name: min_bucket of --min-bucket."""
        return self.flag.removeprefix("--").replace("-", "_")


def _resolution(text: str) -> int | tuple[int, ...]:
    """Parses 512 or 512,1024; several are ascending and without duplicates. Raises `UsageError`."""
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise UsageError(f"--resolution is '{text}', expected pixels like 512, or several like 512,1024")
    sides = sorted({int(part) for part in text.split(",")})
    return sides[0] if len(sides) == 1 else tuple(sides)


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def _folders(places: Sequence[Place]) -> tuple[Place, ...]:
    return () if [str(place) for place in places] == ["none"] else tuple(map(place_of, places))


def _upscale(text: str) -> str | float:
    """A policy, or a number."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else text


SOURCES = "sources"  # no setting of the file: it enables some of its [[source]]s
# In the order in which manifests record them.
RECIPE_OPTIONS: tuple[RecipeOption, ...] = (
    RecipeOption(key="model.path", flag="--model"),
    RecipeOption(key="model.dtype", flag="--dtype"),
    RecipeOption(key="model.compute", flag="--compute", aliases=("--compute-dtype",)),
    RecipeOption(key="model.max_length", flag="--max-length"),
    RecipeOption(key="model.clip_skip", flag="--clip-skip"),
    RecipeOption(key="model.text_windows", flag="--text-windows"),
    RecipeOption(key="model.text_quantization", flag="--text-quantization"),
    RecipeOption(key="model.posterior", flag="--posterior"),
    RecipeOption(key="model.tile", flag="--tile"),
    RecipeOption(key="image.resolution", flag="--resolution", parse=_resolution),
    RecipeOption(key="image.step", flag="--step"),
    RecipeOption(key="image.buckets", flag="--buckets"),
    RecipeOption(key="image.sizes", flag="--sizes", parse=_words),
    RecipeOption(key="image.crop", flag="--crop"),
    RecipeOption(key="image.views", flag="--views"),
    RecipeOption(key="image.flip", flag="--flip"),
    RecipeOption(key="image.min_bucket", flag="--min-bucket"),
    RecipeOption(key="image.upscale", flag="--upscale", parse=_upscale),
    RecipeOption(key="image.alpha", flag="--alpha"),
    RecipeOption(key="caption.missing", flag="--missing-caption"),
    RecipeOption(key="mask", flag="--mask"),
    RecipeOption(key="missing_mask", flag="--missing-mask"),
    RecipeOption(key="references", flag="--references", parse=_folders, more="; repeatable, or none"),
    RecipeOption(key="missing_reference", flag="--missing-reference"),
    RecipeOption(key="reference_fit", flag="--reference-fit"),
    RecipeOption(key="reference_resolution", flag="--reference-resolution"),
    RecipeOption(key="embed", flag="--embed"),
    RecipeOption(key="edits", flag="--edits", more=", or none"),
    RecipeOption(key="validation", flag="--validation"),
    RecipeOption(key="prompts", flag="--prompts", more="; none: without those of the manifest that is replaced"),
    RecipeOption(key=SOURCES, flag="--sources", parse=_words,
                 more="which sources of the recipe to use, by their paths or the last part of them (default: all but "
                 "those with enabled = false)"),
)

BY_NAME: Mapping[str, RecipeOption] = {option.name: option for option in RECIPE_OPTIONS}
FLAGS: Mapping[str, str] = {option.key: option.flag for option in RECIPE_OPTIONS}


def overriding(values: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe values by key from values as a script has them: lists, numbers and paths as the options' texts.

    Raises `UsageError` for a key that is no option.
    """
    options = {option.key: option for option in RECIPE_OPTIONS}
    for key in values:
        if key not in options:
            raise UsageError(f"'{key}' is no setting that overrides a recipe, expected one of: {', '.join(options)}",
                             hint="put it into the recipe's file")
    return {key: _parsed(options[key], _given(value, options[key].kind)) for key, value in values.items()
            if value is not None}


def _given(value: Any, kind: type) -> Any:
    if kind is Path:
        return Path(value)
    if kind == list[Path]:
        return [value] if isinstance(value, str | Path) else list(value)
    return value if kind is not str else ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def given_by(words: Sequence[str | Place]) -> dict[str, Any]:
    """The command-line values, by parameter name, of options as a manifest records them: flags and values in turn.

    Raises `UsageError` for an option of another version.
    """
    flags = {option.flag: option for option in RECIPE_OPTIONS}
    values: dict[str, Any] = {}
    for flag, value in zip(words[::2], words[1::2], strict=False):
        if flag not in flags:
            raise UsageError(f"the manifest was encoded with {flag}, which is no option of this version",
                             hint="encode it again, or name its recipe")
        option = flags[str(flag)]
        if option.kind == list[Path]:
            values.setdefault(option.name, []).append(value)
            continue
        values[option.name] = option.kind(str(value)) if option.kind in (int, float, Path) else str(value)
    return values


def choices_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Maps values by parameter name to values by recipe key; None means not given. Raises `UsageError`."""
    return {BY_NAME[name].key: None if value in (None, []) else _parsed(BY_NAME[name], value)
            for name, value in values.items()}


def _parsed(option: RecipeOption, value: Any) -> Any:
    return value if option.parse is None else option.parse(value)


def without_caption_stop(recipe: Recipe) -> Recipe:
    """The recipe for a preview: instead of stopping at missing captions, it takes them as empty."""
    sources = tuple(source if source.caption is None else replace(source, caption=_unstopped(source.caption))
                    for source in recipe.sources)
    return replace(recipe, caption=_unstopped(recipe.caption), sources=sources)


def _unstopped(caption: CaptionOptions) -> CaptionOptions:
    return replace(caption, missing="empty") if caption.missing == "stop" else caption
