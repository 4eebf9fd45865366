"""The caption options of a recipe, and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from prep.parse import Unparsed, one_of, within

MISSING_CAPTION = ("stop", "reject", "empty", "filename", "constant")
CAPTION_LINES = ("all", "first", "join")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionOptions:
    """How a picture's captions become variants: see `prep.captions.variants`."""

    missing: str = "stop"  # what to do with a picture without a caption
    constant: str = ""  # the caption of `missing = "constant"`
    lines: str = "all"  # of several lines: each is a caption (all), only the first is, or all joined are one
    variants: int = 8  # number of captions per sample, at most, if wildcards or shuffling make several
    wildcards: bool = False  # {a|b} becomes a or b
    shuffle: bool = False  # shuffle tags
    dropout: float = 0.0  # probability that a tag is dropped
    separator: str = ","  # between tags
    keep_tokens: int = 0  # number of tags at the start that stay in place
    keep_separator: str = "|||"  # tags before the first, and after the second, stay in place; "": none
    together: str = ""  # tags joined by this stay together; it becomes a separator; "": none
    trigger: str = ""  # a word for every caption: at [trigger], else at the start
    prefix: str = ""
    suffix: str = ""


def check_caption(caption: CaptionOptions, where: str) -> None:
    one_of(caption.missing, MISSING_CAPTION, f"{where}.missing")
    one_of(caption.lines, CAPTION_LINES, f"{where}.lines")
    within(caption.variants, 1, 1024, f"{where}.variants")
    within(caption.dropout, 0, 1, f"{where}.dropout")
    within(caption.keep_tokens, 0, 1 << 20, f"{where}.keep_tokens")
    if not caption.separator:
        raise Unparsed(f"{where}.separator is empty, expected what stands between tags, like ','")
