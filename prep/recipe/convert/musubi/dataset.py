"""Converts musubi-tuner's dataset TOML (or JSON), also with metadata in JSON lines, to a recipe.

A key of a dataset overrides the same key of `[general]`. Control pictures become references: those of a directory by
name, those of JSON lines by path. Videos have no counterpart. Names, defaults and units were compared with musubi-tuner
30c658c (docs/dataset_config.md).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from math import isqrt
from pathlib import Path
from typing import Any

from prep.captions.options import CaptionOptions
from prep.errors import PathError
from prep.fs.text import TooLarge, read_small
from prep.parse import Unparsed, expect, list_of, within
from prep.recipe.convert.draft import FLAT, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.convert.kohya.dataset import one_size, resolution_of
from prep.recipe.schema import SETTINGS, ImageOptions, Source

_MARKS = {"image_directory", "image_jsonl_file", "video_directory", "video_jsonl_file"}  # of a dataset
MOST_LINES = 1 << 26  # bytes of a file of JSON lines that is read for the directory of its pictures
STEP = 16  # pixels between bucket sides, for most of its models
_USUAL = (960, 544)  # pixels, width first
_LEFT: Mapping[str, str] = {
    "cache_directory": "prep manages caches: nothing to set",
    "batch_size": "belongs to training: in train.toml, it is batch_size",
    "multiple_target": "pictures of layers have no counterpart",
    **dict.fromkeys(("fp_latent_window_size", "fp_1f_clean_indices", "fp_1f_target_index", "fp_1f_no_post"),
                    "FramePack's videos have no counterpart"),
}
# Earlier names of these settings come after them.
_WHOLE = ("no_resize_control", "flux_kontext_no_resize_control", "qwen_image_edit_no_resize_control")
_SCALED = ("control_resolution", "qwen_image_edit_control_resolution")


def is_dataset(document: Any) -> bool:
    """Whether a document is such a dataset file."""
    listed = document.get("datasets") if isinstance(document, dict) else None
    return isinstance(listed, list) and any(isinstance(entry, dict) and _MARKS & entry.keys() for entry in listed)


def convert(document: Mapping[str, Any], base: Path) -> ConvertedRecipe:
    """The recipe for a dataset file in the directory `base`. Raises `Unparsed`."""
    draft = Draft(tool="musubi-tuner", base=base)
    references = fill(draft, document)
    converted = draft.finish()
    return replace(converted, recipe=replace(converted.recipe, **references))


def fill(draft: Draft, document: Mapping[str, Any]) -> dict[str, Any]:
    """Adds the sources of a dataset file; the recipe's settings of references. Raises `Unparsed`."""
    general = Layer(table=expect(document.get("general", {}), dict, "general"), where="general")
    fits: dict[str, tuple[str, int]] = {}  # how references are scaled, by dataset
    for number, table in enumerate(list_of(document["datasets"], lambda value, at: expect(value, dict, at),
                                           "datasets")):
        own = Layer(table=table, where=f"datasets[{number}]")
        config = ToolConfig(draft=draft, layers=[own, general])
        if config.has("image_directory") or config.has("image_jsonl_file"):
            fit = _fit(config)
            _dataset(config, own)
            if config.has("control_directory") or config.has("image_jsonl_file"):
                fits[own.where] = fit
        else:
            draft.note(own.where, None, "skipped: it has neither image_directory nor image_jsonl_file; videos have no "
                       "counterpart", "")
    ToolConfig(draft=draft, layers=[general]).note_unread(_LEFT, at="")
    ToolConfig(draft=draft, layers=[Layer(table=document, where="", keys_read={"general", "datasets"})]
               ).note_unread(at="")
    first = next(iter(fits.values()), ("family", 0))
    for where in [where for where, fit in fits.items() if fit != first]:
        draft.note(f"{where}: control pictures", None, "a recipe has one [references] fit and resolution, those of the "
                   "first dataset with such pictures", "references")
    side = draft.within("control_resolution", first[1], SETTINGS["references.resolution"].bounds, "references")
    return {"reference_fit": first[0], "reference_resolution": side}


