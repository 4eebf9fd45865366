"""Converts the datasets of ai-toolkit's configuration (YAML or JSON) to a recipe; what else there is becomes a note.

Control pictures become references: `control_path` is a directory or several, `control_path_1` and so on are more.
Names, defaults and units were compared with ai-toolkit 27a03a91 (toolkit/config_modules.py, data_loader.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from prep.captions.options import CaptionOptions
from prep.formatting import join_texts
from prep.parse import expect, list_of
from prep.recipe.checks import resolution_check
from prep.recipe.convert.draft import BALANCED, CUTS, VIEWS, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.schema import ImageOptions, ModelOptions, Source
from prep.sources.item import MaskFrom

TRAINERS = ("sd_trainer", "diffusion_trainer", "ui_trainer")  # types of a process that trains on datasets
_CONTROLS = ("control_path", *(f"control_path{dash}{number}" for number in range(1, 10) for dash in ("_", "")))
_TRAIN = "belongs to training: in train.toml, it is"
_CACHE = "prep manages caches: nothing to set"
_LEFT: Mapping[str, str] = {
    **dict.fromkeys(("cache_latents", "cache_latents_to_disk", "cache_text_embeddings", "num_workers",
                     "prefetch_factor"), _CACHE),
    "caption_dropout_rate": f"{_TRAIN} caption_dropout",
    "mask_min_value": f"{_TRAIN} loss.unmasked_weight",
    "bucket_tolerance": "the model's family decides the pixels between bucket sides",
    "flip_y": "pictures are not turned upside down: no counterpart",
    "random_scale": "a picture is scaled until it just covers its bucket: no counterpart",
    "invert_mask": "masks are used as they are: no counterpart; invert the files",
    "replacements": "no counterpart",
    **dict.fromkeys(("inpaint_path", "clip_image_path", "controls"), "adapters have no counterpart"),
    "num_frames": "videos have no counterpart",
}


def processes_of(document: Any) -> list[dict[str, Any]]:
    """The processes of a configuration that train; none if it is not ai-toolkit's."""
    config = document.get("config") if isinstance(document, dict) and "job" in document else None
    listed = config.get("process") if isinstance(config, dict) else None
    return [entry for entry in listed if isinstance(entry, dict) and entry.get("type") in TRAINERS
            ] if isinstance(listed, list) else []


def convert(document: Mapping[str, Any], base: Path) -> ConvertedRecipe:
    """The recipe for a configuration in the directory `base`. Raises `Unparsed`."""
    draft = Draft(tool="ai-toolkit", base=base)
    process, *more = processes_of(document)
    if more:
        draft.note("config.process", None, f"the first of {len(more) + 1} processes that train is converted", "")
    whole = ToolConfig(draft=draft, layers=[Layer(table=process, where="process[0]")])
    trigger, model = whole.get("trigger_word", str, ""), whole.get("model", dict, {})
    for number, table in enumerate(list_of(whole.get("datasets", list, []), lambda value, at: expect(value, dict, at),
                                           "datasets")):
        _dataset(ToolConfig(draft=draft, layers=[Layer(table=table, where=f"datasets[{number}]")]), trigger)
    others = [str(name) for name in process if name not in ("type", "trigger_word", "model", "datasets")]
    if others:
        draft.note("process[0]", None, "only datasets and the model's name are converted; train init writes training "
                   f"settings to fill in. Not read: {join_texts(others, 20)}", "")
    named = ToolConfig(draft=draft, layers=[Layer(table=model, where="model")])
    named.note("assistant_lora_path", f"{_TRAIN} base.adapter, the path of a file that is here", at="")
    path = named.get("name_or_path", str, "")
    converted = draft.finish()
    return replace(converted, recipe=replace(converted.recipe, model=ModelOptions(path=path)))


def _dataset(config: ToolConfig, trigger: str) -> None:
    """Adds the source of a dataset."""
    draft, where = config.draft, config.layers[0].where
    named = next((name for name in ("folder_path", "dataset_path") if config.has(name)), "folder_path")
    path = draft.place(config.get(named, str, ""), config.key(named))
    table = path if path.suffix == ".json" and not path.is_dir() else None
    repeats = config.get("num_repeats", int, 1)
    if repeats < 1:
        draft.note(where, None, f"skipped: num_repeats is {repeats}", "")
        return
    prior = config.get("is_reg", bool, False) or config.get("prior_reg", bool, False)
    for name in ("is_reg", "prior_reg"):
        config.note(name, f'role = "prior": {BALANCED}')
    caption, mask, references, image = _caption(config, trigger), _mask(config), _references(config), _image(config)
    weight = config.get("loss_multiplier", float, 1.0)
    config.any("dataset_path")
    config.note_unread(_LEFT)
    draft.images.append((where, image))
    draft.sources.append(Source(path=path if table is None else path.parent, table=table, repeats=repeats, mask=mask,
                                role="prior" if prior else "train", weight=weight, references=references,
                                caption=caption))


def _caption(config: ToolConfig, trigger: str) -> CaptionOptions:
    """Caption options: a file is one caption, and a picture without one has the default caption, or an empty one."""
    extension = config.get("caption_ext", str, "txt").removeprefix(".")
    if extension not in ("txt", "caption", "json"):
        config.note("caption_ext", "captions are .txt, .caption or .json; rename the files")
    usual = config.get("default_caption", str, "")
    return CaptionOptions(
        missing="constant" if usual else "empty", constant=usual, lines="join",
        trigger=config.get("trigger_word", str, "") or trigger, keep_separator="",
        shuffle=config.get("shuffle_tokens", bool, False), keep_tokens=config.get("keep_tokens", int, 0),
        dropout=config.get("token_dropout_rate", float, 0.0))


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
