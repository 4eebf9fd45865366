"""The command options that several `prep` commands share, and how they become a recipe."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from prep.captions.options import CaptionOptions
from prep.errors import UsageError
from prep.recipe.load import load_recipe, resolutions
from prep.recipe.schema import Recipe

SourceArg = Annotated[Path, typer.Argument(
    metavar="SOURCE", help="a directory of pictures, a .tar (braces and globs allowed), or a recipe .toml",
    show_default=False)]
ManifestArg = Annotated[Path, typer.Argument(metavar="MANIFEST", help="a manifest.json", show_default=False)]
Resolution = Annotated[str | None, typer.Option(
    help="target side in pixels; a bucket's area is about its square; several, 512,1024: a sample at each")]
Step = Annotated[int | None, typer.Option(
    help="pixels between bucket sides (default: the model family's 8 x patch; 64 where no model is named)")]
Buckets = Annotated[str | None, typer.Option(help="step, ratio, sdxl-40, list or single")]
Sizes = Annotated[str | None, typer.Option(help="of --buckets list: 1024x1024,832x1216,…")]
MinBucket = Annotated[int | None, typer.Option(help="buckets with fewer pictures merge into their nearest neighbour")]
Upscale = Annotated[str | None, typer.Option(
    metavar="POLICY", help="small pictures: never enlarged, allow, reject, or a number: so many times at most")]
Crop = Annotated[str | None, typer.Option(
    help="where the bucket is cut out: center (centre), random or focus (of the mask)")]
Views = Annotated[int | None, typer.Option(help="cuts of a picture, with --crop random")]
Flip = Annotated[str | None, typer.Option(help="mirrored pictures: none, both (as they are, and mirrored) or always")]
Alpha = Annotated[str | None, typer.Option(help="color that transparency is flattened onto, or 'reject'")]
MissingCaption = Annotated[str | None, typer.Option(help="stop, reject, empty, filename or constant")]
Mask = Annotated[str | None, typer.Option(
    help="auto (the default: NAME-masklabel.png where there are any), none, sidecar, alpha, or a directory")]
Validation = Annotated[float | None, typer.Option(help="fraction of the pictures that is kept for validation")]
CacheArg = Annotated[Path, typer.Argument(metavar="CACHE", help="a cache directory", show_default=False)]
Jobs = Annotated[int, typer.Option(help="threads that read and decode", min=1)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON on stdout")]
Quiet = Annotated[bool, typer.Option("--quiet", help="no progress and no notices")]

JOBS = max(2, os.cpu_count() or 1)


def seconds_of(text: str, option: str) -> float:
    """The seconds of a time like 0, 90s, 30m, 12h or 7d. Raises `UsageError`."""
    found = re.fullmatch(r"([0-9]{1,9})([smhd]?)", text)
    if not found or (not found[2] and int(found[1])):
        raise UsageError(f"{option} is '{text}', expected 0, or a whole number with s, m, h or d: 30m, 12h, 7d")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[found[2]]


def _resolutions(text: str | None) -> int | tuple[int, ...] | None:
    """The numbers of 512 or 512,1024. Raises `UsageError`."""
    if text is None:
        return None
    if not re.fullmatch(r"[0-9]{1,9}(,[0-9]{1,9})*", text):
        raise UsageError(f"--resolution is '{text}', expected pixels like 512, or several like 512,1024")
    return resolutions([int(part) for part in text.split(",")], "--resolution")


def _upscale(text: str | None) -> str | float | None:
    """A policy, or the number that is written there."""
    return float(text) if text is not None and re.fullmatch(r"[0-9]+(\.[0-9]+)?", text) else text


def without_caption_stop(recipe: Recipe) -> Recipe:
    """The recipe for a look ahead: a missing caption stops nothing, and is not yet a reason to leave a picture out."""
    sources = tuple(source if source.caption is None else replace(source, caption=_unstopped(source.caption))
                    for source in recipe.sources)
    return replace(recipe, caption=_unstopped(recipe.caption), sources=sources)


def _unstopped(caption: CaptionOptions) -> CaptionOptions:
    return replace(caption, missing="empty") if caption.missing == "stop" else caption


def recipe_from_options(
    source: Path, *, resolution: str | None = None, step: int | None = None, buckets: str | None = None,
    sizes: str | None = None, min_bucket: int | None = None, upscale: str | None = None, crop: str | None = None,
    views: int | None = None, flip: str | None = None, alpha: str | None = None, missing_caption: str | None = None,
    mask: str | None = None, validation: float | None = None, model: str | None = None, dtype: str | None = None,
    compute: str | None = None, prompts: Path | None = None,
) -> Recipe:
    """The recipe of SOURCE with the command's options above it. Raises `ConfigError`, `PathError`."""
    return load_recipe(source, choices={
        "image.resolution": _resolutions(resolution), "image.step": step, "image.buckets": buckets,
        "image.min_bucket": min_bucket,
        "image.sizes": None if sizes is None else tuple(part.strip() for part in sizes.split(",")),
        "image.upscale": _upscale(upscale), "image.crop": crop, "image.views": views, "image.flip": flip,
        "image.alpha": alpha, "caption.missing": missing_caption, "mask": mask, "validation": validation,
        "model.path": model, "model.dtype": dtype, "model.compute": compute, "prompts": prompts})


def quiet_pillow() -> None:
    from prep.images.decode import quiet_pillow

    quiet_pillow()
