"""Reads headers and captions for an overview: of many pictures an evenly spread sample, so that it takes seconds."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from threading import Event

from prep.captions.read import BadCaption, read_caption
from prep.captions.variants import TRIGGER, has_wildcards, json_object
from prep.fs.blob import read_blob
from prep.geometry import Size
from prep.images.decode import read_header
from prep.images.formats.parts import BadPicture
from prep.images.header import PictureHeader
from prep.progress import Tick
from prep.sources.item import Item

MOST_OPENED = 5000  # pictures whose header and caption it reads
_SEPARATOR = "|||"
TAGS, WORDS = 4, 4  # a caption is tags if it has at least 4 parts between commas, of at most 4 words on average


@dataclass(kw_only=True, slots=True)
class SampledFiles:
    """Counts from the opened files."""

    count: int = 0
    sizes: list[Size] = field(default_factory=list)
    unreadable: int = 0
    alpha: int = 0
    empty: int = 0  # captions without text
    several: int = 0  # captions with several lines
    wildcards: int = 0
    tags: int = 0  # captions that look like tags
    separated: int = 0  # captions with |||
    triggers: int = 0  # captions with [trigger]


def open_some(items: Sequence[Item], jobs: int, tick: Tick) -> SampledFiles:
    """Counts from the headers and captions of at most `MOST_OPENED` items, evenly spread."""
    every = -(-len(items) // MOST_OPENED)
    opened = SampledFiles()
    pool, stop = ThreadPoolExecutor(jobs), Event()
    try:
        for item, header, lines in pool.map(partial(_read, stop=stop), items[::every]):
            tick(1)
            opened.count += 1
            if header is None:
                opened.unreadable += 1
            else:
                opened.sizes.append(header.size)
                opened.alpha += header.has_alpha
            if item.caption is not None or item.captions:
                _count(lines, opened)
    finally:
        stop.set()  # threads may wait for a store
        pool.shutdown(cancel_futures=True)
    return opened


def _read(item: Item, stop: Event) -> tuple[Item, PictureHeader | None, tuple[str, ...]]:
    header, lines = None, item.captions
    with suppress(BadPicture, OSError):  # counted; prep scan gives the reason
        header = read_header(read_blob(item.picture, stop=stop))
    if item.caption is not None:
        try:
            lines = read_caption(read_blob(item.caption, stop=stop), item.caption_format)
        except (BadCaption, OSError):
            lines = ()
    return item, header, lines


def _count(lines: Sequence[str], opened: SampledFiles) -> None:
    text = "\n".join(line for line in lines if json_object(line) is None)  # whose commas and braces are no tags
    opened.empty += not lines
    opened.several += len(lines) > 1
    opened.wildcards += has_wildcards(text)
    opened.separated += _SEPARATOR in text
    opened.triggers += TRIGGER in text
    parts = [part.split() for part in text.split(",")]
    opened.tags += len(lines) == 1 and len(parts) >= TAGS and sum(map(len, parts)) <= WORDS * len(parts)
