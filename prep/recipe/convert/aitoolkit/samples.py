"""Converts ai-toolkit's sample pictures to a prompt file and the settings of sampling.

A prompt may have options of its own after it, as in sd-scripts; `[trigger]` is the trigger word.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from prep.parse import expect, list_of
from prep.recipe.convert.draft import ToolConfig
from prep.recipe.convert.prompts import Sampled, prompt_text
from prep.recipe.convert.training import Training, number_of

_SIDE, _SMALLEST, _CELL = 512, 64, 8  # pixels: the default, and what it rounds sizes to
_EVERY, _STEPS, _GUIDANCE = 100, 20, 7  # its defaults
# Options of a prompt, and what they are here.
_FLAGS: Mapping[str, str] = {"w": "width", "h": "height", "d": "seed", "seed": "seed", "l": "guidance",
                             "cfg": "guidance", "s": "steps", "steps": "steps"}
_OWN: Mapping[str, str] = {"width": "width", "height": "height", "seed": "seed", "guidance_scale": "guidance",
                           "sample_steps": "steps"}  # of an entry of samples
_PICTURES = ("ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3")


def put_sampling(sample: ToolConfig, train: ToolConfig, training: Training, divide: int) -> None:
    """Converts when pictures are drawn and how; `divide`: steps there in one here."""
    every = number_of(sample.any("sample_every"))
    off = train.any("disable_sampling") is True or not sample.layers[0].table
    steps = 0 if off else _EVERY if every is None else int(every)
    training.put("sample.every", max(1, steps // divide) if steps > 0 else 0, "sample.sample_every")
    sides = [number_of(sample.any(name)) for name in ("width", "height")]
    if not sample.layers[0].table:
        return
    size = [max(_SMALLEST, int(_SIDE if side is None else side) // _CELL * _CELL) for side in sides]
    training.put("sample.size", size, "sample.width")
    guidance, count, seed = (number_of(sample.any(name)) for name in ("guidance_scale", "sample_steps", "seed"))
    training.put_nearest("sample.guidance", float(_GUIDANCE if guidance is None else guidance), "sample.guidance_scale")
    training.put_nearest("sample.steps", _STEPS if count is None else int(count), "sample.sample_steps")
    if seed is not None and seed >= 0:
        training.put("sample.seed", int(seed), "sample.seed")
    elif seed is not None:
        training.note("sample.seed", seed, "seeds are never drawn at random; sample.seed keeps its default")


def prompts_of(sample: ToolConfig, trigger: str, training: Training) -> str:
    """The text of a prompt file for the samples. Raises `Unparsed`."""
    return prompt_text(_sampled(sample, trigger, training))


def _sampled(sample: ToolConfig, trigger: str, training: Training) -> Iterator[Sampled]:
    """The prompts: those of `samples`, or else of `prompts`, each with its seed where seeds walk."""
    entries: list[Any] = sample.get("samples", list, [])
    entries = entries or [{"prompt": text} for text in sample.get("prompts", list, [])]
    sample.any("prompts")
    start, walk = number_of(sample.any("seed")) or 0, sample.any("walk_seed") is True
    negative = sample.any("neg")
    for number, entry in enumerate(list_of(entries, lambda value, at: expect(value, dict, at), "sample.samples")):
        if entry.get("prompt"):
            own = {"seed": start + number} if walk and start >= 0 else {}
            shared = {"neg": negative, **{name: value for name, value in entry.items() if value is not None}}
            yield _entry(shared, own, sample, trigger, training, f"sample.samples[{number}]")


def _entry(entry: Mapping[str, Any], numbers: dict[str, Any], sample: ToolConfig, trigger: str, training: Training,
           where: str) -> Sampled:
    prompt, *options = str(entry["prompt"]).split("--")
    numbers |= {ours: number_of(entry[theirs]) for theirs, ours in _OWN.items() if theirs in entry}
    negative, pictures = entry.get("neg"), [str(entry[name]) for name in _PICTURES if entry.get(name)]
    for option in options:
        name, _, value = option.partition(" ")
        if name == "n":
            negative = value
        elif name in _FLAGS and (number := number_of(value)) is not None:
            numbers[_FLAGS[name]] = number
        elif name == "ctrl_img":
            pictures.append(value.strip())
        else:
            training.note(f"{where}.prompt", f"--{option.strip()}", "no counterpart; left out of the prompt")
    for name in entry:
        if name not in (*_OWN, *_PICTURES, "prompt", "neg") and entry[name] not in (None, False, 0, 1, "", "1.0"):
            training.note(f"{where}.{name}", entry[name], "no counterpart")
    references = [path for text in dict.fromkeys(pictures) if (path := _picture(text, sample, training, where))]
    return Sampled(prompt=prompt.replace("[trigger]", trigger), negative=negative if isinstance(negative, str) else "",
                   references=tuple(references), **numbers)


def _picture(text: str, sample: ToolConfig, training: Training, where: str) -> str:
    """The path of a picture that a prompt is for; a note, and "", if it is not here."""
    path: Path | None = sample.draft.existing(text)
    if path is None or not path.is_file() or " ".join(str(path).split()) != str(path):
        training.note(f"{where}.ctrl_img", text, "this picture is not here: name it in the prompt file, --ref PICTURE")
        return ""
    return str(path.absolute())
