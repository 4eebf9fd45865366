"""Reads facts from the bytes of a file, to be remembered (`prep.fs.memo`).

Results that depend on installed extras are not facts of the file: `NoDecoder` is raised, and nothing is remembered.
Results that depend on a decoder's version are remembered under that version (`fact_kinds`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from prep.captions.read import BadCaption, Format, read_caption
from prep.digest import digest_bytes, digest_strings
from prep.fs.memo import Fact, Memo, memo_path
from prep.images.decode import decode_picture, read_header
from prep.images.formats.parts import BadPicture, NoDecoder
from prep.images.mask import focus_in, mean_in
from prep.images.plugins import decoders

VERSION = 5  # of all facts; raised when the facts of a file or their meaning change
NO_CACHE = "view"  # the scope of facts that were read without a cache: by previews and pages


def open_facts(scope: str = NO_CACHE, *, trust: bool = True) -> Memo:
    """The memory of what this user's runs read from files; `scope`: the cache's path, if they were read for one."""
    return Memo(memo_path("files", str(VERSION), scope=scope), trust=trust)


def _picture_facts(data: bytes) -> Fact:
    digest = digest_bytes(data)
    try:
        header = read_header(data)
    except NoDecoder:
        raise
    except BadPicture as error:
        return {"digest": digest, "code": error.code, "detail": error.detail}
    facts = {"digest": digest, "width": header.size[0], "height": header.size[1], "alpha": header.has_alpha}
    return {**facts, "cut": True} if header.cut else facts


def _fault(data: bytes) -> Fact:
    """The reason why a picture cannot be decoded; empty if it can."""
    try:
        decode_picture(data, alpha="white")
    except NoDecoder:
        raise
    except BadPicture as error:
        return {"code": error.code, "detail": error.detail}
    return {}


def _mask_size(data: bytes) -> Fact:
    """The size of a mask, `None` if it cannot be read: encoding its row reports why."""
    try:
        return {"size": list(read_header(data).size)}
    except NoDecoder:
        raise
    except BadPicture:
        return {"size": None}


def _picture_and_focus(data: bytes) -> Fact:
    """The facts of a picture whose transparency is its mask."""
    facts = _picture_facts(data)
    return {**facts, "focus": focus_in(data, "alpha")} if facts.get("alpha") else facts


def _caption_facts(data: bytes, form: Format) -> Fact:
    """The captions of a file, without empty ones. After a change to how captions are read, raise `VERSION`."""
    try:
        return {"captions": [caption for caption in read_caption(data, form) if caption]}
    except BadCaption as error:
        return {"code": error.code, "detail": error.detail}


def fact_kinds() -> dict[str, str]:
    """The name under which each kind of fact is remembered; if decoders decide the fact, it includes their versions."""
    mark = digest_strings([decoders()])[:8]
    return {kind: kind if kind in _PLAIN else f"{kind} {mark}" for kind in READERS}


_PLAIN = {"caption", "caption-json", "file"}  # these depend on no decoder
READERS: Mapping[str, Callable[[bytes], Fact]] = {  # by kind of fact
    "picture": _picture_facts, "fault": _fault, "caption": lambda data: _caption_facts(data, "text"),
    "caption-json": lambda data: _caption_facts(data, "json"), "file": lambda data: {"digest": digest_bytes(data)},
    "mask": lambda data: {"digest": digest_bytes(data), "focus": focus_in(data, "mask")},
    "picture-alpha": _picture_and_focus, "mask-size": _mask_size,
    "mask-mean": lambda data: {"mean": mean_in(data, "mask")},
    "alpha-mean": lambda data: {"mean": mean_in(data, "alpha")},
}
