"""Assigns a recipe's pictures to buckets and views, by the recipe's bucket rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from prep.buckets.assign import Assignment, Assignments, assign_buckets, below_least_side
from prep.buckets.references import ReferenceRules
from prep.buckets.sizes import STEP, Rules, buckets_of
from prep.buckets.views import Framing, views_of
from prep.dataset.ingest import Ingested, KnownItem
from prep.errors import ConfigError, ModelError
from prep.findings import Finding
from prep.formatting import counted, format_size
from prep.geometry import PAIR, Placement, Size, fits_scaled
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.hub import locate
from prep.models.named import is_local
from prep.models.pipeline import infer_family
from prep.parse import KEPT, REFUSED, parse_size
from prep.recipe.schema import ModelOptions, Recipe
from prep.sources.item import Item


def with_views(result: Assignments, items: Sequence[KnownItem], framing: Framing) -> Assignments:
    """`result`, the assignments of `items`, with the views that `framing` asks for."""
    if framing.plain:
        return result
    pictures = ((assignment, items[assignment.index]) for assignment in result.pictures)
    return replace(result, pictures=tuple(
        replace(assignment, views=views_of(assignment.placement, item.picture, framing, item.focus))
        for assignment, item in pictures))


def buckets_for(recipe: Recipe, surveyed: Ingested, *, unmasked: bool = False) -> Assignments:
    """Bucket and views of each surveyed item, in the survey's order; `unmasked`: also of pictures without a mask that
    the family needs, so that they can be given one. Raises `ConfigError` for references or masks that do not suit the
    family."""
    image = recipe.image
    framing = Framing(crop=image.crop, views=image.views, flip=image.flip)  # type: ignore[arg-type]  # parsed
    result = assign_buckets(((item.item.label, item.size) for item in surveyed.items), *rules_of(recipe))
    beside = _with_opposites if recipe.reference_fit == PAIR else _with_references
    result = beside(with_views(result, surveyed.items, framing), recipe, surveyed.items)
    return result if unmasked else _with_holes(result, recipe, surveyed.items)


def require_masks(recipe: Recipe, family: Family | None) -> None:
    """Raises `ConfigError` if a source is used without masks and the family needs them; "auto" may find some. Or if
    masks are to be drawn and the family does not need them."""
    if family is None:
        return
    if family.inpainting is None and recipe.draws_masks:
        raise ConfigError(f"masks are to be drawn for pictures that have none, but family '{family.name}' does not "
                          "inpaint: without a mask it learns from whole pictures",
                          hint='remove missing = "draw" from [mask], or --missing-mask draw')
    for number, source in enumerate(recipe.sources):
        if family.inpainting is not None and recipe.mask_of(number) == "none" and not recipe.draws_mask(number):
            raise ConfigError(f"{source.path} is used without masks, but family '{family.name}' learns to paint where "
                              "masks are white", hint="a mask is NAME-masklabel.png beside its picture, or in the "
                              "directory of --mask; prep mask makes some, and --missing-mask draw draws them by chance")


def require_alpha(recipe: Recipe, family: Family | None) -> None:
    """Raises `ConfigError` if transparency is to be kept and the family's VAE takes none."""
    if recipe.image.alpha == KEPT and family is not None and not family.keeps_alpha:
        some = ", ".join(sorted(each.name for each in FAMILIES.values() if each.keeps_alpha))
        raise ConfigError(f"image.alpha is '{KEPT}', but the VAE of family '{family.name}' takes no transparency",
                          hint=f"families whose VAE does: {some}; choose a color that replaces it, or '{REFUSED}', "
                          "which skips such pictures")


def mask_lacking(recipe: Recipe, item: Item, *, has_alpha: bool) -> Finding | None:
    """The finding on a picture that has no mask, for a family that needs one, unless one is drawn."""
    if recipe.draws_mask(item.source):
        return None
    if recipe.mask_origin == "alpha":
        lacks = "" if has_alpha else "has no transparency, which is to say what is painted"
    else:
        lacks = "has no mask, which is to say what is painted" if item.mask is None else ""
    return Finding(path=item.label, code="missing-mask", severity="error", detail=lacks) if lacks else None


