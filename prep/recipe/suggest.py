"""Suggests a recipe for the contents of a source, with the reasons as comments in its `dataset.toml`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path

from prep.buckets.sizes import STEP
from prep.captions.options import CaptionOptions
from prep.formatting import format_size, join_names
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.hub import checked_id, locate
from prep.models.named import is_local
from prep.models.pipeline import infer_family
from prep.recipe.layout import FoundReferences
from prep.recipe.overview import Overview, RepeatFolder, SourceOverview
from prep.recipe.sampled import SampledFiles
from prep.recipe.schema import ImageOptions, ModelOptions, Recipe, Source
from prep.recipe.write import Comment
from prep.sources.item import MaskFrom

RESOLUTIONS = (64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)  # the candidates
SMALL = 256  # below it, 64 pixels between bucket sides leave too few shapes
MOST_REPEATS = 10_000  # the limit of a recipe
SHOWN = ("image.resolution", "image.buckets", "caption.missing", "mask.from", "validation.fraction")
_FRACTIONS = ((20, 0.0), (200, 0.1))  # (below this many pictures, fraction); from 200 on, 0.05
MOST_HELD_OUT = 64  # pictures, whatever the fraction: as many as a validation looks at (validation.most)


@dataclass(frozen=True, kw_only=True, slots=True)
class RecipeSuggestion:
    """A recipe with the comments that explain it."""

    recipe: Recipe
    remarks: tuple[Comment, ...]
    shown: tuple[str, ...]


def suggest(seen: Overview, *, model: str = "", named: str = "", name: str = "dataset.toml") -> RecipeSuggestion:
    """The recipe for the `seen` contents and for `model`, a directory or a Hub id; "" for none.

    `named` are the sources as the user named them, `name` is the recipe's name. Raises `ModelError` for a directory
    without a known model.
    """
    family = _family(model)
    image, image_says = _image(seen, family)
    sources, source_says = _sources(seen)
    caption, caption_says = _caption(seen)
    mask, sources = _shared_mask(seen, sources)
    pictures = sum(part.pictures for part in seen.parts if part.place.role == "train")
    fraction = _fraction(pictures)
    recipe = Recipe(sources=tuple(sources), image=image, caption=caption, mask=mask,
                    validation=fraction, model=ModelOptions(path=model))
    remarks = [Comment(at="", text=text) for text in _top(seen, named, name)]
    if not model:
        remarks.append(Comment(at="model", text='no model given: set path = "models/sd15" or a Hub id here, or use '
                               "prep encode --model"))
    remarks += [*image_says, *caption_says, *_mask(seen, family), *source_says]
    if fraction:
        remarks.append(Comment(at="validation.fraction", text=f"about {max(1, round(fraction * pictures))} of "
                               f"{pictures} pictures, held out for validation"))
    also = (name for name, says in (("image.alpha", seen.opened.alpha), ("caption.lines", seen.opened.several)) if says)
    return RecipeSuggestion(recipe=recipe, remarks=tuple(remarks), shown=(*SHOWN, *also))


def _fraction(pictures: int) -> float:
    """The fraction of the pictures that is held out."""
    usual = next((fraction for most, fraction in _FRACTIONS if pictures < most), 0.05)
    return min(usual, float(f"{MOST_HELD_OUT / max(pictures, 1):.2g}"))


def _family(model: str) -> Family | None:
    """The family of a local model; `None` for a Hub id or no model. Raises `ModelError`."""
    if not model:
        return None
    if is_local(model):
        return FAMILIES[infer_family(locate(model, download=None))]
    checked_id(model)
    return None


def _top(seen: Overview, named: str, name: str) -> Iterator[str]:
    opened, pictures = seen.opened, seen.total("pictures")
    yield f"Written by prep init from {named}: {pictures} pictures."
    yield f"prep scan {name} lists their problems; prep bucket {name} shows what training would see."
    if siblings := [name for part in seen.parts for name in part.place.siblings]:
        yield f"Not read, though they hold pictures: {join_names(siblings, 8)}."
    if opened.count < pictures:
        yield f"Sizes and captions were read from {opened.count} of them, evenly spread."
    if opened.unreadable:
        yield f"Files that cannot be read as pictures: {opened.unreadable}."


def _image(seen: Overview, family: Family | None) -> tuple[ImageOptions, list[Comment]]:
    """The largest resolution that most pictures reach, up to the model's own."""
    opened, most = seen.opened, RESOLUTIONS[-1] if family is None else family.resolution
    if not opened.sizes:
        return ImageOptions(), [Comment(at="image", text="no picture could be read, so these are the defaults")]
    areas = sorted(opened.sizes, key=lambda size: size[0] * size[1])
    enough = isqrt(areas[len(areas) // 5][0] * areas[len(areas) // 5][1])
    side = max((resolution for resolution in RESOLUTIONS if resolution <= min(enough, most)), default=RESOLUTIONS[0])
    step = 16 if side < SMALL else 0  # 0: the family's
    below = sum(width * height < side * side for width, height in opened.sizes)
    smallest, middle, largest = (format_size(areas[at]) for at in (0, len(areas) // 2, -1))
    small = (f"{below} of {len(areas)} have a smaller area than {format_size((side, side))} and are not enlarged"
             if below else f"none has a smaller area than {format_size((side, side))}")
    says = f"pictures are {smallest} to {largest}, median {middle}; {small}"
    limit = f" (trained at {most})" if family is not None and side == most else ""
    remarks = [Comment(at="image.resolution", text=says + limit)]
    least = step or (STEP if family is None else family.step)
    if tiny := sum(min(size) < least for size in opened.sizes):
        remarks.append(Comment(at="image.resolution", text=f"pictures skipped because a side is below {least}: "
                               f"{tiny}"))
    if opened.alpha:
        keep = '"keep" gives it to the VAE, and ' if family is not None and family.keeps_alpha else ""
        remarks.append(Comment(at="image.alpha", text=f"{_some(opened.alpha, opened)} have transparency, which is "
                               f'flattened onto this color; {keep}"reject" skips them'))
    return ImageOptions(resolution=side, step=step), remarks


def _some(count: int, opened: SampledFiles) -> str:
    return f"{count} of {opened.count} pictures"


def _sources(seen: Overview) -> tuple[list[Source], list[Comment]]:
    """The sources of all places, each with its own directories of masks and references."""
    sources: list[Source] = []
    remarks: list[Comment] = []
    for part in seen.parts:
        if part.place.role == "prior":
            remarks.append(Comment(at=f"source[{len(sources)}]", text="regularization pictures: an epoch shows them as "
                                   "often as all training pictures together, never more"))
        _add_sources(part, _caption(seen)[0], sources, remarks)
    return sources, remarks


def _add_sources(part: SourceOverview, caption: CaptionOptions, sources: list[Source],
                 remarks: list[Comment]) -> None:
    """Adds a source per N_class directory, as kohya's tools do, and one for the rest; otherwise one for the whole."""
    here, role = f"source[{len(sources)}]", part.place.role
    if not part.folders or "table" in part.captions:
        if part.table is not None:
            remarks.append(Comment(at=f"{here}.table", text="captions for pictures without a caption file"))
        if part.folders:
            remarks.append(Comment(at=here, text=f"{len(part.folders)} directories are named N_class; their "
                                   "repeats are ignored, since a table names pictures relative to this path"))
        _explain(part, part.references, part.pictures, len(sources), remarks)
        sources.append(Source(path=part.path, role=role, table=part.table, mask=part.masks.folder,
                              references=part.references.folders or None,
                              exclude=_inside(part.path, part.mask_folders)))
        return
    for folder in part.folders:
        if folder.repeats < 1:
            remarks.append(Comment(at="", text=f"{folder.name} is skipped: it has 0 repeats."))
            continue
        path = part.path / folder.name
        remarks.append(_of_folder(folder, len(sources)))
        _explain(part, folder.references, folder.pictures, len(sources), remarks)
        sources.append(Source(path=path, repeats=min(folder.repeats, MOST_REPEATS), role=role, mask=folder.masks.folder,
                              references=folder.references.folders or None, exclude=_inside(path, part.mask_folders),
                              caption=replace(caption, missing="constant", constant=folder.words)))
    if part.outside or all(folder.repeats < 1 for folder in part.folders):
        remarks.append(Comment(at=f"source[{len(sources)}]", text=f"{part.outside} pictures in no such directory"))
        names = tuple(f"{_literal(folder.name)}/**" for folder in part.folders)
        _explain(part, part.references, part.outside, len(sources), remarks)
        hidden = _inside(part.path, (*part.mask_folders, *part.reference_folders))
        sources.append(Source(path=part.path, role=role, mask=part.masks.folder,
                              references=part.references.folders or None, exclude=(*names, *hidden)))


def _explain(part: SourceOverview, found: FoundReferences, pictures: int, number: int, remarks: list[Comment]) -> None:
    """Adds the comment on the references of a source."""
    if found.folders:
        others = "" if found.count == pictures else ('; the others are errors and not used: missing_reference = "none" '
                                                     "trains them with the references that they have, or without")
        remarks.append(Comment(at=f"source[{number}].references", text="conditions of the pictures, for edit training: "
                               f"{found.count} of {pictures} have one in each directory{others}"))
    elif part.paired:
        remarks.append(Comment(at=f"source[{number}]", text=f"{part.paired} of {part.pictures} pictures have "
                               "references, conditions for edit training, in a table, in their tar or beside them; "
                               "references = [] trains without"))


def _inside(root: Path, folders: Iterable[Path]) -> tuple[str, ...]:
    """Globs that exclude directories of masks and references in a source, whose files are not its pictures."""
    inner = (folder.relative_to(root) for folder in folders if folder.is_relative_to(root))
    return tuple(f"{_literal(folder.as_posix())}/**" for folder in inner)


def _shared_mask(seen: Overview, sources: Sequence[Source]) -> tuple[MaskFrom, list[Source]]:
    """The recipe's [mask] if all sources agree, and the sources without it; else "auto" and the sources as they are."""
    masks = {source.mask for source in sources}
    if len(masks) > 1:
        return "auto", list(sources)
    shared = sources[0].mask or ("sidecar" if seen.total("sidecars") else "auto")
    return shared, [replace(source, mask=None) for source in sources]


def _of_folder(folder: RepeatFolder, number: int) -> Comment:
    more = "" if folder.repeats <= MOST_REPEATS else f"; {folder.repeats} repeats are above the limit of {MOST_REPEATS}"
    return Comment(at=f"source[{number}]", text=f"{folder.pictures} pictures; without a caption, they get "
                   f"'{folder.words}'{more}")


def _literal(name: str) -> str:
    """A name as a glob that matches only it."""
    return re.sub(r"[*?\[]", r"[\g<0>]", name)


def _caption(seen: Overview) -> tuple[CaptionOptions, list[Comment]]:
    """Caption options that use all captions, with a policy for missing ones that does not stop `prep encode`."""
    opened, pictures = seen.opened, seen.total("pictures")
    missing_ones = seen.total("missing")
    bare, outside = missing_ones + opened.empty, seen.total("outside")
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(seen.captions.items())) or "none"
    says = [f"captions: {kinds}"]
    if not bare:
        missing = "stop"
    elif seen.folders and "table" not in seen.captions:
        missing = "reject"
        elsewhere = "; elsewhere they are skipped" if outside else ""
        says.append(f"{bare} of {pictures} pictures have no caption, or an empty one; in a directory named "
                    f"N_class they get the class as caption{elsewhere}")
    elif bare < pictures:
        missing = "reject"
        says.append(f"{bare} of {pictures} pictures have no caption, or an empty one, and are skipped; "
                    '"filename" uses their names, "constant" one caption for all')
    else:
        missing = "filename" if 2 * seen.total("spoken") >= missing_ones > 0 else "empty"
        says.append(f"no picture has a caption; {'names have words' if missing == 'filename' else 'names say little'}; "
                    '"constant" is one caption for all, and prep caption makes them')
    for count, kind, what in (
            (opened.several, "with several lines", 'each line is a caption; alternatives: "first", "join"'),
            (opened.wildcards, "with {a|b}", "wildcards = true makes captions from the choices"),
            (opened.tags, "that look like tags", "shuffle = true, keep_tokens = 1 shuffles all but the first"),
            (opened.separated, "with |||", "with shuffle = true, tags before it keep their place"),
            (opened.triggers, "with [trigger]", 'trigger = "WORD" puts WORD there')):
        if count:
            says.append(f"captions {kind}: {count} ({what})")
    return CaptionOptions(missing=missing), [Comment(at="caption", text=text) for text in says]


def _mask(seen: Overview, family: Family | None) -> Iterator[Comment]:
    painter = family.name if family is not None and family.inpainting is not None else ""
    masked, others = seen.total("masked"), "are not used" if painter else "train everywhere"
    if masked or painter:
        yield Comment(at="mask", text=f"{masked} of {seen.total('pictures')} pictures have a mask; the others {others}")
    if painter and not masked:
        yield Comment(at="mask", text=f"family {painter} learns to paint where masks are white: prep mask makes some, "
                      'prep view --edit paints them, and missing = "draw" draws them by chance')
    elif seen.opened.alpha and not masked:
        yield Comment(at="mask", text='"alpha" would train only the opaque parts')
