"""Messages between a scan and its workers, as msgpack types; `prep.scan.memo` stores answers in this form.

This module checks the values of a worker's answer beyond their types: a worker that a hostile picture has taken over
can only report something false about that picture.
"""

from __future__ import annotations

import errno
import os
import threading
from typing import Literal

import msgspec
import numpy as np

from prep.findings import CODES, Finding
from prep.fs.blob import Blob, TooLarge, error_code, fetched
from prep.fs.remote.retry import NEVER
from prep.parse import Unparsed, digest_of
from prep.scan.duplicates.correlation import LONG, SIDE, Gray, Thumb
from prep.scan.duplicates.identity import Identity
from prep.scan.duplicates.signature import LENGTH
from prep.scan.examine import Examined
from prep.sources.item import Item


class BlobMessage(msgspec.Struct, frozen=True, array_like=True):
    """A blob. Paths are bytes: they may not be valid UTF-8. One in a store has its bytes, or why it has none."""

    file: bytes
    offset: int
    length: int | None
    member: str
    data: bytes | None = None
    fault: tuple[str, str] | None = None  # the code of a finding, and what happened

    @classmethod
    def of(cls, blob: Blob, *, stop: threading.Event = NEVER) -> BlobMessage:
        """The message of a blob; one in a store is read. Raises `StoreError`, `Stopped`."""
        whole = fetched(blob, stop=stop)
        fault = None if whole.fault is None else (error_code(whole.fault), whole.fault.strerror or "")
        return cls(os.fsencode(blob.file), blob.offset, blob.length, blob.member, whole.data, fault)

    def blob(self) -> Blob:
        """The blob of the message."""
        fault = None
        if self.fault is not None:
            code, said = self.fault
            fault = TooLarge(errno.EFBIG, said) if code == "too-large" else OSError(errno.EIO, said)
        return Blob(file=os.fsdecode(self.file), offset=self.offset, length=self.length, member=self.member,
                    data=self.data, fault=fault)


class ItemMessage(msgspec.Struct, frozen=True, array_like=True):
    """An item."""

    name: str
    label: str
    source: int
    picture: BlobMessage
    caption: BlobMessage | None
    mask: BlobMessage | None
    metadata: BlobMessage | None
    caption_format: Literal["text", "json"]
    captions: tuple[str, ...]
    uncaptioned: str
    is_reference: bool

    @classmethod
    def of(cls, item: Item) -> ItemMessage:
        """The message of an item."""
        return cls(item.name, item.label, item.source, BlobMessage.of(item.picture), _message(item.caption),
                   _message(item.mask), _message(item.metadata), item.caption_format, item.captions, item.uncaptioned,
                   item.is_reference)

    def item(self) -> Item:
        """The item of the message."""
        return Item(name=self.name, label=self.label, source=self.source, picture=self.picture.blob(),
                    caption_at=_blob(self.caption), mask=_blob(self.mask), metadata=_blob(self.metadata),
                    caption_format=self.caption_format, captions=self.captions, uncaptioned=self.uncaptioned,
                    is_reference=self.is_reference)


class DecodeRequest(msgspec.Struct, frozen=True, array_like=True):
    """A picture to decode again; `file` is the digest that its bytes must have, or `None` for any."""

    picture: BlobMessage
    file: str | None = None


class PreviewMessage(msgspec.Struct, frozen=True, array_like=True):
    """A picture to shrink so that its longer side has at most `side` pixels."""

    picture: BlobMessage
    side: int


class ThumbMessage(msgspec.Struct, frozen=True, array_like=True):
    """The pixels of both halves of a thumbnail."""

    across: bytes
    down: bytes

    @classmethod
    def of(cls, thumb: Thumb) -> ThumbMessage:
        """The message of a thumbnail."""
        return cls(thumb.across.tobytes(), thumb.down.tobytes())

    def thumb(self) -> Thumb:
        """The thumbnail of the message. Raises `Unparsed` for impossible lengths."""
        return Thumb(across=_gray(self.across), down=_gray(self.down))


class ExaminedMessage(msgspec.Struct, frozen=True, array_like=True):
    """The results of examining an item."""

    findings: tuple[Finding, ...]
    identity: Identity | None
    thumb: ThumbMessage | None
    captions: tuple[str, ...]

    @classmethod
    def of(cls, examined: Examined, *, thumb: bool = True) -> ExaminedMessage:
        """The message of the results, with the thumbnail or without."""
        small = ThumbMessage.of(examined.thumb) if thumb and examined.thumb is not None else None
        return cls(examined.findings, examined.identity, small, examined.captions)

    def examined(self) -> Examined:
        """The results in the message. Raises `Unparsed` for values that `prep.scan.examine` never gives."""
        for finding in self.findings:
            if finding.code not in CODES:
                raise Unparsed(f"a finding has the unknown code {finding.code[:80]!r}")
        if self.identity is not None:
            _check_identity(self.identity)
        return Examined(findings=self.findings, identity=self.identity, captions=self.captions,
                        thumb=None if self.thumb is None else self.thumb.thumb())


def _check_identity(identity: Identity) -> None:
    digest_of(identity.file, "the digest of a picture")
    if min(identity.size) < 1 or not 0 <= identity.sample < 1 << 32 or len(identity.signature) not in (0, LENGTH):
        raise Unparsed(f"a picture has {identity.size[0]}x{identity.size[1]} pixels, sample {identity.sample} and a "
                       f"signature of {len(identity.signature)} bytes")


def _gray(data: bytes) -> Gray:
    length, rest = divmod(len(data), SIDE)
    if rest or not 0 < length <= LONG:
        raise Unparsed(f"half a thumbnail has {len(data)} bytes, expected rows of {SIDE} up to {LONG}")
    return np.frombuffer(data, np.uint8).reshape(SIDE, length)


def _message(blob: Blob | None) -> BlobMessage | None:
    return None if blob is None else BlobMessage.of(blob)


def _blob(message: BlobMessage | None) -> Blob | None:
    return None if message is None else message.blob()
