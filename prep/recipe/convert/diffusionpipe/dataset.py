"""Converts diffusion-pipe's dataset TOML, a [[directory]] for each directory, to sources.

A key of a directory overrides the same key of the file. Pictures are shown at each of `resolutions`, in buckets of
ratios that are evenly spaced, listed, or given as sizes. Control pictures become references. Names, defaults and units
were compared with diffusion-pipe 8f83dbf (utils/dataset.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt, sqrt
from pathlib import Path
from typing import Any

from prep.batching.split import Role
from prep.buckets.sizes import MOST_RESOLUTION, MOST_SIDE
from prep.captions.options import CaptionOptions
from prep.formatting import format_size
from prep.geometry import Size
from prep.parse import Unparsed, brief, expect, list_of
from prep.recipe.convert.draft import FLAT, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.convert.length import Frequency, is_never, put_repeats
from prep.recipe.convert.training import number_of
from prep.recipe.schema import ImageOptions, Source
from prep.sources.item import MaskFrom

STEP = 16  # multiples of what the sides of its buckets are, in pixels; of HunyuanImage, of 32
_CAPTIONS = "captions.json"  # lists of captions by file name, which replace the .txt files
_MOST_RATIOS = 1000
_ORDER = "affects only the order and memory: nothing to set"
_LEFT: Mapping[str, str] = {
    **dict.fromkeys(("shuffle_metadata", "online_captions"), _ORDER),
    "default_mask_file": "pictures without a mask count whole: no counterpart",
    "subsample_ratio": "no counterpart; fewer files, or an exclude of the source",
    **dict.fromkeys(("video_clip_mode",), "videos have no counterpart"),
}


def is_dataset(document: Any) -> bool:
    """Whether a document is such a dataset file."""
    listed = document.get("directory") if isinstance(document, dict) else None
    return isinstance(listed, list) and any(isinstance(entry, dict) and "path" in entry for entry in listed)


def convert(document: Mapping[str, Any], base: Path) -> ConvertedRecipe:
    """The recipe for a dataset file in the directory `base`. Raises `Unparsed`."""
    draft = Draft(tool="diffusion-pipe", base=base)
    fill(draft, document)
    return finish(draft)


def finish(draft: Draft) -> ConvertedRecipe:
    """The recipe; control pictures are scaled to their pictures' sizes. Raises `Unparsed` if there is no source."""
    converted = draft.finish()
    fit = "bucket" if any(source.references for source in draft.sources) else "family"
    return replace(converted, recipe=replace(converted.recipe, reference_fit=fit))


def fill(draft: Draft, document: Mapping[str, Any], *, role: Role = "train", step: int = STEP) -> None:
    """Adds the sources of a dataset file, whose bucket sides are multiples of `step`. Raises `Unparsed`."""
    shared = Layer(table={name: value for name, value in document.items() if name != "directory"}, where="")
    shown: list[Frequency] = []
    for number, table in enumerate(list_of(document["directory"], lambda value, at: expect(value, dict, at),
                                           "directory")):
        own = Layer(table=table, where=f"directory[{number}]")
        shown += _directory(ToolConfig(draft=draft, layers=[own, shared]), own, role, step)
    ToolConfig(draft=draft, layers=[shared]).note_unread(_LEFT, at="")
    if role == "train":
        put_repeats(draft, shown, sides=1)
        draft.epoch *= len(draft.chosen_image().resolutions)


