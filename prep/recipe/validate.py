"""Checks the settings of a recipe that depend on each other, or on files and models that exist."""

from __future__ import annotations

from collections.abc import Sequence

from prep.buckets.sizes import MOST_RESOLUTION
from prep.fs.place import Place, is_directory, real_name
from prep.fs.remote.bucket import names_bucket
from prep.models.families.registry import FAMILIES
from prep.parse import Unparsed, one_of, within
from prep.recipe.schema import MASKS, ImageOptions, Recipe
from prep.sources.item import MaskFrom

NO_FOCUS = ("image.crop is 'focus' and there are no masks, expected masks to focus on: sidecar, alpha or a "
            "directory")


def validate_recipe(recipe: Recipe) -> Recipe:
    """Returns `recipe` itself. Raises `Unparsed` for values that contradict each other, or name nothing that exists."""
    _check_image(recipe.image)
    if recipe.model.family:
        _check_family(recipe.model.family)
    for number, source in enumerate(recipe.sources):
        _check_mask(source.mask, f"source[{number}].mask")
        where = "references.from" if source.references is None else f"source[{number}].references"
        _check_references(recipe.references_of(number) or (), source.path, where)
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


def _check_image(image: ImageOptions) -> None:
    if (image.buckets == "list") != bool(image.sizes):
        raise Unparsed(f"image.buckets is '{image.buckets}' and image.sizes has {len(image.sizes)} sizes, expected "
                       "sizes with 'list', and only with 'list'")
    for side in image.resolutions:
        within(side, image.step or 8, MOST_RESOLUTION, "image.resolution")
    if len(image.resolutions) > 1 and image.buckets in ("list", "sdxl-40"):
        raise Unparsed(f"image.buckets is '{image.buckets}' and image.resolution has {len(image.resolutions)} numbers, "
                       "expected one, since these sizes do not depend on it")
    if image.views > 1 and image.crop != "random":
        raise Unparsed(f"image.views is {image.views} and image.crop '{image.crop}', which makes one crop, expected "
                       "crop 'random' for several")


def _check_references(folders: Sequence[Place], source: Place, where: str) -> None:
    for folder in folders:
        if _is_no_directory(folder):
            raise Unparsed(f"{where} is {str(folder)!r}, expected existing directories")
        if real_name(folder) == real_name(source):
            raise Unparsed(f"{where} is {str(folder)!r}, the source itself, whose pictures would be their own "
                           "references, expected other directories")


def _check_mask(mask: MaskFrom | None, where: str) -> None:
    if mask is not None and not isinstance(mask, str) and _is_no_directory(mask):
        raise Unparsed(f"{where} is {str(mask)!r}, expected {', '.join(MASKS)} or an existing directory "
                       "(prep mask makes one)")


def _is_no_directory(place: Place) -> bool:
    """Whether it is not there, or something else; what a store has shows when it is listed."""
    return not names_bucket(str(place)) and not is_directory(place)
