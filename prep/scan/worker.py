"""The tasks of a scan's workers: examine items, and decode pictures again to compare or show them."""

from __future__ import annotations

from collections.abc import Iterator

from prep.images.decode import quiet_pillow
from prep.scan.examine import check_item, exact_pixels, preview_jpeg, thumbnail
from prep.scan.protocol import DecodeRequest, ExaminedMessage, ItemMessage, PreviewMessage, ThumbMessage
from prep.workers.service import DECODING, Service, Task

LIMITS = DECODING


def _examine(items: tuple[ItemMessage, ...]) -> Iterator[ExaminedMessage]:
    for item in items:
        yield ExaminedMessage.of(check_item(item.item()))


def _pixels(message: DecodeRequest) -> Iterator[str]:
    yield exact_pixels(message.picture.blob(), message.file)


def _thumb(message: DecodeRequest) -> Iterator[ThumbMessage]:
    thumb = thumbnail(message.picture.blob(), message.file)
    if thumb is not None:
        yield ThumbMessage.of(thumb)


def _preview(message: PreviewMessage) -> Iterator[bytes]:
    yield preview_jpeg(message.picture.blob(), message.side)


EXAMINE = Task(name="examine", question=tuple[ItemMessage, ...], part=ExaminedMessage, work=_examine)
PIXELS = Task(name="pixels", question=DecodeRequest, part=str, work=_pixels)
THUMB = Task(name="thumb", question=DecodeRequest, part=ThumbMessage, work=_thumb)
PREVIEW = Task(name="preview", question=PreviewMessage, part=bytes, work=_preview)
SERVICE = Service(module=__name__, tasks=(EXAMINE, PIXELS, THUMB, PREVIEW), prepare=quiet_pillow)
