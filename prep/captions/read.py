"""Caption bytes to captions. Each non-empty line of a text file is a caption; a JSON file has its own keys.

The recipe says what becomes of several captions (all, the first, or joined), and which variants are made of them.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from prep.formatting import counted
from prep.parse import Repeated, keep_repeated

_UTF16 = ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x84\x86-\x9f]")  # all except tab and line ends
HALF = re.compile("[\ud800-\udfff]")  # unpaired surrogates: JSON can spell them, no text encoding or file name can
MANY_WORDS = 512  # more than any text encoder takes
_LISTS, _STRINGS = ("captions", "texts"), ("caption", "text", "prompt")  # keys of JSON captions, by preference

CaptionNote = tuple[str, str]  # (code of prep.findings.CODES, what was seen)
Format = Literal["text", "json"]


class BadCaption(Exception):
    """A caption file cannot be used. `code` is one of prep.findings.CODES."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail


def read_caption(data: bytes, form: Format = "text") -> tuple[str, ...]:
    """The captions in a file; empty if it has no text. Raises `BadCaption` if it is not text or cannot be decoded."""
    return examine_caption(data, form)[0]


def examine_caption(data: bytes, form: Format = "text") -> tuple[tuple[str, ...], tuple[CaptionNote, ...]]:
    """(captions, notes on their encoding). UTF-8 with or without BOM, UTF-16 with one. Raises `BadCaption`."""
    text, notes = _decoded(data)
    captions, said = judge_captions(text.splitlines() if form == "text" else _in_json(text))
    if not captions:
        named = f" under any of {', '.join((*_LISTS, *_STRINGS, 'tags'))}" if form == "json" else ""
        return (), (*notes, ("empty-caption", f"caption file has {counted(len(data), 'byte')} and no text{named}"))
    return captions, (*notes, *said)


def judge_captions(texts: Iterable[str]) -> tuple[tuple[str, ...], tuple[CaptionNote, ...]]:
    """(captions, each on one line; notes) from texts of a file or table; drops empty ones. Raises `BadCaption`."""
    lines = []
    for text in texts:
        if controls := _CONTROL.findall(text):
            raise BadCaption("caption-control-characters",
                             f"caption has {counted(len(controls), 'control character')}, expected plain text")
        if halves := HALF.findall(text):
            raise BadCaption("caption-encoding", f"caption has {counted(len(halves), 'unpaired surrogate')}, expected "
                             "valid Unicode")
        lines.append(" ".join(text.split()))
    captions = tuple(line for line in lines if line)
    notes: tuple[CaptionNote, ...] = ()
    if len(captions) > 1:
        notes += (("caption-multiline", f"{len(captions)} lines, each a caption"),)
    words = max((len(line.split()) for line in captions), default=0)
    if words > MANY_WORDS:
        notes += (("caption-too-long", f"{words} words; text encoders cut what exceeds 77 to {MANY_WORDS} tokens"),)
    return captions, notes


def captions_of(table: Mapping[str, Any]) -> list[str]:
    """The captions of a JSON object: a list, a string, tags, or a caption followed by its tags (as kohya writes it).

    Empty if it has none of these keys. Raises `BadCaption` for a value of another type or a repeated key.
    """
    twice = sorted(table.repeated & {*_LISTS, *_STRINGS, "tags"}) if isinstance(table, Repeated) else ()
    if twice:
        raise BadCaption("caption-json", f"caption has '{twice[0]}' twice, expected once")
    for key in _LISTS:
        if table.get(key) is not None:
            return [_string(entry, key) for entry in (table[key] if isinstance(table[key], list) else [table[key]])]
    named = next((key for key in _STRINGS if table.get(key) is not None), None)
    parts = [] if named is None else [_string(table[named], named)]
    tags = table.get("tags")
    if tags is not None:
        parts.append(", ".join(_string(tag, "tags") for tag in tags) if isinstance(tags, list) else
                     _string(tags, "tags"))
    return [", ".join(part for part in parts if part.strip())] if parts else []


def _in_json(text: str) -> list[str]:
    try:
        table = json.loads(text, object_pairs_hook=keep_repeated) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise BadCaption("caption-json", f"caption is not JSON: {str(error)[:80]}") from None
    if isinstance(table, str):
        return [table]
    if isinstance(table, list):
        return [_string(entry, "list") for entry in table]
    if not isinstance(table, dict):
        raise BadCaption("caption-json", f"caption is JSON of {type(table).__name__}, expected a table with 'caption'")
    return captions_of(table)


def _string(value: Any, key: str) -> str:
    if not isinstance(value, str):
        raise BadCaption("caption-json", f"'{key}' of the caption is {type(value).__name__}, expected a string")
    return value


def _decoded(data: bytes) -> tuple[str, tuple[CaptionNote, ...]]:
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
