"""Caption lines to the captions that training may see, with weights: a pure function of lines and recipe.

What other trainers draw anew at each step (a line, a wildcard, the order of tags, dropped tags) is drawn here once, as
a fixed list. Each variant is a text row of its own, cached like any other, and `train` draws one whenever it shows the
sample. If there are few enough possibilities, all are taken; otherwise as many as the recipe says are drawn, keyed by
the line, so that the same line has the same variants everywhere. A line that is a JSON object stays one: its commas
separate no tags, and its braces hold no wildcards.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

from prep.captions.options import CaptionOptions
from prep.captions.read import HALF
from prep.digest import canonical

MEANING = 1  # raise it when the same line would get other variants
_WILDCARD = re.compile(r"\{([^{}|]*(?:\|[^{}|]*)+)\}")  # {a|b}; braces without a bar are plain text
_TIGHT = ("", ",", ".", ";", ":")  # characters that take no space before them
_OPEN, _CLOSE = "\x01", "\x02"  # stand-ins for {{ and }}, literal braces beside wildcards; in no caption
TRIGGER = "[trigger]"  # where the trigger word goes in a caption


def variants_of(lines: Sequence[str], choice: CaptionOptions) -> tuple[tuple[str, float], ...]:
    """(caption, weight) for each distinct variant of a sample's `lines`, in order; weights sum to 1.

    Every line has the same weight. The lines share `choice.variants`; each has at least one.
    """
    weights: dict[str, float] = {}
    share = max(1, choice.variants // max(1, len(lines)))
    for line in lines:
        spelled = [_dressed(tags, choice) for tags in _of_line(line, choice, share)]
        if len(lines) == len(spelled) == 1:  # as of most pictures: a weight that all share, and no dict
            return ((spelled[0], 1.0),)
        for caption in spelled:
            weights[caption] = weights.get(caption, 0.0) + 1.0 / (len(lines) * len(spelled))
    return tuple(weights.items())


def has_wildcards(line: str) -> bool:
    """Whether `line` has a `{a|b}`."""
    return json_object(line) is None and len(_parts(line)) > 1


def json_object(line: str) -> Mapping[str, Any] | None:
    """The JSON object that a line is, as captions for models that read such; `None`: it is none, or an empty one."""
    if not (line.startswith("{") and line.endswith("}")):
        return None
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) and value else None


def spell_json(value: Any) -> str:
    """A value as JSON on one line; in ASCII if an unpaired surrogate is in it, which only JSON's escapes can write."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return text if HALF.search(text) is None else json.dumps(value, separators=(",", ":"))


def _of_line(line: str, choice: CaptionOptions, most: int) -> list[str]:
    """Returns at least one caption, at most `most`."""
    if json_object(line) is not None:
        return [line]
    parts = _parts(line) if choice.wildcards else [[line]]
    wholes = 1
    for options in parts:
        wholes *= len(options)
    chancy = choice.shuffle or choice.dropout > 0
    if not chancy and wholes <= most:
        return [_ordered("".join(texts), choice, None) for texts in product(*parts)]
    drawn = []
    for number in range(most):
        stream = _numbers(line, number)
        text = "".join(options[next(stream) % len(options)] for options in parts)
        drawn.append(_ordered(text, choice, stream if chancy else None))
    return drawn


def _parts(line: str) -> list[list[str]]:
    """The line as texts and choices in turn: "a {b|c}" → [["a "], ["b", "c"], [""]]; {{ and }} are literal braces."""
    pieces = _WILDCARD.split(line.replace("{{", _OPEN).replace("}}", _CLOSE))
    plain = [piece.replace(_OPEN, "{").replace(_CLOSE, "}") for piece in pieces]
    return [piece.split("|") if place % 2 else [piece] for place, piece in enumerate(plain)]


def _ordered(text: str, choice: CaptionOptions, stream: Iterator[int] | None) -> str:
    """The caption with its free tags shuffled and dropped by `stream`; unchanged if that is None."""
    head, free, tail = _tags(text, choice)
    if stream is None:
        return text if choice.keep_separator not in text or not choice.keep_separator else \
            _joined([*head, *free, *tail], choice)
    if choice.shuffle:
        free = [tag for _, _, tag in sorted((next(stream), place, tag) for place, tag in enumerate(free))]
    remaining = [tag for tag in free if next(stream) >= choice.dropout * 2**64]
    if not (head or remaining or tail):
        remaining = free[:1]  # never drop all: an empty caption is the trainer's caption dropout
    return _joined([*head, *remaining, *tail], choice)


def _tags(text: str, choice: CaptionOptions) -> tuple[list[str], list[str], list[str]]:
    """(tags fixed at the start, free tags, tags fixed at the end)."""
    if choice.keep_separator and choice.keep_separator in text:
        first, _, rest = text.partition(choice.keep_separator)
        middle, _, last = rest.partition(choice.keep_separator)
        return _split(first, choice), _split(middle, choice), _split(last, choice)
    tags = _split(text, choice)
    return tags[: choice.keep_tokens], tags[choice.keep_tokens :], []


def _split(text: str, choice: CaptionOptions) -> list[str]:
    return [tag for part in text.split(choice.separator) if (tag := " ".join(part.split()))]


def _joined(tags: Sequence[str], choice: CaptionOptions) -> str:
    return f"{choice.separator.strip()} ".join(tags) if choice.separator.strip() else choice.separator.join(tags)


def _dressed(caption: str, choice: CaptionOptions) -> str:
    """The caption with trigger word, prefix and suffix; an empty caption stays empty. A JSON object gets the trigger
    word as its first value, so that it is still one."""
    if choice.together and json_object(caption) is None:
        caption = _joined([part.strip() for part in caption.split(choice.together)], choice)
    text = " ".join(caption.split())
    if not text:
        return ""
    if choice.trigger:
        named = text.replace(TRIGGER, choice.trigger)
        has = re.search(rf"(?<!\w){re.escape(choice.trigger)}(?!\w)", named)
        text = named if has else _with_trigger(named, choice)
    suffix = choice.suffix.strip()
    text += suffix if suffix[:1] in _TIGHT else f" {suffix}"
    return f"{choice.prefix.strip()} {text}".strip()


def _with_trigger(text: str, choice: CaptionOptions) -> str:
    table = json_object(text)
    if table is None:
        return _joined([choice.trigger, text], choice)
    return spell_json({"trigger": choice.trigger, **table})


def _numbers(line: str, number: int) -> Iterator[int]:
    """An endless stream of numbers below 2⁶⁴ for one variant of a line: SHAKE-256 of both, in blocks."""
    seed = canonical({"kind": "variant", "meaning": MEANING, "line": line, "number": number})
    block = 0
    while True:
        stream = hashlib.shake_256(seed + block.to_bytes(4, "little")).digest(512)
        yield from (int.from_bytes(stream[at : at + 8], "little") for at in range(0, len(stream), 8))
        block += 1


def captions_of(captions: Sequence[str], choice: CaptionOptions) -> tuple[tuple[str, float], ...]:
    """The variants of a picture's captions, with weights; empty if there are none."""
    return variants_of(_lines(captions, choice), choice)


def _lines(captions: Sequence[str], choice: CaptionOptions) -> Sequence[str]:
    """The lines of a caption file that the recipe uses."""
    if choice.lines == "join":
        return [" ".join(captions)] if captions else []
    return captions[:1] if choice.lines == "first" else captions
