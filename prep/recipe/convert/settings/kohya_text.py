"""Converts how sd-scripts encodes captions, and the prompts of its sample pictures."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prep.recipe.convert.draft import Asked
from prep.recipe.convert.prompts import Sampled, prompt_text
from prep.recipe.convert.settings.kohya_family import family_of, is_flow, of_gui
from prep.recipe.convert.text import fit_text
from prep.recipe.convert.training import Training, number_of

_WINDOWS: Mapping[float, int] = {150: 2, 225: 3}  # of 75 tokens each
_IGNORED = "sd-scripts ignores it for flows; not written"
_LENGTHS: Mapping[str, str] = {"lumina2": "gemma2_max_token_length"}  # of other families, that of T5
# The options of a prompt's line that are numbers, and what they are here. For FLUX, l and g are other guidances.
_NUMBERS: Mapping[str, str] = {"w": "width", "h": "height", "d": "seed", "s": "steps", "l": "guidance"}
_OF_FLUX: Mapping[str, str] = {**{name: what for name, what in _NUMBERS.items() if name != "l"}, "g": "guidance"}


def text_of(asked: Asked, training: Training) -> dict[str, Any]:
    """The [model] settings of captions. sd-scripts counts CLIP's layers from 1, and skips them only for SD 1 and 2."""
    family, wanted = family_of(asked), dict[str, tuple[int, str]]()
    skip, tokens = number_of(asked.any("clip_skip")), number_of(asked.any("max_token_length"))
    windows, flow = _WINDOWS.get(tokens or 0), is_flow(asked)
    if skip is not None and skip > 1:
        if flow or family == "sdxl":
            training.note("clip_skip", int(skip), _IGNORED if flow else "sd-scripts ignores it for SDXL, and so it is "
                          "not written")
        else:
            wanted["clip_skip"] = int(skip) - 1, "clip_skip"
    if windows and flow:
        training.note("max_token_length", tokens, _IGNORED)
    elif windows:
        wanted["text_windows"] = windows, "max_token_length"
    key = _LENGTHS.get(family, "t5xxl_max_token_length")
    length = number_of(asked.any(key))
    # The GUI has the length of T5 in every file, and hands it on for FLUX alone.
    counts = family in ("flux", "chroma", *_LENGTHS) if of_gui(asked) else flow or not family
    if length is not None and length >= 1 and counts:
        wanted["max_length"] = int(length), key
    found = fit_text(family, wanted, asked.draft, training)
    if "clip_skip" in found:
        training.note("clip_skip", skip, f"written as [model] clip_skip = {found['clip_skip']}: layers are counted "
                      f"from 0{'' if family else '; sd-scripts ignores it for SDXL, so remove it there'}")
    if "text_windows" in found:
        training.note("max_token_length", tokens, "written as [model] text_windows; each window keeps its start "
                      "and end token, which sd-scripts drops inside")
    return found


def prompts_of(asked: Asked, training: Training) -> tuple[Path | None, str]:
    """The file of sample prompts, or the text of one to write: the GUI has the prompts themselves, not a path."""
    named = asked.any("sample_prompts")
    if not isinstance(named, str) or not named.strip():
        return None, ""
    path = asked.draft.existing(named)
    if path is not None and path.suffix == ".txt" and path.is_file():
        return path, ""
    if of_gui(asked):
        lines = [line for line in named.splitlines() if not line.startswith("#")]
        return None, prompt_text(_sampled(line, family_of(asked), training) for line in lines)
    asked.draft.place(named, "sample_prompts")
    training.note("sample_prompts", named, "[prompts] file is a text file with one prompt per line")
    return None, ""


def _sampled(line: str, family: str, training: Training) -> Sampled:
    """A prompt and its options (sd-scripts: line_to_prompt_dict in library/train_util.py)."""
    known = _OF_FLUX if family == "flux" else _NUMBERS
    prompt, *options = line.split(" --")
    negative, numbers = "", dict[str, float | None]()
    for option in options:
        name, _, value = option.partition(" ")
        if name.lower() == "n":
            negative = value
        elif name.lower() in known and (number := re.match(r"[\d.]+", value.strip())):
            numbers[known[name.lower()]] = number_of(number[0])
        else:
            training.note("sample_prompts", f"--{option}", "no counterpart; left out of the prompt")
    return Sampled(prompt=prompt, negative=negative, **numbers)
