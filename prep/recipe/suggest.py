"""What was seen in a source → the recipe that suits it, and why, as comments of its `dataset.toml`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path

from prep.buckets.sizes import STEP
from prep.captions.options import CaptionOptions
from prep.errors import ModelError
from prep.formatting import format_size
from prep.models.family import FAMILIES, Family
from prep.models.pipeline import infer_family
from prep.parse import Unparsed, hub_id
from prep.recipe.overview import RepeatFolder, SampledFiles, SourceOverview
from prep.recipe.schema import ImageOptions, ModelOptions, Recipe, Source
from prep.recipe.write import Comment
from prep.sources.item import MaskFrom

RESOLUTIONS = (64, 96, 128, 192, 256, 384, 512, 640, 768, 896, 1024)  # that are suggested
SMALL = 256  # below it, 64 pixels between bucket sides leave too few shapes
MOST_REPEATS = 10_000  # that a recipe takes
SHOWN = ("image.resolution", "image.buckets", "caption.missing", "mask.from", "validation.fraction")
_FRACTIONS = ((20, 0.0), (200, 0.1), (4000, 0.05))  # of up to so many pictures; of more, 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class Suggestion:
    """A recipe with the comments that explain it."""

    recipe: Recipe
    remarks: tuple[Comment, ...]
    shown: tuple[str, ...]


def suggest(seen: SourceOverview, *, model: str = "", given: str = "", name: str = "dataset.toml") -> Suggestion:
    """The recipe for what was `seen`, and for the encoders of `model`, a directory or a Hub id; "" where none is named.

    `given` is the source as the user called it, `name` the recipe's own. Raises `ModelError` for a directory that holds
    no model we know.
    """
    family = _family(model)
    image, image_says = _image(seen, family)
    sources, source_says = _sources(seen)
    caption, caption_says = _caption(seen)
    mask: MaskFrom = seen.mask_folder or ("sidecar" if seen.masks else "auto")
    fraction = next((fraction for most, fraction in _FRACTIONS if seen.pictures < most), 0.01)
    recipe = Recipe(sources=tuple(sources), image=image, caption=caption, mask=mask,
                    validation=fraction, model=ModelOptions(path=model))
    remarks = [Comment(at="", text=text) for text in _top(seen, given, name)]
    if not model:
        remarks.append(Comment(at="model", text='none is named: path = "models/sd15" or a Hub id here, or prep encode '
                               "--model"))
    remarks += [*image_says, *caption_says, *_mask(seen), *source_says]
    if fraction:
        remarks.append(Comment(at="validation.fraction", text=f"about {max(1, round(fraction * seen.pictures))} of "
                               f"{seen.pictures} pictures, never trained on"))
    also = (name for name, says in (("image.alpha", seen.opened.alpha), ("caption.lines", seen.opened.several)) if says)
    return Suggestion(recipe=recipe, remarks=tuple(remarks), shown=(*SHOWN, *also))


def _family(model: str) -> Family | None:
    """The facts of a local model's family; nothing is known of one that is only named."""
    if not model:
        return None
    if Path(model).is_dir():
        return FAMILIES[infer_family(Path(model))]
    try:
        hub_id(model, "model")
    except Unparsed as error:
        raise ModelError(f"{error}, or a directory that is there",
                         hint="name a diffusers pipeline directory, or leave --model out") from None
    return None


def _top(seen: SourceOverview, given: str, name: str) -> Iterator[str]:
    yield f"Written by prep init from what is in {given or seen.path}: {seen.pictures} pictures."
    yield f"prep scan {name} says what is wrong with them, prep bucket {name} what training would see."
    opened = seen.opened
    if opened.count < seen.pictures:
        yield f"What is said of sizes and captions comes from {opened.count} of them, evenly spread."
    if opened.unreadable:
        yield f"Files that cannot be read as pictures: {opened.unreadable}."