def _directory(config: ToolConfig, own: Layer, role: Role, step: int) -> list[Frequency]:
    """Adds the sources of a directory: itself, and each tar in it. How often an epoch shows the pictures of each."""
    draft, repeats = config.draft, number_of(config.any("num_repeats"))
    repeats = 1.0 if repeats is None else repeats
    path = draft.place(config.get("path", str, ""), config.key("path"))
    table = path / _CAPTIONS if (path / _CAPTIONS).is_file() else None
    if (path / "metadata.jsonl").exists():
        draft.note(own.key("path"), str(path), "has a metadata.jsonl, whose captions are read here, and not there",
                   draft.here)
    source = Source(path=path, table=table, role=role, exclude=FLAT, mask=_mask(config), caption=_caption(config),
                    references=draft.reference_folders([config.get("control_path", str, "")],
                                                       config.key("control_path"))
                    if config.has("control_path") else None)
    frequency = Frequency(key=own.key("num_repeats"), times=repeats)
    if is_never(frequency, source):
        draft.note(own.where, None, f"skipped: an epoch has none of its pictures, with num_repeats = {repeats:g}", "")
        return []
    image = _image(config, step)
    config.any("control_path")
    ToolConfig(draft=draft, layers=[own]).note_unread(_LEFT)
    tars = sorted(path.glob("*.tar")) if path.is_dir() else []
    for place in (path, *tars):
        draft.images.append((own.where, image))
        draft.sources.append(source if place == path else replace(source, path=place, exclude=(), table=None))
    return [frequency] * (1 + len(tars))


def _caption(config: ToolConfig) -> CaptionOptions:
    """Caption options: a file is one caption; pictures without are left out, unless the file says otherwise."""
    count = number_of(config.any("cache_shuffle_num")) or 0
    shuffled = count > 0 or config.get("shuffle_tags", bool, False)
    options = CaptionOptions(
        missing="reject" if config.get("skip_empty_caption", bool, True) else "empty", lines="join", keep_separator="",
        prefix=config.get("caption_prefix", str, ""), shuffle=shuffled)
    delimiter = config.get("cache_shuffle_delimiter", str, ", ")
    return replace(options, variants=max(1, int(count)), separator=delimiter.strip() or delimiter or ","
                   ) if shuffled else options


def _mask(config: ToolConfig) -> MaskFrom | None:
    if not config.has("mask_path"):
        return None
    path = config.draft.place(config.get("mask_path", str, ""), config.key("mask_path"))
    if not path.is_dir():
        config.note("mask_path", "no masks are read: it is not a directory")
    return path if path.is_dir() else None


# ---- buckets ---------------------------------------------------------------------------------------------------------


def _image(config: ToolConfig, step: int) -> ImageOptions:
    """The image options. Ratios at one resolution are written as sizes; at several, those of buckets "ratio"."""
    _frames(config)
    listed = config.any("size_buckets") or None
    sides = _resolutions(config, step)
    if listed is not None:
        for name in ("ar_buckets", "min_ar", "max_ar", "num_ar_buckets", "enable_ar_bucket"):
            config.any(name)
        config.note("resolutions", "size_buckets is used instead", at="image")
        return _of_sizes([_size(entry, config.key("size_buckets"), config) for entry in _list(listed, config)],
                         step)
    if (ratios := _ratios(config)) is None:
        return ImageOptions(resolution=_joined(sides), buckets="single", step=step, upscale="allow")
    if len(sides) == 1:
        return _of_sizes([_bucket(sides[0], ratio, step) for ratio in ratios], step, sides[0])
    key = "ar_buckets" if config.has("ar_buckets") else "num_ar_buckets"
    config.draft.note(config.key(key), config.any(key), "several resolutions have the ratios of image.buckets = "
                      '"ratio", 1 to 4; those of one resolution are written as sizes', "image")
    return ImageOptions(resolution=_joined(sides), buckets="ratio", step=step, upscale="allow")


def _frames(config: ToolConfig) -> None:
    frames = config.any("frame_buckets")
    if frames not in (None, [1]):
        config.note("frame_buckets", "videos have no counterpart; pictures are used", at="image")


