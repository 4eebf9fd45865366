"""Caption bytes → caption strings. Today a file is one caption: its lines are joined by spaces."""

from __future__ import annotations

import codecs
import re

_UTF16 = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")  # all but tab and line ends
MANY_WORDS = 512  # no text encoder of ours takes more tokens than this, and a word is at least one

Note = tuple[str, str]  # (code of codes.CODES, what was seen)


class BadCaption(Exception):
    """A caption file cannot be used. `code` is one of codes.CODES."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def read_caption(data: bytes) -> tuple[str, ...]:
    """The captions in a file; none when it has no text. Raises `BadCaption`: not text, or none we can decode."""
    return examine_caption(data)[0]


def examine_caption(data: bytes) -> tuple[tuple[str, ...], tuple[Note, ...]]:
    """(captions, notes on how they are written). UTF-8 with or without mark, UTF-16 with one. Raises `BadCaption`."""
    text, notes = _decoded(data)
    if _CONTROL.search(text):
        count = len(_CONTROL.findall(text))
        raise BadCaption("caption-control-characters", f"caption has {count} control characters, expected plain text")
    lines = [" ".join(line.split()) for line in text.splitlines()]
    caption = " ".join(line for line in lines if line)
    if not caption:
        return (), (*notes, ("empty-caption", f"caption file has {len(data)} bytes and no text"))
    written = sum(bool(line) for line in lines)
    if written > 1:
        notes += (("caption-multiline", f"{written} lines, joined by spaces"),)
    words = len(caption.split())
    if words > MANY_WORDS:
        notes += (("caption-too-long", f"{words} words; text encoders cut what exceeds 77 to {MANY_WORDS} tokens"),)
    return (caption,), notes


def _decoded(data: bytes) -> tuple[str, tuple[Note, ...]]:
    for mark, encoding in _UTF16:
        if data.startswith(mark):
            return _strictly(data[len(mark) :], encoding), (("caption-utf16", "caption is UTF-16, expected UTF-8"),)
    if data.startswith(codecs.BOM_UTF8):
        return _strictly(data[len(codecs.BOM_UTF8) :], "utf-8"), (("caption-bom", "a byte order mark was left out"),)
    return _strictly(data, "utf-8"), ()


def _strictly(data: bytes, encoding: str) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        seen = data[error.start : error.start + 1].hex()
        raise BadCaption("caption-encoding",
                         f"byte {error.start} of the caption is {seen}, expected {encoding.upper()} text") from None
