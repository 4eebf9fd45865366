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
from prep.recipe.convert.draft import BALANCED, CUTS, VIEWS, Asked, Converted, Draft, Layer
from prep.recipe.schema import ImageOptions, Source
from prep.sources.item import MaskFrom

_CACHES = ("text_embeds", "image_embeds", "conditioning_image_embeds")
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
    "source_dataset_id": "a mask belongs to the picture with its name",
}


def convert(document: Sequence[Any], base: Path) -> Converted:
    """The recipe for a list of backends from a file in the directory `base`. Raises `Unparsed`."""
    draft = Draft(tool="simpletuner", base=base)
    layers = [Layer(table=expect(value, dict, f"backends[{number}]"), where=f"backends[{number}]")
              for number, value in enumerate(document)]
    masks = {str(layer.table.get("id")): layer for layer in layers if layer.table.get("conditioning_type") == "mask"}
    for layer in layers:
        asked = Asked(draft=draft, layers=[layer])
        if why := _why_not(asked):
            draft.note(layer.where, layer.table.get("id"), f"skipped: {why}", "")
        else:
            _backend(draft, asked, masks)
    return draft.finish()


def _why_not(asked: Asked) -> str:
    """Why a backend does not become a source; "" if it does."""
    if asked.get("disabled", bool, False) or asked.get("disable", bool, False):
        return "it is disabled"
    kind, place = asked.get("dataset_type", str, "image"), asked.get("type", str, "local")
    if kind in _CACHES:
        return _CACHE
    if kind == "conditioning" and asked.get("conditioning_type", str, "") == "mask":
        return "its pictures are the masks of those that name it"
    if kind == "conditioning":
        return "conditioning pictures other than masks have no counterpart"
    if kind not in ("image", "eval"):
        return f"its pictures are {kind}, expected image"
    return "" if place == "local" else f"its type is {place}, expected local; download the pictures first"


def _backend(draft: Draft, asked: Asked, masks: Mapping[str, Layer]) -> None:
    asked.get("id", str, "")
    if not asked.has("instance_data_dir"):
        raise Unparsed(f"{asked.layers[0].where} has no instance_data_dir, expected the directory of its pictures")
    path = draft.place(asked.get("instance_data_dir", str, ""), asked.key("instance_data_dir"))
    again = asked.get("repeats", int, 0)
    role: Role = "validation" if asked.get("dataset_type", str, "image") == "eval" else "train"
    for name in ("is_regularisation_data", "is_regularization_data"):
        if asked.get(name, bool, False):
            asked.told(name, f'role = "prior": the loss compares with the pictures themselves, not with predictions '
                       f"of the base model; {BALANCED}")
            role = "prior"
    table = _table(asked)
    caption = _caption(asked)
    mask = _mask(asked, masks)
    image = _image(asked)
    asked.left(_LEFT)
    draft.images.append((asked.layers[0].where, image))
    draft.sources.append(Source(path=path, repeats=again + 1, role=role, table=table, mask=mask, caption=caption))


def _mask(asked: Asked, masks: Mapping[str, Layer]) -> MaskFrom | None:
    named = asked.any("conditioning_data")
    names = [one for one in (named if isinstance(named, list) else [named]) if isinstance(one, str)]
    found = [masks[one] for one in names if one in masks]
    if not found or not isinstance(found[0].table.get("instance_data_dir"), str):
        asked.told("conditioning_data", "only masks have a counterpart: no backend with this id has them")
        return None
    path = asked.draft.place(found[0].table["instance_data_dir"], found[0].key("instance_data_dir"))
    if not path.is_dir():
        asked.told("conditioning_data", "no masks are read: the directory does not exist")
    elif isinstance(named, list) and len(named) > 1:
        asked.told("conditioning_data", "the first of these that has masks is used")
    return path if path.is_dir() else None


def _caption(asked: Asked) -> CaptionOptions:
    choice = _shuffled(asked)
    if asked.get("disable_multiline_split", bool, False):
        choice = replace(choice, lines="join")
    strategy = one_of(asked.get("caption_strategy", str, "filename"),
                      ("textfile", "instanceprompt", "filename", "parquet", "huggingface", "webshart", "csv"),
                      asked.key("caption_strategy"))
    words = asked.get("instance_prompt", str, "")
    if asked.get("only_instance_prompt", bool, False) or strategy == "instanceprompt":
        for name in ("only_instance_prompt", "caption_strategy"):
            asked.told(name, "instance_prompt is for pictures without a caption; a NAME.txt takes precedence")
        return replace(choice, missing="constant", constant=words)
    if strategy == "filename":
        asked.told("caption_strategy", "a NAME.txt beside a picture takes precedence")
        choice = replace(choice, missing="filename")
    elif strategy not in ("textfile", "parquet"):
        asked.told("caption_strategy", "captions are files beside pictures, or in a table")
    if asked.get("prepend_instance_prompt", bool, False):
        return replace(choice, prefix=words)
    asked.told("instance_prompt", "not used: neither prepend_instance_prompt nor only_instance_prompt is set")
    return choice


