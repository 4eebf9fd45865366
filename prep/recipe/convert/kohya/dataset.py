"""Converts kohya's dataset TOML (`--dataset_config` of sd-scripts) to a recipe.

A key of a subset overrides the same key of its dataset, which overrides `[general]`. In its documentation, the
DreamBooth method means a directory with caption files, the fine-tuning method one with a metadata file.
(sd-scripts: docs/config_README-en.md)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from math import gcd, isqrt
from pathlib import Path
from typing import Any

from prep.batching.split import Role
from prep.buckets.sizes import MOST_SIDE
from prep.captions.options import CaptionOptions
from prep.formatting import format_size
from prep.geometry import Size
from prep.parse import Unparsed, brief, expect, list_of
from prep.recipe.convert.draft import BALANCED, CUTS, FLAT, VIEWS, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.schema import ImageOptions, Source
from prep.sources.item import MaskFrom

_TRAIN = "a training setting: in train.toml it is"
_DRAWN = "captions are drawn once and encoded: [caption] variants sets how many per picture"
_LEFT: Mapping[str, str] = {
    "color_aug": "colors are never changed: no counterpart",
    "face_crop_aug_range": "faces are not detected: no counterpart",
    "random_crop": CUTS,
    "caption_dropout_rate": f"{_TRAIN} caption_dropout",
    "caption_dropout_every_n_epochs": "captions are dropped in training, not in the cache: no counterpart",
    "token_warmup_min": "the number of tags does not depend on the step: no counterpart",
    "token_warmup_step": "the number of tags does not depend on the step: no counterpart",
    "cache_info": "facts about files are always cached; nothing to set",
    "resize_interpolation": "pictures are resized by Lanczos",
    "custom_attributes": "no counterpart",
}
_DATASET: Mapping[str, str] = {
    "network_multiplier": "no counterpart",
    "skip_image_resolution": "no counterpart; the nearest is [image] min_side, a minimum for the shorter side",
    "validation_seed": "validation pictures are chosen by the digest of their bytes, not by a seed",
}
_KINDS = (".txt", ".caption")
CELL = 8  # pixels of a latent cell's side; sd-scripts cuts a picture to whole cells


def convert(document: Mapping[str, Any], base: Path) -> ConvertedRecipe:
    """The recipe for a dataset file in the directory `base`. Raises `Unparsed`."""
    draft = Draft(tool="kohya", base=base)
    fill(draft, document, Layer(table={}, where=""))
    return draft.finish()


def fill(draft: Draft, document: Mapping[str, Any], args: Layer) -> None:
    """Adds the sources of a dataset file, with `args` of the command line as defaults. Raises `Unparsed`."""
    general = Layer(table=expect(document.get("general", {}), dict, "general"), where="general")
    splits: list[tuple[str, float]] = []
    for number, table in enumerate(list_of(document["datasets"], _table, "datasets")):
        layer = Layer(table={**table, "subsets": None}, where=f"datasets[{number}]")
        config = ToolConfig(draft=draft, layers=[layer, general, args])
        before, image = len(draft.sources), _image(config)
        for place, subset in enumerate(list_of(table.get("subsets", []), _table, f"{layer.where}.subsets")):
            inner = Layer(table=subset, where=f"{layer.where}.subsets[{place}]")
            _subset(ToolConfig(draft=draft, layers=[inner, layer, general, args]), inner, image)
        if len(draft.sources) > before:
            splits.append((config.key("validation_split"), config.get("validation_split", float, 0.0)))
        config.any("subsets")
        ToolConfig(draft=draft, layers=[layer]).note_unread(_DATASET, at="")
    _validation(draft, splits)
    ToolConfig(draft=draft, layers=[general]).note_unread({**_LEFT, **_DATASET}, at="")
    whole = Layer(table=document, where="", keys_read={"general", "datasets"})
    ToolConfig(draft=draft, layers=[whole]).note_unread(at="")


def _table(value: Any, where: str) -> dict[str, Any]:
    return expect(value, dict, where)


def _subset(config: ToolConfig, own: Layer, image: ImageOptions) -> None:
    """Adds the source of a subset; `image` are the image options of its dataset."""
    draft = config.draft
    repeats = config.get("num_repeats", int, 1)
    if repeats < 1:
        draft.note(own.where, own.table.get("image_dir"), f"skipped: num_repeats is {repeats}", "")
        return
    tabled = config.has("metadata_file")
    if not config.has("image_dir"):
        raise Unparsed(f"{own.where} has no image_dir, expected one: a source is a directory")
    path = draft.place(config.get("image_dir", str, ""), config.key("image_dir"))
    table = draft.place(config.get("metadata_file", str, ""), config.key("metadata_file")) if tabled else None
    if tabled:
        config.note("metadata_file", "a NAME.txt beside a picture takes precedence over the table; "
                    "pictures with neither are skipped")
    caption = _caption(config, tabled)
    mask, references = _beside(config)
    role: Role = "prior" if config.get("is_reg", bool, False) else "train"
    config.note("is_reg", f'role = "prior": {BALANCED}, as in sd-scripts; prior_loss_weight is the weight of the '
                "source")
    crop, flip = config.get("random_crop", bool, False), config.get("flip_aug", bool, False)
    draft.dropouts.append(config.get("caption_dropout_rate", float, 0.0))
    config.note_all({name: said for name, said in _LEFT.items() if name != "caption_dropout_rate" or not draft.trains})
    ToolConfig(draft=draft, layers=[own]).note_unread()
    draft.images.append((own.where, replace(image, crop="random" if crop else "centre", views=VIEWS if crop else 1,
                                            flip="both" if flip else "none")))
    draft.sources.append(Source(path=path, repeats=repeats, role=role, table=table, mask=mask, references=references,
                                caption=caption, exclude=() if tabled else FLAT))


def _caption(config: ToolConfig, tabled: bool) -> CaptionOptions:
    extension = config.get("caption_extension", str, "")
    if extension == ".caption":
        config.note("caption_extension", "NAME.caption is read where there is no NAME.txt")
    elif extension not in ("", *_KINDS):
        config.note("caption_extension", f"captions are {' or '.join(_KINDS)}; rename the files")
    wildcards, shuffle = config.get("enable_wildcard", bool, False), config.get("shuffle_caption", bool, False)
    dropout = config.get("caption_tag_dropout_rate", float, 0.0)
    prefix, suffix = config.get("caption_prefix", str, ""), config.get("caption_suffix", str, "")
    for name in ("shuffle_caption", "caption_tag_dropout_rate"):
        config.note(name, _DRAWN)
    config.note("enable_wildcard", _DRAWN)
    if shuffle or dropout:
        for name in ("caption_prefix", "caption_suffix"):
            config.note(name, "it keeps its place; sd-scripts shuffles its tags with the others")
    named = config.get("class_tokens", str, "")
    missing = "reject" if tabled else "constant" if named else "stop"
    if tabled:
        config.note("class_tokens", "not used with a metadata_file")
    return CaptionOptions(
        missing=missing, constant=named if missing == "constant" else "", lines="all" if wildcards else "first",
        wildcards=wildcards, shuffle=shuffle, dropout=dropout, prefix=prefix, suffix=suffix,
        separator=config.get("caption_separator", str, ",") or ",", keep_tokens=config.get("keep_tokens", int, 0),
        keep_separator=config.get("keep_tokens_separator", str, ""),
        together=config.get("secondary_separator", str, ""))


def _beside(config: ToolConfig) -> tuple[MaskFrom | None, tuple[Path, ...] | None]:
    """The masks of a subset, and its references: sd-scripts reads `conditioning_data_dir` as masks with masked_loss,
    and as conditions where it trains a ControlNet."""
    alpha = config.get("alpha_mask", bool, False)
    if not config.has("conditioning_data_dir"):
        return ("alpha" if alpha else None), None
    text, key = config.get("conditioning_data_dir", str, ""), config.key("conditioning_data_dir")
    path = config.draft.place(text, key)
    if config.draft.trains and not config.any("masked_loss"):
        config.note("conditioning_data_dir", "read as references, since masked_loss is not set: conditions, as of an "
                    "edit model; a ControlNet itself has no counterpart")
        return ("alpha" if alpha else None), config.draft.reference_folders([text], key)
    config.note("conditioning_data_dir", "read as masks; if they are conditions, as for a ControlNet or an edit model, "
                "write references = [...] instead" if path.is_dir() else "no masks are read: it is not a directory")
    if alpha:
        config.note("alpha_mask", "the masks of conditioning_data_dir are used instead")
    return (path if path.is_dir() else None), None  # a recipe may only name an existing mask directory


def _image(config: ToolConfig) -> ImageOptions:
    """The image options: one size without buckets. With bucket_no_upscale, sd-scripts ignores bucket limits."""
    if config.draft.trains:
        config.draft.batches += [count for count in [config.get("batch_size", int, 0)] if count > 0]
    else:
        config.note("batch_size", f"{_TRAIN} batch_size", at="")
    sides = resolution_of(config, (512, 512), "sd-scripts reads it from --resolution; 512 is written")
    resolution, step = isqrt(sides[0] * sides[1]), config.get("bucket_reso_steps", int, 64)
    bucketed, small = config.get("enable_bucket", bool, False), config.get("bucket_no_upscale", bool, False)
    least, most = config.get("min_bucket_reso", int, 256), config.get("max_bucket_reso", int, 1024)
    if not bucketed:
        for name in ("bucket_no_upscale", "bucket_reso_steps", "min_bucket_reso", "max_bucket_reso"):
            config.note(name, "no effect without enable_bucket", at="image")
        return one_size(config, sides)
    if sides[0] != sides[1]:
        config.note("resolution", "a bucket's area is about the square of one number", at="image")
    if small:
        config.note("bucket_no_upscale", "a picture gets the nearest bucket that it fills; sd-scripts cuts each to a "
                    "bucket of its own shape, in multiples of bucket_reso_steps", at="image")
        for name in ("min_bucket_reso", "max_bucket_reso"):
            config.note(name, "sd-scripts ignores it with bucket_no_upscale", at="image")
        return ImageOptions(resolution=resolution, step=step)
    return ImageOptions(resolution=resolution, step=step, shortest=least, longest=most, upscale="allow")


def one_size(config: ToolConfig, sides: Size) -> ImageOptions:
    """Options that bring every picture to one size, enlarging smaller ones; sides are multiples of a latent cell's."""
    if sides[0] == sides[1]:
        return ImageOptions(resolution=sides[0], buckets="single", upscale="allow")
    width, height = (min(max(CELL, side // CELL * CELL), MOST_SIDE) for side in sides)
    if (width, height) != sides:
        config.note("resolution", f"sides are multiples of {CELL} pixels, up to {MOST_SIDE}; "
                    f"{format_size((width, height))} is written", at="image")
    return ImageOptions(resolution=isqrt(width * height), buckets="list", sizes=(format_size((width, height)),),
                        step=gcd(64, width, height), upscale="allow")


def resolution_of(config: ToolConfig, usual: Size, said: str) -> Size:
    """The resolution, width first; `usual` if the file has none, with a note that ends with what is `said`."""
    value, key = config.any("resolution"), config.key("resolution")
    if value is None:
        config.draft.note(key, None, f"not in the file: {said}", "image")
        return usual
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}(,\d{1,6})?", value.replace(" ", "")):  # from a command line
        value = [int(word) for word in value.split(",")]
        value = value[0] if len(value) == 1 else value
    alone = isinstance(value, int) and not isinstance(value, bool)
    sides = [value, value] if alone else list_of(value, lambda side, at: expect(side, int, at), key)
    if len(sides) != 2 or min(sides) < 1:
        raise Unparsed(f"{key} is {brief(value)}, expected one or two whole numbers")
    return sides[0], sides[1]


def _validation(draft: Draft, splits: list[tuple[str, float]]) -> None:
    """Sets one validation fraction for all pictures: the largest of `splits`."""
    if not splits or not any(split for _, split in splits):
        return
    key, draft.validation = max(splits, key=lambda split: split[1])
    draft.note(key, draft.validation, "pictures are chosen by the digest of their bytes, from all sources",
               "validation")
