"""Converts OneTrainer's concepts (a JSON list, `training_concepts/concepts.json`) to a recipe.

Other settings, such as resolution and masked training, are in its main configuration, which
`prep.recipe.convert.onetrainer.training` reads. (OneTrainer: modules/util/config/ConceptConfig.py)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import isqrt, prod
from pathlib import Path
from typing import Any

from prep.batching.split import Role
from prep.buckets.sizes import MOST_SIDE
from prep.captions.options import CaptionOptions
from prep.errors import PathError
from prep.formatting import format_size
from prep.fs.text import read_text
from prep.parse import Unparsed, expect, one_of
from prep.recipe.convert.draft import BALANCED, FLAT, ConvertedRecipe, Draft, Layer, ToolConfig
from prep.recipe.convert.length import Frequency, is_never, put_repeats
from prep.recipe.convert.onetrainer.family import STEP
from prep.recipe.schema import ImageOptions, Source

_ROLES: Mapping[str, Role] = {"STANDARD": "train", "VALIDATION": "validation", "PRIOR_PREDICTION": "prior"}
_COLORS = "colors are never changed: no counterpart"
_TURNED = "pictures are not rotated: no counterpart"
_DRAWN = "captions are drawn once and encoded: [caption] variants sets how many per picture"
_PLAIN: Mapping[str, str] = {
    "seed": "random draws depend on picture and caption only, not on a seed",
}
MOST_VIEWS = 64  # the limit of crops per picture in a recipe
_IMAGE: Mapping[str, str] = {
    "enable_random_rotate": _TURNED, "enable_fixed_rotate": _TURNED, "random_rotate_max_angle": _TURNED,
    **{f"{kind}_{name}": _COLORS for kind in ("enable_random", "enable_fixed")
       for name in ("brightness", "contrast", "saturation", "hue")},
    **{f"random_{name}_max_strength": _COLORS for name in ("brightness", "contrast", "saturation", "hue")},
    "enable_random_circular_mask_shrink": "masks are used as they are: no counterpart",
    "enable_random_mask_rotate_crop": "pictures are not rotated, and masks do not move the crop: no counterpart",
}
_UPPER = "captions keep their case: no counterpart"
_CASE = ("caps_randomize_enable", "caps_randomize_mode", "caps_randomize_probability", "caps_randomize_lowercase")
_SPECIAL = "no tags are special: no counterpart; only the first keep_tokens tags are kept"
_SPECIALS = ("tag_dropout_special_tags", "tag_dropout_special_tags_mode", "tag_dropout_special_tags_regex")
MOST_PROMPTS = 1 << 20  # bytes of a prompt file
MOST_TIMES = 1e6  # showings of a picture in an epoch


def convert(document: Sequence[Any], base: Path) -> ConvertedRecipe:
    """The recipe for a list of concepts from a file in the directory `base`. Raises `Unparsed`."""
    draft = Draft(tool="onetrainer", base=base)
    draft.note("resolution", None, "is in OneTrainer's main configuration; 512 is written unless a concept has its own",
               "image")
    draft.note("masked_training", None, "is in OneTrainer's main configuration: prep init --from converts that, too",
               "mask")
    fill(draft, document, ImageOptions(buckets="ratio", upscale="allow"))
    if draft.longer != 1:
        draft.note("epochs", None, f"an epoch here shows {float(draft.longer):.4g} times as many samples as one there: "
                   "divide the epochs by that", "")
    return draft.finish()


def fill(draft: Draft, document: Sequence[Any], usual: ImageOptions) -> None:
    """Adds the sources of a list of concepts; `usual` are the image options of the main configuration."""
    draft.usual = usual
    shown: list[Frequency] = []
    for number, value in enumerate(document):
        where = f"concepts[{number}]"
        shown += _concept(draft, Layer(table=expect(value, dict, where), where=where), usual)
    put_repeats(draft, shown)


def _concept(draft: Draft, layer: Layer, usual: ImageOptions) -> list[Frequency]:
    """Adds the source of a concept; returns how often it is shown, or nothing if it never is."""
    config = ToolConfig(draft=draft, layers=[layer])
    name = config.get("name", str, "")
    if not config.get("enabled", bool, True):
        draft.note(layer.key("enabled"), False, f"skipped: concept {name!r}", "")
        return []
    if not config.has("path"):
        raise Unparsed(f"{layer.where} has no 'path', expected the directory of its pictures")
    path = draft.place(config.get("path", str, ""), layer.key("path"))
    image, text = (ToolConfig(draft=draft, layers=[Layer(table=config.get(part, dict, {}), where=layer.key(part))])
                   for part in ("image", "text"))
    flat = not config.get("include_subdirectories", bool, False)
    variants = config.get("text_variations", int, 1)
    caption = _caption(text)
    shown = _shown(config)
    source = Source(path=path, role=_role(config), exclude=FLAT if flat else (),
                    weight=config.get("loss_weight", float, 1.0),
                    caption=replace(caption, variants=variants) if variants > 1 else caption)
    config.get("concept_stats", dict, {})  # OneTrainer's last counts of files, not a setting
    config.note_all(_PLAIN)
    draft.images.append((layer.where, _views(config, image, usual)))
    config.note_unread()
    text.note_unread()
    image.note_unread()
    if is_never(shown, source):
        draft.images.pop()
        draft.note(shown.key, shown.times, f"skipped: concept {name!r} is shown never", "")
        return []
    draft.sources.append(source)
    return [shown]


def _role(config: ToolConfig) -> Role:
    named = config.get("type", str, "STANDARD")
    if config.get("validation_concept", bool, False):  # older files of OneTrainer
        return "validation"
    role = _ROLES[one_of(named, _ROLES, config.key("type"))]
    if role == "prior":
        config.note("type", 'role = "prior"; with preserve.prior = true in train.toml it is compared with predictions '
                    f"of the base model, as in OneTrainer; {BALANCED}")
    return role


def _shown(config: ToolConfig) -> Frequency:
    """The frequency of a concept in an epoch: each picture a number of times, or a number of samples in all."""
    strategy = one_of(config.get("balancing_strategy", str, "REPEATS"), ("REPEATS", "SAMPLES"),
                      config.key("balancing_strategy"))
    name = "balancing" if config.has("balancing") else "repeats"  # older files of OneTrainer
    times = min(config.get(name, float, 1.0), MOST_TIMES)
    samples = int(times) if strategy == "SAMPLES" else None
    return Frequency(key=config.key(name if samples is None else "balancing_strategy"), times=times, samples=samples)


def _views(config: ToolConfig, image: ToolConfig, usual: ImageOptions) -> ImageOptions:
    """The image options: variations become crops, on by default as in OneTrainer, and mirror images."""
    count = config.get("image_variations", int, 1)
    jitter, fixed = image.get("enable_crop_jitter", bool, True), image.get("enable_fixed_flip", bool, False)
    flip = "both" if image.get("enable_random_flip", bool, False) else "always" if fixed else "none"
    if fixed and flip == "both":
        image.note("enable_fixed_flip", "pictures are shown both unmirrored and mirrored")
    if count > 1 and not jitter:
        config.note("image_variations", "without crop jitter, a picture has one crop")
    if count > MOST_VIEWS:
        config.note("image_variations", f"the limit is {MOST_VIEWS} crops per picture; {MOST_VIEWS} is written")
    return replace(_image(image, usual), crop="random" if jitter else "centre", flip=flip,
                   views=min(max(1, count), MOST_VIEWS) if jitter else 1)


def _image(config: ToolConfig, usual: ImageOptions) -> ImageOptions:
    """`usual`, at the concept's own resolution if it overrides it; notes on augmentations without a counterpart."""
    config.note_all(_IMAGE)
    named = config.get("resolution_override", str, "512")
    return with_resolution(config, "resolution_override", named, usual) \
        if config.get("enable_resolution_override", bool, False) else usual