def _image(seen: SourceOverview, family: Family | None) -> tuple[ImageOptions, list[Comment]]:
    """The largest resolution that most pictures reach, up to the model's own."""
    opened, most = seen.opened, RESOLUTIONS[-1] if family is None else family.resolution
    if not opened.sizes:
        return ImageOptions(), [Comment(at="image", text="no picture could be read, so the defaults are written")]
    areas = sorted(opened.sizes, key=lambda size: size[0] * size[1])
    enough = isqrt(areas[len(areas) // 5][0] * areas[len(areas) // 5][1])
    side = max((one for one in RESOLUTIONS if one <= min(enough, most)), default=RESOLUTIONS[0])
    step = 16 if side < SMALL else 0  # 0: the family's
    below = sum(width * height < side * side for width, height in opened.sizes)
    smallest, middle, largest = (format_size(areas[at]) for at in (0, len(areas) // 2, -1))
    says = (f"from {smallest} to {largest}, the middle one {middle}; "
            f"{below} of {len(areas)} have a smaller area than {format_size((side, side))} and are not enlarged")
    limit = f" (trained at {most})" if family is not None and side == most else ""
    remarks = [Comment(at="image.resolution", text=says + limit)]
    least = step or (STEP if family is None else family.step)
    if tiny := sum(min(size) < least for size in opened.sizes):
        remarks.append(Comment(at="image.resolution", text=f"pictures with a side below {least}, which are not "
                               f"used: {tiny}"))
    if opened.alpha:
        remarks.append(Comment(at="image.alpha", text=f"{_some(opened.alpha, opened)} have transparency, which is "
                               'flattened onto this color; "reject" leaves them out'))
    return ImageOptions(resolution=side, step=step), remarks


def _some(count: int, opened: SampledFiles) -> str:
    return f"{count} of {opened.count} pictures"


def _sources(seen: SourceOverview) -> tuple[list[Source], list[Comment]]:
    """One for each N_class directory, as kohya's tools read them, and one for what lies beside them; else the whole."""
    sources: list[Source] = []
    remarks: list[Comment] = []
    if not seen.folders or "table" in seen.captions:
        if seen.table is not None:
            remarks.append(Comment(at="source[0].table", text="it has captions for pictures without a caption file"))
        if seen.folders:
            remarks.append(Comment(at="source[0]", text=f"{len(seen.folders)} directories are called N_class; their "
                                   "repeats are not taken over, since a table names pictures from here"))
        return [Source(path=seen.path, table=seen.table)], remarks
    for folder in seen.folders:
        if folder.repeats < 1:
            remarks.append(Comment(at="", text=f"{folder.name} is left out: it is repeated 0 times."))
            continue
        remarks.append(_of_folder(folder, len(sources)))
        sources.append(Source(path=seen.path / folder.name, repeats=min(folder.repeats, MOST_REPEATS),
                              caption=replace(_caption(seen)[0], missing="constant", constant=folder.words)))
    if seen.outside or not sources:
        remarks.append(Comment(at=f"source[{len(sources)}]", text=f"{seen.outside} pictures in no such directory"))
        names = tuple(f"{_literal(one.name)}/**" for one in seen.folders)
        sources.append(Source(path=seen.path, exclude=names))
    return sources, remarks


def _of_folder(folder: RepeatFolder, number: int) -> Comment:
    more = "" if folder.repeats <= MOST_REPEATS else f"; {folder.repeats} repeats are more than are taken"
    return Comment(at=f"source[{number}]", text=f"{folder.pictures} pictures; one without a caption is "
                   f"'{folder.words}'{more}")


def _literal(name: str) -> str:
    """A name as a glob that takes nothing else."""
    return re.sub(r"[*?\[]", r"[\g<0>]", name)


def _caption(seen: SourceOverview) -> tuple[CaptionOptions, list[Comment]]:
    """All captions that are there; a policy for pictures without one that `prep encode` does not stop at."""
    opened, bare = seen.opened, seen.missing + seen.opened.empty
    kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(seen.captions.items())) or "none"
    says = [f"captions: {kinds}"]
    if not bare:
        missing = "stop"
    elif seen.folders and "table" not in seen.captions:
        missing = "reject"
        elsewhere = "; elsewhere it is left out" if seen.outside else ""
        says.append(f"{bare} of {seen.pictures} pictures have no caption, or an empty one; in a directory called "
                    f"N_class such a picture has the class{elsewhere}")
    elif bare < seen.pictures:
        missing = "reject"
        says.append(f"{bare} of {seen.pictures} pictures have no caption, or an empty one, and are left out; "
                    '"filename" takes their names, "constant" one caption for all')
    else:
        missing = "filename" if 2 * seen.spoken >= seen.missing > 0 else "empty"
        says.append(f"no picture has a caption; {'names have words' if missing == 'filename' else 'names say little'}; "
                    '"constant" is one caption for all')
    for count, kind, what in (
            (opened.several, "with several lines", 'each line is a caption; "first" and "join" are the others'),
            (opened.wildcards, "with {a|b}", "wildcards = true makes captions of each choice"),
            (opened.tags, "that look like tags", "shuffle = true, keep_tokens = 1 shuffles all but the first"),
            (opened.kept, "with |||", "with shuffle = true, what stands before it stays where it is"),
            (opened.triggers, "with [trigger]", 'trigger = "WORD" puts a word there')):
        if count:
            says.append(f"captions {kind}: {count} ({what})")
    return CaptionOptions(missing=missing), [Comment(at="caption", text=text) for text in says]


def _mask(seen: SourceOverview) -> Iterator[Comment]:
    if seen.masks:
        yield Comment(at="mask", text=f"{seen.masks} of {seen.pictures} pictures have a mask; the others train "
                      "everywhere. In train.toml: [loss] masked = true")
    elif seen.opened.alpha:
        yield Comment(at="mask", text='"alpha" would train what is not transparent')