def _fit(config: ToolConfig) -> tuple[str, int]:
    """How control pictures are scaled, as [references] fit and resolution: to their picture's size, unless a setting
    says to an area, or not at all."""
    value = next((config.any(name) for name in _SCALED if config.has(name)), None)
    for name in (*_SCALED, *_WHOLE):
        config.any(name)
    if value is not None:
        sides = value if isinstance(value, list) and len(value) == 2 else [value, value]
        width, height = (expect(side, int, config.key(_SCALED[0])) for side in sides)
        within(width * height, 1, 1 << 32, config.key(_SCALED[0]))
        return "family", isqrt(width * height)
    return ("exact" if any(config.get(name, bool, False) for name in _WHOLE) else "bucket"), 0


def _dataset(config: ToolConfig, own: Layer) -> None:
    """Adds the source of a dataset of pictures."""
    draft = config.draft
    repeats = config.get("num_repeats", int, 1)
    if repeats < 1:
        draft.note(own.where, None, f"skipped: num_repeats is {repeats}", "")
        return
    image = _image(config)
    extension = config.get("caption_extension", str, "")
    if extension not in ("", ".txt", ".caption"):
        config.note("caption_extension", "captions are .txt or .caption; rename the files")
    table, references = None, None
    if config.has("image_jsonl_file"):
        table = draft.place(config.get("image_jsonl_file", str, ""), config.key("image_jsonl_file"))
        path = _pictures_of(config, table)
        config.note("image_jsonl_file", "its pictures are used, with the references of control_path; others in the "
                    "same directories have no caption and are skipped")
        config.note("image_directory", "image_jsonl_file is used instead")
    else:
        path = draft.place(config.get("image_directory", str, ""), config.key("image_directory"))
        if config.has("control_directory"):
            references = draft.reference_folders([config.get("control_directory", str, "")],
                                                 config.key("control_directory"))
    config.any("control_directory")
    if draft.trains:
        draft.batches.append(config.get("batch_size", int, 1))
    ToolConfig(draft=draft, layers=[own]).note_unread(_LEFT)
    draft.images.append((own.where, image))
    draft.sources.append(Source(path=path, repeats=repeats, table=table, references=references,
                                exclude=FLAT if table is None else (),
                                caption=CaptionOptions(lines="join", missing="stop" if table is None else "reject",
                                                       keep_separator="")))


def _image(config: ToolConfig) -> ImageOptions:
    """The image options: buckets about the resolution's area, or one size."""
    sides = resolution_of(config, _USUAL, "960x544 is the default there")
    if not config.get("enable_bucket", bool, False):
        config.note("bucket_no_upscale", "no effect without enable_bucket", at="image")
        return one_size(config, sides)
    small = config.get("bucket_no_upscale", bool, False)
    return ImageOptions(resolution=isqrt(sides[0] * sides[1]), step=STEP, upscale="never" if small else "allow")


# ---- JSON lines ------------------------------------------------------------------------------------------------------


def _pictures_of(config: ToolConfig, table: Path) -> Path:
    """The directory that the pictures and references in a file of JSON lines have in common, as the source's; that of
    the file, with a note, if they have none."""
    try:
        named = list(_named_in(table))
    except (OSError, PathError, TooLarge):
        named = []  # that it cannot be read is a finding
    bases = [base for base in (Path.cwd(), table.parent) if named and (base / named[0]).exists()]
    if bases and all(not Path(name).is_absolute() for name in named) and bases[0] != table.parent:
        config.note("image_jsonl_file", f"its paths are relative to {bases[0]}, where prep init runs", at=None)
        return bases[0]
    absolute = [os.path.dirname(name) for name in named if Path(name).is_absolute()]  # noqa: PTH120  # as spelled
    if not absolute:
        return table.parent
    with suppress(ValueError):
        common = Path(os.path.commonpath(absolute))
        if len(common.parts) > 1:
            return common
    config.note("image_jsonl_file", "its pictures have no directory in common: sources are directories, so make a file "
                "for each")
    return table.parent


def _named_in(table: Path) -> Iterator[str]:
    """The paths in a file of JSON lines. Raises `OSError`, `PathError`, `TooLarge`."""
    for line in read_small(table, most=MOST_LINES, regular=True).splitlines():
        with suppress(ValueError, RecursionError, Unparsed):
            row = expect(json.loads(line), dict, "a line")
            for key, value in row.items():
                if isinstance(value, str) and value and str(key).startswith(("image_path", "control_path")):
                    yield value