def with_resolution(config: ToolConfig, key: str, named: str, usual: ImageOptions) -> ImageOptions:
    """`usual` at the resolutions in `named`, like 512 or 512,768, or at the size 768x1024; unchanged, with a note, if
    it is none of these."""
    step = usual.step or STEP
    if exact := re.fullmatch(r"\s*(\d{1,6})x(\d{1,6})\s*", named, re.ASCII):
        sides = [min(max(step, round(int(side) / step) * step), MOST_SIDE // step * step) for side in exact.groups()]
        size = format_size((sides[0], sides[1]))
        if size != named.strip():
            config.note(key, f"sides are multiples of {step} pixels; {size} is written", at="image")
        return replace(usual, resolution=isqrt(prod(sides)), buckets="list", sizes=(size,))
    sides = [int(word) for word in named.split(",") if word.strip().isdecimal()]
    if len(sides) != named.count(",") + 1:
        config.note(key, "resolutions are whole numbers, the side of a square, or a size like 768x1024; "
                    f"{usual.resolution} is written", at="image")
        return usual
    if len(sides) > 1:
        config.note(key, "each picture is a sample at each of these; OneTrainer draws one of them each time",
                    at="image")
    buckets = "ratio" if usual.buckets == "list" else usual.buckets
    return replace(usual, resolution=sides[0] if len(sides) == 1 else tuple(sorted({*sides})), buckets=buckets,
                   sizes=())


def _caption(config: ToolConfig) -> CaptionOptions:
    """The caption options. As here, each line of a file is a caption; `|||` has no meaning to OneTrainer."""
    shuffle = config.get("enable_tag_shuffling", bool, False)
    if shuffle:
        config.note("enable_tag_shuffling", _DRAWN)
    dropout = _dropout(config)
    _note_if(config, _CASE, _UPPER, on=config.get("caps_randomize_enable", bool, False))
    _note_if(config, _SPECIALS, _SPECIAL, on=config.get("tag_dropout_special_tags_mode", str, "NONE") != "NONE")
    choice = CaptionOptions(shuffle=shuffle, dropout=dropout, separator=config.get("tag_delimiter", str, ",") or ",",
                            keep_tokens=config.get("keep_tags_count", int, 1), keep_separator="")
    return _origin(config, choice)


def _note_if(config: ToolConfig, names: Sequence[str], said: str, *, on: bool) -> None:
    """Adds notes if the feature is `on`; OneTrainer writes these settings even if it is off."""
    for name in names:
        if on:
            config.note(name, said)
        else:
            config.any(name)


def _dropout(config: ToolConfig) -> float:
    on, mode = config.get("tag_dropout_enable", bool, False), config.get("tag_dropout_mode", str, "FULL")
    chance = config.get("tag_dropout_probability", float, 0.0)
    if not on:
        return 0.0
    if mode == "FULL":
        name = "tag_dropout_mode" if config.has("tag_dropout_mode") else "tag_dropout_enable"  # its default is FULL
        config.note(name, "drops all tags at once: no counterpart; none are dropped")
        return 0.0
    if mode != "RANDOM":
        config.note("tag_dropout_mode", "every tag has the same dropout probability here, wherever it is")
    config.note("tag_dropout_enable", _DRAWN)
    return chance


def _origin(config: ToolConfig, choice: CaptionOptions) -> CaptionOptions:
    """Caption options for the prompt source: a file beside each picture, its name, or one list for all pictures."""
    source = one_of(config.get("prompt_source", str, "sample"), ("sample", "concept", "filename"),
                    config.key("prompt_source"))
    named = config.get("prompt_path", str, "")
    if source == "sample":
        return choice
    config.note("prompt_source", "a NAME.txt beside a picture takes precedence")
    if source == "filename":
        return replace(choice, missing="filename")
    return _listed(config, named, choice)


def _listed(config: ToolConfig, named: str, choice: CaptionOptions) -> CaptionOptions:
    """Caption options that give every picture all lines of a file, as one wildcard if no line has braces or bars."""
    path = config.draft.place(named, config.key("prompt_path"))
    try:
        lines = [line.strip() for line in read_text(path, most=MOST_PROMPTS, regular=True).splitlines()]
    except OSError as error:
        raise PathError(f"{config.key('prompt_path')} {path} cannot be read: {error.strerror or error}") from None
    except Unparsed as error:
        raise Unparsed(f"{config.key('prompt_path')} {path}: {error}") from None
    lines = [line for line in lines if line]
    if not lines:
        raise Unparsed(f"{config.key('prompt_path')} {path} has no text, expected captions, one per line")
    if len(lines) == 1:
        return replace(choice, missing="constant", constant=lines[0])
    if len(lines) > 1024 or any(set(line) & set("{|}") for line in lines):
        config.note("prompt_path", f"its {len(lines)} captions cannot be one constant; the first is written")
        return replace(choice, missing="constant", constant=lines[0])
    return replace(choice, missing="constant", constant=f"{{{'|'.join(lines)}}}", wildcards=True,
                   variants=max(choice.variants, len(lines)))