def _resolutions(config: ToolConfig, step: int) -> list[int]:
    """The sides of squares, multiples of `step`; a pair is an area. Raises `Unparsed`."""
    key, listed = config.key("resolutions"), config.any("resolutions")
    if listed is None and not config.has("size_buckets"):
        raise Unparsed(f"{config.layers[0].where} has no resolutions, expected a list like [1024]")
    sides = []
    for value in _list(listed or [512], config):
        pair = value if isinstance(value, list) and len(value) == 2 else [value, value]
        width, height = (expect(number_of(side), float, key) for side in pair)
        if not (width >= 1 and height >= 1):
            raise Unparsed(f"{key} has {brief(value)}, expected sides of at least 1 pixel, or pairs of these")
        sides.append(min(_rounded(sqrt(width) * sqrt(height), step), MOST_RESOLUTION // step * step))
    return sorted(set(sides)) or [512]


def _ratios(config: ToolConfig) -> list[float] | None:
    """The ratios of width to height; `None` without buckets, where every picture is a square. Raises `Unparsed`."""
    on = config.get("enable_ar_bucket", bool, False)
    given = config.any("ar_buckets")
    ends = [number_of(config.any(name)) for name in ("min_ar", "max_ar", "num_ar_buckets")]
    if not on:
        return None
    if given:
        return [_ratio(value, config.key("ar_buckets")) for value in _list(given, config)]
    low, high, count = ends
    if low is None or high is None or count is None:
        raise Unparsed("enable_ar_bucket needs ar_buckets, or min_ar, max_ar and num_ar_buckets, which are not all "
                       "there")
    if not (0 < low <= high and 1 <= count <= _MOST_RATIOS):
        raise Unparsed(f"min_ar, max_ar, num_ar_buckets are {brief(ends)}, expected 0 < min_ar <= max_ar, and 1 to "
                       f"{_MOST_RATIOS} buckets")
    return [low * (high / low) ** (number / max(1, count - 1)) for number in range(int(count))]


def _ratio(value: Any, key: str) -> float:
    pair = [number_of(side) for side in (value if isinstance(value, list) else [value, 1])]
    if len(pair) != 2 or not all(side and side > 0 for side in pair):
        raise Unparsed(f"{key} has {brief(value)}, expected ratios of width to height, or [width, height]")
    return float(pair[0] or 1) / float(pair[1] or 1)


def _size(value: Any, key: str, config: ToolConfig) -> Size:
    """A size of [width, height, frames]; frames other than 1 become a note."""
    entry = list_of(value, lambda side, at: expect(side, int, at), key)
    if len(entry) not in (2, 3):
        raise Unparsed(f"{key} has {brief(value)}, expected [width, height, frames]")
    if entry[2:] not in ([], [1]):
        config.draft.note(key, value, "videos have no counterpart; the size is used for pictures", "image")
    return entry[0], entry[1]


def _bucket(side: int, ratio: float, step: int) -> Size:
    """The size of about the area of a square with this side, with sides that are multiples of `step`."""
    width = sqrt(side * side * ratio)
    return _rounded(width, step), _rounded(side * side / width, step)


def _rounded(side: float, step: int) -> int:
    return max(step, round(min(side, MOST_SIDE) / step) * step)


def _of_sizes(sizes: Sequence[Size], step: int, side: int = 0) -> ImageOptions:
    """Options with a list of sizes, cut to multiples of `step`; `side` is that of their area, 0: of the first's."""
    cut = list(dict.fromkeys((_rounded(width, step), _rounded(height, step)) for width, height in sizes))
    if not cut:
        raise Unparsed("size_buckets is [], expected sizes")
    side = side or min(max(isqrt(cut[0][0] * cut[0][1]), step), MOST_RESOLUTION)
    return ImageOptions(resolution=side, buckets="list", sizes=tuple(format_size(size) for size in cut), step=step,
                        upscale="allow")


def _joined(sides: Sequence[int]) -> int | tuple[int, ...]:
    return sides[0] if len(sides) == 1 else tuple(sides)


def _list(value: Any, config: ToolConfig) -> list[Any]:
    return expect(value, list, f"a list of buckets in {config.layers[0].where}")
