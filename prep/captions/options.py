"""What a recipe can say of captions, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass

from prep.parse import Unparsed, one_of, within

MISSING_CAPTION = ("stop", "reject", "empty", "filename", "constant")
CAPTION_LINES = ("all", "first", "join")


@dataclass(frozen=True, kw_only=True, slots=True)
class CaptionOptions:
    """What a picture's captions become: see `prep.captions.variants`."""

    missing: str = "stop"  # what happens to a picture without a caption
    constant: str = ""  # the caption of `missing = "constant"`
    lines: str = "all"  # of several lines, each is a caption (all), the first is, or they are joined
    variants: int = 8  # captions of a sample, at most, as far as chance makes them
    wildcards: bool = False  # {a|b} is one of a and b
    shuffle: bool = False  # tags in any order
    dropout: float = 0.0  # chance of a tag to be left out
    separator: str = ","  # between tags
    keep_tokens: int = 0  # tags at the start that stay where they are
    keep_separator: str = "|||"  # what is before the first, and after the second, stays where it is; "": none
    together: str = ""  # tags with this between them stay together, as one; a separator is put there; "": none
    trigger: str = ""  # a word that every caption has: at [trigger], else at the start
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