def _shuffled(asked: Asked) -> CaptionOptions:
    """Caption options for `caption_shuffle`; SimpleTuner has neither kept separators nor triggers."""
    inner = Asked(draft=asked.draft, layers=[Layer(table=asked.get("caption_shuffle", dict, {}),
                                                   where=asked.key("caption_shuffle"))])
    plain = CaptionOptions(keep_separator="")
    if not inner.get("enable", bool, False):
        return plain
    split = one_of(inner.get("split_on", str, "comma"), _SPLITS, inner.key("split_on"))
    kept = inner.get("position_start", int, 0)
    count, original = inner.get("count", int, 1), inner.get("include_original", bool, True)
    if original:
        inner.told("include_original", "the unshuffled caption occurs only by chance")
    inner.left({"seed": "random draws depend on the caption only, not on a seed"})
    return replace(plain, shuffle=True, variants=max(1, count + original), separator=_SPLITS[split],
                   keep_tokens=kept)


def _table(asked: Asked) -> Path | None:
    """The table of a parquet backend; sizes are read from the pictures instead."""
    asked.any("metadata_backend")
    if not asked.has("parquet"):
        asked.any("parquet")
        return None
    inner = Asked(draft=asked.draft, layers=[Layer(table=asked.get("parquet", dict, {}), where=asked.key("parquet"))])
    path = inner.get("path", str, "")
    for name, known in _COLUMNS.items():
        if inner.get(name, str, known[0]) not in known:
            inner.told(name, f"the column must have one of these names: {', '.join(known)}")
    inner.left({"width_column": "sizes are read from the pictures", "height_column": "sizes are read from the pictures",
                "fallback_caption_column": "no counterpart",
                "identifier_includes_extension": "a name without its extension matches, too"})
    return asked.draft.place(path, inner.key("path")) if path else None


def _image(asked: Asked) -> ImageOptions:
    """The image options: list, single or step buckets by the crop settings; enlarged up to the threshold, if any."""
    crop, aspect = asked.get("crop", bool, False), asked.get("crop_aspect", str, "square")
    resolution = _resolution(asked)
    if crop and aspect == "random":
        asked.told("crop_aspect", "a picture goes to the bucket with the nearest shape", at="image")
    ratios = _ratios(asked) if crop and aspect in ("closest", "random") else ()
    if not ratios:
        asked.told("crop_aspect_buckets", "no effect without crop_aspect closest or random", at="image")
    more = asked.get("max_upscale_threshold", float, -1.0) if ratios else -1.0
    asked.told("max_upscale_threshold", "a picture that needs more enlarging gets a smaller bucket, or is skipped if "
               "there is none" if ratios else "no effect without crop_aspect closest or random", at="image")
    least = asked.any("minimum_image_size")
    by_side = asked.any("resolution_type") == "pixel" and isinstance(least, int)
    if not by_side:
        asked.told("minimum_image_size", _SIZES, at="image")
    style = asked.get("crop_style", str, "random" if crop else "center")
    if style == "random" and crop:
        asked.draft.note(asked.key("crop_style"), asked.any("crop_style"), CUTS, "image")
    elif style == "random":
        asked.told("crop_style", "no effect without crop", at="image")
    elif style not in ("center", "centre"):
        asked.told("crop_style", "pictures are cropped at the center", at="image")
    return ImageOptions(resolution=resolution, min_side=least if by_side else 0,
                        upscale=1 + more if more >= 0 else "allow",
                        buckets="list" if ratios else "single" if crop and aspect == "square" else "step",
                        sizes=tuple(sorted({_sized(ratio, resolution) for ratio in ratios})),
                        crop="random" if crop and style == "random" else "centre",
                        views=VIEWS if crop and style == "random" else 1)


def _ratios(asked: Asked) -> list[float]:
    """Aspect ratios, width / height, of the buckets that a picture may be cropped to. Raises `Unparsed`."""
    found = list_of(asked.get("crop_aspect_buckets", list, []), lambda one, at: expect(one, float, at),
                    asked.key("crop_aspect_buckets"))
    if bad := [one for one in found if not 1 / 64 <= one <= 64]:
        raise Unparsed(f"{asked.key('crop_aspect_buckets')} has {bad[0]}, expected width / height, like 0.75")
    return found


def _sized(ratio: float, resolution: int) -> str:
    """A bucket with that aspect ratio and about the area of the resolution's square, in steps of 64."""
    width, height = (min(max(64, round(resolution * sqrt(one) / 64) * 64), MOST_SIDE) for one in (ratio, 1 / ratio))
    return f"{width}x{height}"


def _resolution(asked: Asked) -> int:
    kind = one_of(asked.get("resolution_type", str, "pixel_area"), ("pixel", "area", "pixel_area"),
                  asked.key("resolution_type"))
    key = asked.key("resolution")
    if not asked.has("resolution"):
        asked.draft.note(key, None, "not in the file: SimpleTuner reads it from --resolution; 1024 is written", "image")
        return 1024
    value = asked.get("resolution", float, 0.0)
    if not 0 < value < 1 << 20:
        raise Unparsed(f"{key} is {brief(value)}, expected a side in pixels, or megapixels")
    if kind == "area":
        side = max(64, round(sqrt(value * 1e6) / 64) * 64)
        asked.told("resolution", f"megapixels: the side of such a square, rounded to 64, is {side}", at="image")
        return side
    if kind == "pixel":
        asked.told("resolution_type", "a bucket's area is about the square of the resolution, not its shorter side",
                   at="image")
    return round(value)
