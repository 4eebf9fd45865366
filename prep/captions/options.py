"""The settings of captions in a recipe."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from prep.parse import Unparsed, expect
from prep.setting import setting

MISSING_CAPTION = ("stop", "reject", "empty", "filename", "constant")
CAPTION_LINES = ("all", "first", "join")


def separator_check(value: Any, where: str) -> str:
    """A text that is not empty. Raises `Unparsed`."""
    if not expect(value, str, where):
        raise Unparsed(f"{where} is empty, expected what stands between tags, like ','")
    return str(value)


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionOptions:
    """The options of making variants of a picture's captions: see `prep.captions.variants`."""

    missing: str = setting("stop", choices=MISSING_CAPTION, help="what to do with pictures without a caption")
    constant: str = setting("", help="the caption of missing = \"constant\"")
    lines: str = setting("all", choices=CAPTION_LINES,
                         help="caption files with several lines; all: each is a caption; join: all are one")
    variants: int = setting(8, low=1, high=1024,
                            help="captions per sample, at most, if wildcards or shuffling make several")
    wildcards: bool = setting(False, help="{a|b} becomes a or b; {{ and }} are literal braces")
    shuffle: bool = setting(False, help="shuffle the tags")
    dropout: float = setting(0.0, high=1, help="probability of dropping a tag")
    separator: str = setting(",", check=separator_check, values="a text", help="between tags")
    keep_tokens: int = setting(0, high=1 << 20, help="tags at the start that keep their place")
    keep_separator: str = setting("|||", help="tags before the first, and after the second, keep their place")
    together: str = setting("", help="tags joined by this stay together, as one, for example \";;;\"; \"\": none")
    trigger: str = setting("", help="a word for every caption: at [trigger], else at the start")
    prefix: str = setting("", help="before every caption")
    suffix: str = setting("", help="after every caption")
