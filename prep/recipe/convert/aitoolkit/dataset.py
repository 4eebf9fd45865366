"""Converts the datasets of ai-toolkit's configuration (YAML or JSON) to the sources of a recipe.

Control pictures become references: `control_path` is a directory or several, `control_path_1` and so on are more.
The two directories of an image slider become a source and its references, with `fit = "pair"`.
Names, defaults and units were compared with ai-toolkit 27a03a91 (toolkit/config_modules.py, data_loader.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.captions.options import CaptionOptions
from prep.errors import PathError
from prep.fs.text import TooLarge, decode_text, read_small
from prep.parse import Unparsed, expect, list_of
from prep.recipe.checks import resolution_check
from prep.recipe.convert.draft import BALANCED, CUTS, VIEWS, Draft, Layer, ToolConfig
from prep.recipe.convert.training import Training, number_of
from prep.recipe.schema import ImageOptions, Source
from prep.sources.item import MaskFrom

_CONTROLS = ("control_path", *(f"control_path{dash}{number}" for number in range(1, 10) for dash in ("_", "")))
_HIDDEN = "_controls"  # directory of pictures that ai-toolkit makes, and leaves out
_USUAL, _MOST = "default.txt", 1 << 16  # the file with the caption of pictures without one, and its most bytes
_CACHE = "prep manages caches: nothing to set"
_MANY = "one batch size for all samples: batch_size in train.toml"
_LEFT: Mapping[str, str] = {
    **dict.fromkeys(("cache_latents", "cache_latents_to_disk", "cache_text_embeddings", "cache_clip_vision_to_disk",
                     "cache_tensors_to_disk", "load_image_when_caching_latents", "cache_latents_num_workers",
                     "num_workers", "prefetch_factor", "fast_image_size", "debug"), _CACHE),
    "batch_size": _MANY,
    "bucket_tolerance": "the model's family decides the pixels between bucket sides",
    "flip_y": "pictures are not turned upside down: no counterpart",
    "random_scale": "a picture is scaled until it just covers its bucket: no counterpart",
    "invert_mask": "masks are used as they are: no counterpart; invert the files",
    "replacements": "no counterpart; replace the words in the caption files, as prep view --edit does",
    "inpaint_path": "their transparent parts are painted: write them as masks, white where a picture is transparent, "
                    "and encode with an inpainting model (sdxl_inpaint, flux_fill)",
    **dict.fromkeys(("clip_image_path", "clip_image_from_same_folder", "unconditional_path"),
                    "adapters have no counterpart"),
    "controls": "pictures are not made: write them into a directory, and name it in references",
    "num_frames": "videos have no counterpart",
    **dict.fromkeys(("control_from_same_folder", "num_controls_from_same_folder"), "a picture's references have its "
                    "name, or are in a table"),
    "control_transparent_color": "the color of transparency is that of all pictures: [image] alpha",
    "use_short_captions": "a table has one column of captions",
    **dict.fromkeys(("scale", "augments", "augmentations", "shuffle_augmentations", "random_triggers",
                     "random_triggers_max", "standardize_images", "network_weight", "extra_values", "guidance_type",
                     "shrink_video_to_frames", "fps", "auto_frame_count", "do_i2v", "do_audio", "audio_normalize",
                     "audio_preserve_pitch", "trim_auto_frame_count_tail"), "no counterpart"),
}
_AT_ONE = dict.fromkeys(("network_weight", "pos_weight", "neg_weight"), "the pictures are those at weight 1 and -1: no "
                        "counterpart")
# Settings that do nothing with these values, or only for videos.
_IDLE: Mapping[str, Any] = {"num_frames": 1, "network_weight": 1, "scale": 1, "random_triggers_max": 1,
                            "replay_transforms": True, "type": "image", "bucket_tolerance": 64, "fps": None,
                            "shrink_video_to_frames": None, "trim_auto_frame_count_tail": None,
                            "num_controls_from_same_folder": None, "guidance_type": "targeted"}


def fill(draft: Draft, tables: list[Any], trigger: str) -> list[float]:
    """Adds the sources of `tables`; `trigger` is the word of all. What black weighs in each source's masks.

    Raises `Unparsed`.
    """
    floors = []
    for number, table in enumerate(list_of(tables, lambda value, at: expect(value, dict, at), "datasets")):
        idle = {name for name, usual in _IDLE.items() if table.get(name) == usual or usual is None}
        layer = Layer(table=table, where=f"datasets[{number}]", keys_read=idle)
        floors += _dataset(ToolConfig(draft=draft, layers=[layer]), trigger)
    return floors


def fill_pairs(draft: Draft, tables: list[Any]) -> None:
    """Adds the sources of an image slider's `tables`: pictures of weight 1, with those of weight -1 as references.

    Raises `Unparsed`.
    """
    for number, table in enumerate(list_of(tables, lambda value, at: expect(value, dict, at), "slider.datasets")):
        where = f"slider.datasets[{number}]"
        config = ToolConfig(draft=draft, layers=[Layer(table=table, where=where)])
        folders = [config.get(f"{name}_folder", str, "") for name in ("pos", "neg")]
        if not all(folders):
            draft.note(where, None, "skipped: it has no pos_folder and neg_folder; pictures side by side in one file "
                       "are not cut apart: write them into two directories, with the same names", "")
            continue
        usual = " ".join(config.get("target_class", str, "").split())
        size = resolution_check(config.any("size") or 512, config.key("size"))
        config.layers[0].keys_read.update(name for name in _AT_ONE if table.get(name) == 1)
        config.note_unread(_AT_ONE)
        other = draft.place(folders[1], config.key("neg_folder"))
        if other.is_dir() and any(other.glob("*.txt")):
            config.note("neg_folder", "its captions are not read: both pictures have the caption of the first")
        draft.dropouts.append(0.0)
        draft.images.append((where, ImageOptions(resolution=size)))
        draft.sources.append(Source(
            path=draft.place(folders[0], config.key("pos_folder")), references=(other,),
            caption=CaptionOptions(missing="constant" if usual else "empty", constant=usual, lines="join",
                                   keep_separator="")))


def put_masks(draft: Draft, floors: list[float], training: Training) -> None:
    """Adds whether masks weight the loss, and the weight where they are black."""
    masked = any(source.mask is not None for source in draft.sources)
    training.put("loss.masked", masked, "datasets.mask_path")
    if masked:
        training.put_nearest("loss.unmasked_weight", max(floors, default=0.0), "datasets.mask_min_value")
        if len(set(floors)) > 1:
            training.note("datasets.mask_min_value", floors, "one weight for all masks; the largest is written")


def reference_fit(draft: Draft, tables: list[Any]) -> str:
    """How references are scaled, as [references] fit: as the model's pipeline does, or to their picture's size."""
    whole = [table.get("full_size_control_images") is not False for table in tables
             if any(table.get(name) for name in _CONTROLS)]
    if len(set(whole)) > 1:
        draft.note("datasets.full_size_control_images", None, "a recipe has one [references] fit, that of the first "
                   "dataset with control pictures", "references")
    return "family" if not whole or whole[0] else "bucket"


def _dataset(config: ToolConfig, trigger: str) -> list[float]:
    """Adds the source of a dataset; what black weighs in its masks, if there are any."""
    draft, where = config.draft, config.layers[0].where
    named = next((name for name in ("folder_path", "dataset_path") if config.has(name)), "folder_path")
    path = draft.place(config.get(named, str, ""), config.key(named))
    table = path if path.suffix == ".json" and not path.is_dir() else None
    repeats = config.get("num_repeats", int, 1)
    if repeats < 1:
        draft.note(where, None, f"skipped: num_repeats is {repeats}", "")
        return []
    prior = config.get("is_reg", bool, False) or config.get("prior_reg", bool, False)
    for name in ("is_reg", "prior_reg"):
        config.note(name, f'role = "prior": {BALANCED}')
    caption, mask, references, image = (_caption(config, trigger, path), _mask(config), _references(config),
                                        _image(config))
    weight, floor = _number(config, "loss_multiplier", 1.0), _number(config, "mask_min_value", 0.0)
    draft.dropouts.append(_number(config, "caption_dropout_rate", 0.0))
    for name in ("dataset_path", "folder_path", "full_size_control_images"):
        config.any(name)
    config.note_unread(_LEFT)
    draft.images.append((where, image))
    draft.sources.append(Source(path=path if table is None else path.parent, table=table, repeats=repeats, mask=mask,
                                role="prior" if prior else "train", weight=weight, references=references,
                                exclude=(f"{_HIDDEN}/",) if (path / _HIDDEN).is_dir() else (), caption=caption))
    return [] if mask is None else [floor]


def _number(config: ToolConfig, name: str, usual: float) -> float:
    """A number, also one like 1e-4, which YAML takes for a text. Raises `Unparsed`."""
    value = config.any(name)
    number = number_of(value)
    return usual if value is None else expect(value, float, config.key(name)) if number is None else float(number)


def _caption(config: ToolConfig, trigger: str, path: Path) -> CaptionOptions:
    """Caption options: a file is one caption, and a picture without one has the default caption, or an empty one."""
    extension = (config.get("caption_type", str, "") or config.get("caption_ext", str, "txt")).removeprefix(".")
    config.any("caption_ext")
    if extension not in ("txt", "caption", "json"):
        config.note("caption_ext", "captions are .txt, .caption or .json; rename the files")
    usual = _default(path) or config.get("default_caption", str, "")
    if usual and _default(path):
        config.draft.note(config.key("default.txt"), usual, "the caption of pictures without one, also in directories "
                          "below, where ai-toolkit looks for a default.txt of their own", config.draft.here)
    config.any("default_caption")
    return CaptionOptions(
        missing="constant" if usual else "empty", constant=usual, lines="join",
        trigger=config.get("trigger_word", str, "") or trigger, keep_separator="",
        shuffle=config.get("shuffle_tokens", bool, False), keep_tokens=config.get("keep_tokens", int, 0),
        dropout=_number(config, "token_dropout_rate", 0.0))


def _default(path: Path) -> str:
    """The text of the directory's default caption, on one line; "" without one."""
    try:
        return " ".join(decode_text(read_small(path / _USUAL, most=_MOST, regular=True)).split())
    except (OSError, PathError, TooLarge, Unparsed):
        return ""


