"""Checks the values of a recipe, alone and together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from prep.buckets.sizes import MOST_RESOLUTION, MOST_SIDE
from prep.buckets.views import CROPS, FLIPS
from prep.captions.options import check_caption
from prep.fs.mirror import is_url
from prep.models.families.registry import FAMILIES
from prep.parse import Unparsed, brief, color_of, one_of, parse_size, suggest, within
from prep.recipe.schema import (
    BUCKETS,
    MASKS,
    POSTERIORS,
    QUANTIZATIONS,
    STORED_DTYPES,
    UPSCALES,
    ImageOptions,
    Recipe,
)
from prep.sources.item import MaskFrom

MOST_TOKENS = 1 << 16  # of a caption; each family has its own limit
MOST_LAYERS = 64  # of a text encoder
TILE_STEP = 128  # pixels: tiles advance by three quarters of their side, in latent cells of up to 32 pixels
MOST_TILE = 1 << 14  # pixels
MOST_WINDOWS = 3  # as in sd-scripts
NO_FOCUS = ("image.crop is 'focus' and there are no masks, expected masks to focus on: sidecar, alpha or a "
            "directory")


def validate_recipe(recipe: Recipe) -> Recipe:
    """`recipe` itself. Raises `Unparsed` for invalid or contradictory values."""
    _check_image(recipe.image)
    model = recipe.model
    one_of(model.dtype, STORED_DTYPES, "model.dtype")
    if model.compute:
        one_of(model.compute, STORED_DTYPES, "model.compute")
    if model.family:
        _check_family(model.family)
    within(model.max_length, 0, MOST_TOKENS, "model.max_length")
    within(model.clip_skip, 0, MOST_LAYERS, "model.clip_skip")
    within(model.text_windows, 1, MOST_WINDOWS, "model.text_windows")
    one_of(model.text_quantization, QUANTIZATIONS, "model.text_quantization")
    one_of(model.posterior, POSTERIORS, "model.posterior")
    within(model.tile, 0, MOST_TILE, "model.tile")
    if model.tile % TILE_STEP:
        raise Unparsed(f"model.tile is {model.tile}, expected 0 or a multiple of {TILE_STEP} pixels")
    within(recipe.validation, 0, 0.9, "validation.fraction")
    for number, source in enumerate(recipe.sources):
        check_caption(recipe.caption_of(number), "caption" if source.caption is None else f"source[{number}].caption")
        one_of(source.role, ("train", "validation", "prior"), "source.role")
        within(source.repeats, 1, 10000, "source.repeats")
        within(source.weight, 0, 1000, "source.weight")
        _check_mask(source.mask, f"source[{number}].mask")
    _check_mask(recipe.mask, "mask.from")
    masks = set(map(recipe.mask_of, range(len(recipe.sources))))
    if "alpha" in masks and masks - {"alpha", "auto", "none"}:
        raise Unparsed("some sources take masks from alpha and others from files, expected one kind per recipe")
    if recipe.image.crop == "focus" and masks == {"none"}:
        raise Unparsed(NO_FOCUS)
    return recipe


def _check_family(family: str) -> None:
    try:
        one_of(family, FAMILIES, "model.family")
    except Unparsed as error:
        raise Unparsed(f"{error} (prep models describes them)") from None


def upscale(value: Any, where: str) -> str | float:
    """A policy, or a number; true means "allow", false "never". Raises `Unparsed`."""
    if isinstance(value, bool):
        return "allow" if value else "never"
    if isinstance(value, int | float) or (isinstance(value, str) and value in UPSCALES):
        return value
    near = suggest(value, UPSCALES) if isinstance(value, str) else ""
    raise Unparsed(f"{where} is {brief(value)}, expected one of: {', '.join(UPSCALES)}, or a number from 1 to 100"
                   f"{near}")


def _check_image(image: ImageOptions) -> None:
    one_of(image.buckets, BUCKETS, "image.buckets")
    if (image.buckets == "list") != bool(image.sizes):
        raise Unparsed(f"image.buckets is '{image.buckets}' and image.sizes has {len(image.sizes)} sizes, expected "
                       "sizes with 'list', and only with 'list'")
    for size in image.sizes:
        parse_size(size, "image.sizes")
    if image.alpha != "reject":
        color_of(image.alpha, "image.alpha", also=("reject",))
    if image.step:  # 0: the family's
        within(image.step, 8, 1024, "image.step")
    for side in image.resolutions:
        within(side, image.step or 8, MOST_RESOLUTION, "image.resolution")
    for name in ("shortest", "longest", "min_side"):
        within(getattr(image, name), 0, MOST_SIDE, f"image.{name}")
    if len(image.resolutions) > 1 and image.buckets in ("list", "sdxl-40"):
        raise Unparsed(f"image.buckets is '{image.buckets}' and image.resolution has {len(image.resolutions)} numbers, "
                       "expected one, since these sizes do not depend on it")
    within(image.min_bucket, 1, 1 << 30, "image.min_bucket")
    if isinstance(image.upscale, str):
        upscale(image.upscale, "image.upscale")
    else:
        within(image.upscale, 1, 100, "image.upscale")
    one_of(image.crop, CROPS, "image.crop")
    one_of(image.flip, FLIPS, "image.flip")
    within(image.views, 1, 64, "image.views")
    if image.views > 1 and image.crop != "random":
        raise Unparsed(f"image.views is {image.views} and image.crop '{image.crop}', which makes one crop, expected "
                       "crop 'random' for several")


def _check_mask(mask: MaskFrom | None, where: str) -> None:
    if isinstance(mask, Path) and not is_url(mask) and not mask.is_dir():
        raise Unparsed(f"{where} is {str(mask)!r}, expected {', '.join(MASKS)} or an existing directory "
                       "(prep mask makes one)")