def _with_holes(result: Assignments, recipe: Recipe, items: Sequence[KnownItem]) -> Assignments:
    """`result`, where the family inpaints: each picture with itself, placed alike, as its reference, of which the mask
    hides a part; and a finding in place of each picture without a mask."""
    family = family_of(recipe.model)
    require_masks(recipe, family)
    if family is None or family.inpainting is None:
        return result
    bad: dict[str, Finding] = {}
    masked = []
    for assignment in result.pictures:
        item = items[assignment.index]
        lacking = mask_lacking(recipe, item.item, has_alpha=item.has_alpha)
        if lacking is None:
            masked.append(replace(assignment, references=tuple((view,) for view in assignment.views)))
        else:
            bad[assignment.name] = lacking
    return _of_usable(result, masked, bad)


def _of_usable(result: Assignments, usable: Sequence[Assignment], bad: Mapping[str, Finding]) -> Assignments:
    """`result` with these assignments alone, and findings on the others by their names."""
    buckets = tuple(sorted({assignment.placement.bucket for assignment in usable}))
    return replace(result, pictures=tuple(usable), buckets=buckets, findings=(*result.findings, *bad.values()))


def reference_rules(recipe: Recipe) -> ReferenceRules | None:
    """How the recipe's reference pictures are fitted; `None` if its family is not known, or takes none."""
    family = family_of(recipe.model)
    return None if family is None else rules_for(family, recipe.reference_fit, recipe.reference_resolution)


def rules_for(family: Family, fit: str, resolution: int) -> ReferenceRules | None:
    """How reference pictures are fitted for a family, by these settings; `None` if it takes none."""
    own = family.references
    return None if own is None else ReferenceRules(
        fit=fit, step=least_step(family), most=own.most, place=own.place,  # type: ignore[arg-type]  # checked
        resolution=resolution or own.resolution)


def _with_references(result: Assignments, recipe: Recipe, items: Sequence[KnownItem]) -> Assignments:
    """`result` without pictures whose references the family does not take, and a finding for each of them.

    Raises `ConfigError` if there are references and the family takes none.
    """
    referring = {number: item for number, item in enumerate(items) if item.references}
    family = family_of(recipe.model) if referring else None
    if family is None:
        return result
    rules = reference_rules(recipe)
    if rules is None:
        some = ", ".join(sorted(each.name for each in FAMILIES.values() if each.references is not None))
        raise ConfigError(f"{counted(len(referring), 'picture')} have reference pictures, which family "
                          f"'{family.name}' does not take",
                          hint=f"families that do: {some}; --references none, or references = [] in each source, "
                          "trains on the pictures alone")
    if family.text.vision is not None and recipe.image.flip != "none":
        raise ConfigError(f"image.flip is '{recipe.image.flip}', expected 'none' for references of family "
                          f"'{family.name}': its text encoder sees them, and each caption has one row, not mirrored")
    bad: dict[str, Finding] = {}
    fitting = []
    for assignment in result.pictures:
        placed = assignment
        if assignment.index in referring:
            item = referring[assignment.index]
            placements = _placements(item, assignment.views, rules, family)
            if isinstance(placements, Finding):
                bad[assignment.name] = placements
                continue
            _require_seen_once(item, placements, recipe, family)
            placed = replace(assignment, references=placements)
        fitting.append(placed)
    return _of_usable(result, fitting, bad)


def _with_opposites(result: Assignments, recipe: Recipe, items: Sequence[KnownItem]) -> Assignments:
    """`result`, each picture with its one reference placed alike: the other picture of its pair, which no model sees as
    a condition. A finding in place of each picture that has none, or one of another shape.

    Raises `ConfigError` if the family inpaints.
    """
    family = family_of(recipe.model)
    if family is not None and family.inpainting is not None:
        raise ConfigError(f"references.fit is '{PAIR}', which makes a slider of pairs of pictures, but family "
                          f"'{family.name}' learns to paint where masks are white",
                          hint="train the slider for the model that it was made from")
    bad: dict[str, Finding] = {}
    paired = []
    for assignment in result.pictures:
        fault = _unpaired(items[assignment.index], assignment.placement)
        if fault is None:
            paired.append(replace(assignment, references=tuple((view,) for view in assignment.views)))
        else:
            bad[assignment.name] = fault
    return _of_usable(result, paired, bad)


