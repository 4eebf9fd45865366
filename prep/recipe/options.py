"""The recipe keys that are also command options, in one table.

The commands' signatures and help, the values that override the recipe, the options that a manifest records, and the
documentation all come from `RECIPE_OPTIONS`. This module imports nothing heavy, so that `--help` is fast.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.buckets.views import FLIPS
from prep.captions.options import MISSING_CAPTION
from prep.errors import UsageError
from prep.recipe.schema import BUCKETS, MASKS, POSTERIORS, QUANTIZATIONS, STORED_DTYPES, UPSCALES


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeOption:
    """A recipe key as a command option."""

    key: str  # in the recipe, with its section: image.min_bucket
    flag: str
    help: str
    kind: type = str  # of the value on the command line
    choices: tuple[str, ...] = ()  # the accepted words
    other: str = ""  # what else it accepts, as help shows it: NUMBER
    aliases: tuple[str, ...] = ()  # of the flag
    parse: Callable[[Any], Any] = lambda value: value  # command-line value to recipe value

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


def _upscale(text: str) -> str | float:
    """A policy, or a number."""
    return float(text) if re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else text


# In the order in which manifests record them.
RECIPE_OPTIONS: tuple[RecipeOption, ...] = (
    RecipeOption(key="model.path", flag="--model", help="a diffusers pipeline directory, or a Hub id"),
    RecipeOption(key="model.dtype", flag="--dtype", choices=STORED_DTYPES, help="dtype of the stored rows"),
    RecipeOption(key="model.compute", flag="--compute", aliases=("--compute-dtype",), choices=STORED_DTYPES,
                 help="dtype in which the encoders compute (default: that of the rows; text of families with T5 or a "
                 "language model: bfloat16)"),
    RecipeOption(key="model.max_length", flag="--max-length", kind=int,
                 help="tokens of a caption, at most; the rest is cut off (default: the model family's)"),
    RecipeOption(key="model.clip_skip", flag="--clip-skip", kind=int,
                 help="skip this many of CLIP's last layers; 1 means the last but one"),
    RecipeOption(key="model.text_windows", flag="--text-windows", kind=int,
                 help="windows of 75 tokens that CLIP reads one after the other, 1 to 3 (SD 1.x, SDXL)"),
    RecipeOption(key="model.text_quantization", flag="--text-quantization", choices=QUANTIZATIONS,
                 help="weights of T5 and language models in 8 or 4 bits, by bitsandbytes: less memory, other rows"),
    RecipeOption(key="model.posterior", flag="--posterior", choices=POSTERIORS,
                 help="what is stored of the VAE's posterior: with mean+std, rows twice as large, training draws new "
                 "latents at each showing"),
    RecipeOption(key="model.tile", flag="--tile", kind=int,
                 help="encode pictures with a side of more pixels than this in overlapping tiles, with less memory; "
                 "a multiple of 128"),
    RecipeOption(key="image.resolution", flag="--resolution", parse=_resolution, help="target side in pixels: bucket "
                 "areas are about its square; with several, like 512,1024, one sample at each"),
    RecipeOption(key="image.step", flag="--step", kind=int, help="pixels between bucket sides (default: 8 x patch size "
                 "of the model family; 64 without a model)"),
    RecipeOption(key="image.buckets", flag="--buckets", choices=BUCKETS,
                 help="how bucket sizes are chosen"),
    RecipeOption(key="image.sizes", flag="--sizes", parse=_words,
                 help="bucket sizes for --buckets list: 1024x1024,832x1216,…"),
    RecipeOption(key="image.crop", flag="--crop", choices=("center", "random", "focus"),
                 help="where to crop; focus: around the mask's center of mass"),
    RecipeOption(key="image.views", flag="--views", kind=int, help="crops per picture, with --crop random"),
    RecipeOption(key="image.flip", flag="--flip", choices=FLIPS,
                 help="mirroring; both: each crop, unmirrored and mirrored"),
    RecipeOption(key="image.min_bucket", flag="--min-bucket", kind=int,
                 help="merge buckets with fewer pictures than this into their nearest neighbor"),
    RecipeOption(key="image.upscale", flag="--upscale", choices=UPSCALES, other="NUMBER",
                 parse=_upscale, help="small pictures: never enlarge, allow, reject, or enlarge at most NUMBER times"),
    RecipeOption(key="image.alpha", flag="--alpha", choices=("white", "black", "gray", "reject"), other="#RRGGBB",
                 help="color that replaces transparency, or reject"),
    RecipeOption(key="caption.missing", flag="--missing-caption", choices=MISSING_CAPTION,
                 help="what to do with pictures without a caption"),
    RecipeOption(key="mask", flag="--mask", choices=MASKS, other="DIR",
                 help="where masks are: beside the pictures (auto: if any), in their transparency, or in a directory"),
    RecipeOption(key="edits", flag="--edits", kind=Path,
                 help="directory of edited captions and masks, which replace those beside the pictures (default: that "
                 "of prep view --edit, if it has any), or none"),
    RecipeOption(key="validation", flag="--validation", kind=float,
                 help="fraction of pictures held out for validation"),
    RecipeOption(key="prompts", flag="--prompts", kind=Path, help="file of sample prompts: prompt --n negative; none: "
                 "without those of the manifest that is replaced"),
    RecipeOption(key="sources", flag="--sources", parse=_words,
                 help="which sources of the recipe to use, by their paths or the last part of them (default: all but "
                 "those with enabled = false)"),
)

BY_NAME: Mapping[str, RecipeOption] = {one.name: one for one in RECIPE_OPTIONS}
FLAGS: Mapping[str, str] = {one.key: one.flag for one in RECIPE_OPTIONS}


def overriding(given: Mapping[str, Any]) -> dict[str, Any]:
    """Recipe values by key from values as a script has them: lists, numbers and paths as the options' texts.

    Raises `UsageError` for a key that is no option.
    """
    options = {one.key: one for one in RECIPE_OPTIONS}
    for key in given:
        if key not in options:
            raise UsageError(f"'{key}' is no setting that overrides a recipe, expected one of: {', '.join(options)}",
                             hint="put it into the recipe's file")
    return {key: options[key].parse(_given(value, options[key].kind)) for key, value in given.items()
            if value is not None}


def _given(value: Any, kind: type) -> Any:
    if kind is Path:
        return Path(value)
    return value if kind is not str else ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def given_by(words: Sequence[str | Path]) -> dict[str, Any]:
    """The command-line values, by parameter name, of options as a manifest records them: flags and values in turn.

    Raises `UsageError` for an option of another version.
    """
    flags = {one.flag: one for one in RECIPE_OPTIONS}
    found: dict[str, Any] = {}
    for flag, value in zip(words[::2], words[1::2], strict=False):
        if flag not in flags:
            raise UsageError(f"the manifest was encoded with {flag}, which is no option of this version",
                             hint="encode it again, or name its recipe")
        one = flags[str(flag)]
        found[one.name] = one.kind(str(value)) if one.kind in (int, float, Path) else str(value)
    return found


def choices_of(given: Mapping[str, Any]) -> dict[str, Any]:
    """Maps values by parameter name to values by recipe key; None means not given. Raises `UsageError`."""
    return {BY_NAME[name].key: None if value is None else BY_NAME[name].parse(value) for name, value in given.items()}