def _mask(config: ToolConfig) -> MaskFrom | None:
    alpha = config.get("alpha_mask", bool, False)
    if not config.has("mask_path"):
        return "alpha" if alpha else None
    path = config.draft.place(config.get("mask_path", str, ""), config.key("mask_path"))
    if not path.is_dir():
        config.note("mask_path", "no masks are read: it is not a directory")
    elif alpha:
        config.note("alpha_mask", "the masks of mask_path are used instead")
    return path if path.is_dir() else None


def _references(config: ToolConfig) -> tuple[Path, ...] | None:
    """The directories of control pictures, in order."""
    texts: list[str] = []
    for name in _CONTROLS:
        value = config.any(name)
        if value is not None:
            texts += list_of(value if isinstance(value, list) else [value], lambda text, at: expect(text, str, at),
                             config.key(name))
    return config.draft.reference_folders(texts, config.key("control_path")) if texts else None


def _image(config: ToolConfig) -> ImageOptions:
    """The image options: buckets at each resolution, or one square; a picture is never enlarged."""
    resolution = resolution_check(config.any("resolution") or 512, config.key("resolution"))
    random, flip = config.get("random_crop", bool, False), config.get("flip_x", bool, False)
    square = config.get("square_crop", bool, False) or not config.get("buckets", bool, True)
    config.note("random_crop", CUTS, at="image")
    return ImageOptions(resolution=resolution, buckets="single" if square else "step", flip="both" if flip else "none",
                        crop="random" if random else "centre", views=VIEWS if random else 1)