def _unpaired(item: KnownItem, view: Placement) -> Finding | None:
    """Why a picture makes no pair with its references; `None` if it does."""
    count = len(item.references)
    if count != 1:
        return Finding(path=item.item.label, severity="error",
                       code="too-many-references" if count else "missing-reference",
                       detail=f"has {counted(count, 'reference picture')}, expected 1, the other one of its pair")
    other = item.references[0]
    if other.picture == item.picture:
        return Finding(path=item.item.label, code="same-reference", severity="error",
                       detail=f"has the same bytes as the other picture of its pair, {item.item.name_of(other.blob)}, "
                              "expected another picture")
    return None if fits_scaled(other.size, view.scaled) else Finding(
        path=item.item.label, code="reference-size-mismatch", severity="error",
        detail=f"it is {format_size(item.size)}, but the other picture of its pair, {item.item.name_of(other.blob)}, "
               f"{format_size(other.size)}")


def _require_seen_once(item: KnownItem, placements: Sequence[tuple[Placement, ...]], recipe: Recipe,
                       family: Family) -> None:
    """Raises `ConfigError` if the text encoder sees references otherwise in another view of their picture."""
    vision = family.text.vision
    if vision is not None and len({tuple(vision.place(each.size, place) for each, place in zip(
            item.references, of_view, strict=True)) for of_view in placements}) > 1:
        raise ConfigError(f"references.fit is '{recipe.reference_fit}', which crops the references of "
                          f"{item.item.label} in another way for each of its views, expected 'family' or 'exact' for "
                          f"family '{family.name}': its text encoder sees them, and each caption has one row",
                          hint="or set image.views to 1")


def _placements(item: KnownItem, views: Sequence[Placement], rules: ReferenceRules, family: Family
                ) -> tuple[tuple[Placement, ...], ...] | Finding:
    """The placements of an item's references beside each of its views; a finding if they cannot be used."""
    if len(item.references) > rules.most:
        return Finding(path=item.item.label, code="too-many-references", severity="error",
                       detail=f"has {len(item.references)} reference pictures, expected at most {rules.most}, "
                              f"as family '{family.name}' takes")
    by_view: list[tuple[Placement, ...]] = [() for _ in views]
    for reference in item.references:
        for number, view in enumerate(views):
            placement = rules.placement(reference.size, view)
            if placement is None:
                return Finding(path=item.item.label, code="too-small", severity="error",
                               detail=f"its reference {item.item.name_of(reference.blob)} is "
                                      f"{format_size(reference.size)}, which family '{family.name}' does not take")
            by_view[number] += (placement,)
    return tuple(by_view)


def least_side_check(recipe: Recipe) -> Callable[[str, Size], Finding | None]:
    """A check that finds pictures whose shorter side is below the recipe's minimum. Raises `ConfigError`."""
    rules = rules_of(recipe)[0]
    return lambda name, size: below_least_side(name, size, rules)


def rules_of(recipe: Recipe) -> tuple[Rules, ...]:
    """The bucket rules of a recipe, one for each resolution. Raises `ConfigError` for rules that give no buckets, and
    for transparency that the family does not take."""
    image, family = recipe.image, family_of(recipe.model)
    require_alpha(recipe, family)
    least, step = (8, STEP) if family is None else (least_step(family), family.step)
    step = image.step or step
    if step % least:
        what = f"the least of family '{family.name}'" if family is not None else "the pixels of a latent cell"
        raise ConfigError(f"image.step is {step}, expected a multiple of {least}, {what}")
    rules = Rules(
        resolution=image.resolutions[0], kind=image.buckets, step=step,  # type: ignore[arg-type]  # parsed
        shortest=image.shortest, longest=image.longest, min_side=image.min_side,
        upscale=image.upscale if isinstance(image.upscale, str) else Fraction(str(image.upscale)),  # type: ignore[arg-type]
        min_bucket=image.min_bucket, sizes=tuple(parse_size(size, "image.sizes") for size in image.sizes))
    by_resolution = tuple(replace(rules, resolution=resolution) for resolution in image.resolutions)
    for rules in by_resolution:
        buckets_of(rules)
    return by_resolution


def least_step(family: Family) -> int:
    """The pixels that the sides of a family's pictures must be multiples of."""
    return family.factor * family.patch


def family_of(model: ModelOptions) -> Family | None:
    """The facts of the named family, or else of the family of the model directory; `None` if neither determines it.

    An unknown model is not an error: buckets can be previewed without a family, and callers that need it report it.
    """
    if model.family:
        return FAMILIES[model.family]
    if not model.path or not is_local(model.path):
        return None
    try:
        return FAMILIES[infer_family(locate(model.path, download=None))]
    except ModelError:
        return None
