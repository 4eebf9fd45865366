"""Converts how sd-scripts encodes captions, and the prompts of its sample pictures."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from prep.errors import PathError
from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.kohya.family import family_of, is_flow, of_gui
from prep.recipe.convert.prompts import Sampled, prompt_text
from prep.recipe.convert.text import fit_text
from prep.recipe.convert.training import Training, number_of
from prep.recipe.prompts import prompts_of, read_prompt_file

_WINDOWS: Mapping[float, int] = {150: 2, 225: 3}  # of 75 tokens each
_IGNORED = "sd-scripts ignores it for flows; not written"
_LENGTHS: Mapping[str, str] = {"lumina2": "gemma2_max_token_length"}  # of other families, that of T5
# The options of a prompt's line that are numbers, and what they are here. For FLUX, l and g are other guidances.
_NUMBERS: Mapping[str, str] = {"w": "width", "h": "height", "d": "seed", "s": "steps", "l": "guidance"}
_OF_FLUX: Mapping[str, str] = {**{name: what for name, what in _NUMBERS.items() if name != "l"}, "g": "guidance"}


def text_of(config: ToolConfig, training: Training) -> dict[str, Any]:
    """The [model] settings of captions. sd-scripts counts CLIP's layers from 1, and skips them only for SD 1 and 2."""
    family, options = family_of(config), dict[str, tuple[int, str]]()
    skip, tokens = number_of(config.any("clip_skip")), number_of(config.any("max_token_length"))
    windows, flow = _WINDOWS.get(tokens or 0), is_flow(config)
    if skip is not None and skip > 1:
        if flow or family == "sdxl":
            training.note("clip_skip", int(skip), _IGNORED if flow else "sd-scripts ignores it for SDXL, and so it is "
                          "not written")
        else:
            options["clip_skip"] = int(skip) - 1, "clip_skip"
    if windows and flow:
        training.note("max_token_length", tokens, _IGNORED)
    elif windows:
        options["text_windows"] = windows, "max_token_length"
    key = _LENGTHS.get(family, "t5xxl_max_token_length")
    length = number_of(config.any(key))
    # The GUI has the length of T5 in every file, and hands it on for FLUX alone.
    counts = family in ("flux", "chroma", *_LENGTHS) if of_gui(config) else flow or not family
    if length is not None and length >= 1 and counts:
        options["max_length"] = int(length), key
    fitted = fit_text(family, options, config.draft, training)
    if "clip_skip" in fitted:
        training.note("clip_skip", skip, f"written as [model] clip_skip = {fitted['clip_skip']}: layers are counted "
                      f"from 0{'' if family else '; sd-scripts ignores it for SDXL, so remove it there'}")
    if "text_windows" in fitted:
        training.note("max_token_length", tokens, "written as [model] text_windows; each window keeps its start "
                      "and end token, which sd-scripts drops inside")
    return fitted


def prompts_for(config: ToolConfig, training: Training, read: Callable[[Path], Any]) -> tuple[Path | None, str]:
    """The file of sample prompts, or the text of one to write: the GUI has the prompts themselves, not a path, and
    sd-scripts also has tables of them. `read` reads TOML and JSON."""
    named = config.any("sample_prompts")
    if not isinstance(named, str) or not named.strip():
        return None, ""
    path = config.draft.existing(named)
    if path is not None and path.suffix == ".txt" and path.is_file():
        _check(path, training)
        return path, ""
    if path is not None and path.suffix in (".toml", ".json") and path.is_file():
        return None, prompt_text(_of_file(read(path), family_of(config), training))
    if of_gui(config):
        lines = [line for line in named.splitlines() if not line.startswith("#")]
        return None, prompt_text(_sampled(line, family_of(config), training) for line in lines)
    config.draft.place(named, "sample_prompts")
    training.note("sample_prompts", named, "[prompts] file is a text file with one prompt per line")
    return None, ""


def _sampled(line: str, family: str, training: Training) -> Sampled:
    """A prompt and its options (sd-scripts: line_to_prompt_dict in library/train_util.py)."""
    known = _OF_FLUX if family == "flux" else _NUMBERS
    prompt, *options = line.split(" --")
    negative, numbers = "", dict[str, Any]()
    for option in options:
        name, _, value = option.partition(" ")
        if name.lower() == "n":
            negative = value
        elif name.lower() in known and (number := re.match(r"[\d.]+", value.strip())):
            numbers[known[name.lower()]] = number_of(number[0])
        else:
            training.note("sample_prompts", f"--{option}", "no counterpart; left out of the prompt")
    return Sampled(prompt=prompt, negative=negative, **numbers)


def _of_file(document: Any, family: str, training: Training) -> Iterator[Sampled]:
    """The prompts of a JSON list, or of TOML's [[prompt.subset]] with what they share in [prompt]."""
    table = document.get("prompt") if isinstance(document, dict) else None
    shared = table if isinstance(table, dict) else {}
    listed = shared.get("subset") if shared else document
    for entry in listed if isinstance(listed, list) else []:
        if isinstance(entry, str):
            yield _sampled(entry, family, training)
        elif isinstance(entry, dict):
            values = {**shared, **entry}
            guidance = values.get("guidance_scale" if family == "flux" else "scale")
            yield Sampled(prompt=str(values.get("prompt") or ""), negative=str(values.get("negative_prompt") or ""),
                          width=number_of(values.get("width")), height=number_of(values.get("height")),
                          seed=number_of(values.get("seed")), steps=number_of(values.get("sample_steps")),
                          guidance=number_of(guidance))


def _check(path: Path, training: Training) -> None:
    """Notes lines of a prompt file that `prep encode` refuses, like those with other options of sd-scripts."""
    try:
        faults = prompts_of(read_prompt_file(path, "sample_prompts"), path, path.name)[1]
    except PathError:
        return  # which prep encode tells
    for fault in faults:
        training.note("sample_prompts", path.name, f"prep encode refuses a line, so change it: {fault.message}")
