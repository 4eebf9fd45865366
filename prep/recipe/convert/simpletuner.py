"""Converts SimpleTuner's `multidatabackend.json` (a list of backends) to a recipe.

Only pictures on this machine become sources. Cache settings, and backends that are only caches, have no counterpart:
the key of a row holds all that decides it. Names, defaults and units were compared with SimpleTuner's main branch of
2026-08-22 (bc8e6ab7: documentation/DATALOADER.md, simpletuner/helpers/data_backend).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

from prep.batching.split import Role
from prep.buckets.sizes import MOST_SIDE
from prep.captions.options import CaptionOptions
from prep.parse import Unparsed, brief, expect, list_of, one_of
from prep.recipe.convert.draft import BALANCED, CUTS, VIEWS, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.schema import ImageOptions, Source
from prep.sources.item import MaskFrom

_CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds")
_REFERENCES = ("reference_strict", "reference_loose")  # conditioning_type; the former have the size of their picture
_CACHE = "prep manages caches: nothing to set"
_KEPT = "nothing is ever deleted from a source"
_WHEN = "all sources are trained on from the first step to the last: no counterpart"
_SIZES = "no counterpart; the nearest is [image] min_side, a minimum for the shorter side"
_SHRUNK = "a picture is always resized as a whole until it just covers its bucket"
_SPLITS: Mapping[str, str] = {"comma": ",", "space": " ", "period": "."}
_COLUMNS = {"filename_column": ("file_name", "image_path", "image", "file"),
            "caption_column": ("captions", "texts", "caption", "text", "prompt", "tags")}  # names in tables
_LEFT: Mapping[str, str] = {
    **dict.fromkeys(("cache_dir", "cache_dir_vae", "cache_dir_conditioning_image_embeds", "text_embeds", "image_embeds",
                     "conditioning_image_embeds", "write_batch_size", "text_encoder_batch_size", "vae_cache_ondemand",
                     "vae_cache_disable", "vae_cache_clear_each_epoch", "text_cache_ondemand", "text_cache_disable",
                     "metadata_update_interval", "skip_file_discovery", "hash_filenames", "cache_file_suffix",
                     "preserve_data_backend_cache", "compress_cache", "conditioning_image_embed_batch_size"), _CACHE),
    **dict.fromkeys(("delete_unwanted_images", "delete_problematic_images", "delete_nsfw_images"), _KEPT),
    **dict.fromkeys(("start_epoch", "start_step", "end_epoch", "end_step"), _WHEN),
    "maximum_image_size": _SHRUNK, "target_downsample_size": _SHRUNK,
    "minimum_aspect_ratio": "no counterpart; prep scan names extreme shapes",
    "maximum_aspect_ratio": "no counterpart; prep scan names extreme shapes",
    "caption_filter_list": "captions are not filtered: no counterpart",
    "probability": "every sample is shown in every epoch; the nearest is repeats",
    "max_num_samples": "all samples are used; include and exclude select them by name",
    "slider_strength": "no counterpart", "timestep_sampling_offset": "no counterpart",
    "conditioning": "no conditioning pictures are made: no counterpart",
    "source_dataset_id": "a mask or a reference belongs to the picture with its name",
}


def convert(document: Sequence[Any], base: Path) -> ConvertedRecipe:
    """The recipe for a list of backends from a file in the directory `base`. Raises `Unparsed`."""
    draft = Draft(tool="simpletuner", base=base)
    layers = [Layer(table=expect(value, dict, f"backends[{number}]"), where=f"backends[{number}]")
              for number, value in enumerate(document)]
    kinds = {"mask": "mask", **dict.fromkeys(_REFERENCES, "reference")}
    beside: dict[str, dict[str, Layer]] = {"mask": {}, "reference": {}}
    for layer in layers:
        if (kind := kinds.get(str(layer.table.get("conditioning_type")))) is not None:
            beside[kind][str(layer.table.get("id"))] = layer
    for layer in layers:
        config = ToolConfig(draft=draft, layers=[layer])
        if why := _why_not(config):
            draft.note(layer.where, layer.table.get("id"), f"skipped: {why}", "")
        else:
            _backend(draft, config, beside)
    return draft.finish()


def _why_not(config: ToolConfig) -> str:
    """The reason why a backend does not become a source; "" if it does."""
    if config.get("disabled", bool, False) or config.get("disable", bool, False):
        return "it is disabled"
    kind, place = config.get("dataset_type", str, "image"), config.get("type", str, "local")
    if kind in _CACHES:
        return _CACHE
    if kind == "conditioning" and config.get("conditioning_type", str, "") == "mask":
        return "its pictures are the masks of those that name it"
    if kind == "conditioning" and config.get("conditioning_type", str, "") in _REFERENCES:
        return "its pictures are the references of those that name it"
    if kind == "conditioning":
        return "conditioning pictures other than masks and references have no counterpart"
    if kind not in ("image", "eval"):
        return f"its pictures are {kind}, expected image"
    return "" if place == "local" else f"its type is {place}, expected local; download the pictures first"


def _backend(draft: Draft, config: ToolConfig, beside: Mapping[str, Mapping[str, Layer]]) -> None:
    config.get("id", str, "")
    if not config.has("instance_data_dir"):
        raise Unparsed(f"{config.layers[0].where} has no instance_data_dir, expected the directory of its pictures")
    path = draft.place(config.get("instance_data_dir", str, ""), config.key("instance_data_dir"))
    again = config.get("repeats", int, 0)
    role: Role = "validation" if config.get("dataset_type", str, "image") == "eval" else "train"
    for name in ("is_regularisation_data", "is_regularization_data"):
        if config.get(name, bool, False):
            config.note(name, 'role = "prior"; with preserve.prior = true in train.toml it is compared with '
                        f"predictions of the base model, as in SimpleTuner; {BALANCED}")
            role = "prior"
    table = _table(config)
    caption = _caption(config)
    mask, references = _beside(config, beside)
    image = _image(config)
    config.note_unread(_LEFT)
    draft.images.append((config.layers[0].where, image))
    draft.sources.append(Source(path=path, repeats=again + 1, role=role, table=table, mask=mask, references=references,
                                caption=caption))


def _beside(config: ToolConfig, beside: Mapping[str, Mapping[str, Layer]]
            ) -> tuple[MaskFrom | None, tuple[Path, ...] | None]:
    """The directory of masks of a backend, and its directories of references, in their order."""
    named = config.any("conditioning_data")
    names = [name for name in (named if isinstance(named, list) else [named]) if isinstance(name, str)]
    masks, references = ([layer for name in names if (layer := layers.get(name)) is not None
                          and isinstance(layer.table.get("instance_data_dir"), str)]
                         for layers in (beside["mask"], beside["reference"]))
    if not masks and len(references) < max(1, len(names)):
        config.note("conditioning_data", "only masks and references have a counterpart: "
                    f"{'not every' if references else 'no'} backend with this id has them")
    folders = config.draft.reference_folders([layer.table["instance_data_dir"] for layer in references],
                                             config.key("conditioning_data"))
    if not masks:
        return None, folders
    path = config.draft.place(masks[0].table["instance_data_dir"], masks[0].key("instance_data_dir"))
    if not path.is_dir():
        config.note("conditioning_data", "no masks are read: the directory does not exist")
    elif len(names) > 1 + len(references):
        config.note("conditioning_data", "the first of these that has masks is used")
    return (path if path.is_dir() else None), folders


def _caption(config: ToolConfig) -> CaptionOptions:
    choice = _shuffled(config)
    if config.get("disable_multiline_split", bool, False):
        choice = replace(choice, lines="join")
    strategy = one_of(config.get("caption_strategy", str, "filename"),
                      ("textfile", "instanceprompt", "filename", "parquet", "huggingface", "webshart", "csv"),
                      config.key("caption_strategy"))
    words = config.get("instance_prompt", str, "")
    if config.get("only_instance_prompt", bool, False) or strategy == "instanceprompt":
        for name in ("only_instance_prompt", "caption_strategy"):
            config.note(name, "instance_prompt is for pictures without a caption; a NAME.txt takes precedence")
        return replace(choice, missing="constant", constant=words)
    if strategy == "filename":
        config.note("caption_strategy", "a NAME.txt beside a picture takes precedence")
        choice = replace(choice, missing="filename")
    elif strategy not in ("textfile", "parquet"):
        config.note("caption_strategy", "captions are files beside pictures, or in a table")
    if config.get("prepend_instance_prompt", bool, False):
        return replace(choice, prefix=words)
    config.note("instance_prompt", "not used: neither prepend_instance_prompt nor only_instance_prompt is set")
    return choice


def _shuffled(config: ToolConfig) -> CaptionOptions:
    """Caption options for `caption_shuffle`; SimpleTuner has neither kept separators nor triggers."""
    inner = ToolConfig(draft=config.draft, layers=[Layer(table=config.get("caption_shuffle", dict, {}),
                                                         where=config.key("caption_shuffle"))])
    plain = CaptionOptions(keep_separator="")
    if not inner.get("enable", bool, False):
        return plain
    split = one_of(inner.get("split_on", str, "comma"), _SPLITS, inner.key("split_on"))
    keep_tokens = inner.get("position_start", int, 0)
    count, original = inner.get("count", int, 1), inner.get("include_original", bool, True)
    if original:
        inner.note("include_original", "the unshuffled caption occurs only by chance")
    inner.note_unread({"seed": "random draws depend on the caption only, not on a seed"})
    return replace(plain, shuffle=True, variants=max(1, count + original), separator=_SPLITS[split],
                   keep_tokens=keep_tokens)


def _table(config: ToolConfig) -> Path | None:
    """The table of a parquet backend; sizes are read from the pictures instead."""
    config.any("metadata_backend")
    if not config.has("parquet"):
        config.any("parquet")
        return None
    layer = Layer(table=config.get("parquet", dict, {}), where=config.key("parquet"))
    inner = ToolConfig(draft=config.draft, layers=[layer])
    path = inner.get("path", str, "")
    for name, known in _COLUMNS.items():
        if inner.get(name, str, known[0]) not in known:
            inner.note(name, f"the column must have one of these names: {', '.join(known)}")
    inner.note_unread({"width_column": "sizes are read from the pictures",
                       "height_column": "sizes are read from the pictures",
                       "fallback_caption_column": "no counterpart",
                       "identifier_includes_extension": "a name without its extension matches, too"})
    return config.draft.place(path, inner.key("path")) if path else None


def _image(config: ToolConfig) -> ImageOptions:
    """The image options: list, single or step buckets by the crop settings; enlarged up to the threshold, if any."""
    crop, aspect = config.get("crop", bool, False), config.get("crop_aspect", str, "square")
    resolution = _resolution(config)
    if crop and aspect == "random":
        config.note("crop_aspect", "a picture goes to the bucket with the nearest shape", at="image")
    ratios = _ratios(config) if crop and aspect in ("closest", "random") else ()
    if not ratios:
        config.note("crop_aspect_buckets", "no effect without crop_aspect closest or random", at="image")
    more = config.get("max_upscale_threshold", float, -1.0) if ratios else -1.0
    config.note("max_upscale_threshold", "a picture that needs more enlarging gets a smaller bucket, or is skipped if "
                "there is none" if ratios else "no effect without crop_aspect closest or random", at="image")
    least = config.any("minimum_image_size")
    by_side = config.any("resolution_type") == "pixel" and isinstance(least, int)
    if not by_side:
        config.note("minimum_image_size", _SIZES, at="image")
    style = config.get("crop_style", str, "random" if crop else "center")
    if style == "random" and crop:
        config.draft.note(config.key("crop_style"), config.any("crop_style"), CUTS, "image")
    elif style == "random":
        config.note("crop_style", "no effect without crop", at="image")
    elif style not in ("center", "centre"):
        config.note("crop_style", "pictures are cropped at the center", at="image")
    return ImageOptions(resolution=resolution, min_side=least if by_side else 0,
                        upscale=1 + more if more >= 0 else "allow",
                        buckets="list" if ratios else "single" if crop and aspect == "square" else "step",
                        sizes=tuple(sorted({_sized(ratio, resolution) for ratio in ratios})),
                        crop="random" if crop and style == "random" else "centre",
                        views=VIEWS if crop and style == "random" else 1)


def _ratios(config: ToolConfig) -> list[float]:
    """Aspect ratios, width / height, of the buckets that a picture may be cropped to. Raises `Unparsed`."""
    ratios = list_of(config.get("crop_aspect_buckets", list, []), lambda ratio, at: expect(ratio, float, at),
                     config.key("crop_aspect_buckets"))
    if bad := [ratio for ratio in ratios if not 1 / 64 <= ratio <= 64]:
        raise Unparsed(f"{config.key('crop_aspect_buckets')} has {bad[0]}, expected width / height, like 0.75")
    return ratios


def _sized(ratio: float, resolution: int) -> str:
    """A bucket with that aspect ratio and about the area of the resolution's square, in steps of 64."""
    width, height = (min(max(64, round(resolution * sqrt(part) / 64) * 64), MOST_SIDE) for part in (ratio, 1 / ratio))
    return f"{width}x{height}"


def _resolution(config: ToolConfig) -> int:
    kind = one_of(config.get("resolution_type", str, "pixel_area"), ("pixel", "area", "pixel_area"),
                  config.key("resolution_type"))
    key = config.key("resolution")
    if not config.has("resolution"):
        config.draft.note(key, None, "not in the file: SimpleTuner reads it from --resolution; 1024 is written",
                          "image")
        return 1024
    value = config.get("resolution", float, 0.0)
    if not 0 < value < 1 << 20:
        raise Unparsed(f"{key} is {brief(value)}, expected a side in pixels, or megapixels")
    if kind == "area":
        side = max(64, round(sqrt(value * 1e6) / 64) * 64)
        config.note("resolution", f"megapixels: the side of such a square, rounded to 64, is {side}", at="image")
        return side
    if kind == "pixel":
        config.note("resolution_type", "a bucket's area is about the square of the resolution, not its shorter side",
                    at="image")
    return round(value)
