"""Items and what was found in them as bytes, between a scan and its worker processes: JSON and plain arrays, no pickle.

A frame is its length (4 bytes, little-endian) and that many bytes; a message is a JSON document, a line end, and bytes.
What comes from a worker is checked: whatever a hostile picture made of it, it can only say something.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from itertools import accumulate
from typing import Any, BinaryIO

import numpy as np

from prep.findings import Finding
from prep.fs.blob import Blob
from prep.parse import Unparsed, count, expect, list_of, one_of
from prep.scan.duplicates.correlation import LONG, SIDE, Gray, Thumb
from prep.scan.duplicates.identity import Identity
from prep.scan.examine import Examined
from prep.sources.item import Item

MOST_BYTES = 1 << 28  # of a frame; a caption's file may have as many
LENGTH = struct.Struct("<I")


def write_frame(stream: BinaryIO, body: bytes) -> None:
    """Sends `body` as a frame. Raises `OSError`."""
    stream.write(LENGTH.pack(len(body)) + body)
    stream.flush()


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body; `None` where the stream ends, or sends what is none. Raises `OSError`."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size or LENGTH.unpack(head)[0] > MOST_BYTES:
        return None
    length = LENGTH.unpack(head)[0]
    body = stream.read(length)
    return body if len(body) == length else None


def pack(document: Mapping[str, Any], data: bytes = b"") -> bytes:
    """A document and bytes as one."""
    return json.dumps(document, separators=(",", ":")).encode("ascii") + b"\n" + data


def unpack(body: bytes) -> tuple[dict[str, Any], bytes]:
    """The document and the bytes of a message. Raises `Unparsed`."""
    head, _, data = body.partition(b"\n")
    try:
        return expect(json.loads(head), dict, "the message"), data
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"the message is not JSON: {str(error)[:80]}") from None


# ---- items -----------------------------------------------------------------------------------------------------------


def pack_item(item: Item) -> dict[str, Any]:
    """An item as a document; `to_item` makes it again."""
    return {"name": item.name, "source": item.source, "picture": pack_blob(item.picture),
            "caption": None if item.caption is None else pack_blob(item.caption),
            "mask": None if item.mask is None else pack_blob(item.mask),
            "metadata": None if item.metadata is None else pack_blob(item.metadata),
            "caption_format": item.caption_format, "captions": list(item.captions)}


def unpack_item(document: Mapping[str, Any]) -> Item:
    """The item of a document that `of_item` made."""
    blobs = {name: None if document[name] is None else unpack_blob(document[name])
             for name in ("caption", "mask", "metadata")}
    return Item(name=document["name"], source=document["source"], picture=unpack_blob(document["picture"]),
                caption_format=document["caption_format"], captions=tuple(document["captions"]), **blobs)


def pack_blob(blob: Blob) -> list[Any]:
    """A blob as a document; `to_blob` makes it again."""
    return [blob.file, blob.offset, blob.length, blob.member]


def unpack_blob(document: list[Any]) -> Blob:
    """The blob of a document that `of_blob` made."""
    file, offset, length, member = document
    return Blob(file=file, offset=offset, length=length, member=member)


# ---- what was found --------------------------------------------------------------------------------------------------


def pack_examined(examined: Examined) -> dict[str, Any]:
    """What was found in an item as a document, but for its thumbnail."""
    identity = examined.identity
    return {"name": examined.name, "captions": list(examined.captions),
            "findings": [[one.path, one.code, one.severity, one.detail] for one in examined.findings],
            "identity": None if identity is None else [identity.file, identity.sample, *identity.size,
                                                           identity.signature.hex()]}


def unpack_examined(document: Mapping[str, Any], thumb: Thumb | None) -> Examined:
    """What a document says that `of_examined` made. Raises `Unparsed`."""
    try:
        identity = document["identity"]
        return Examined(
            name=expect(document["name"], str, "name"), thumb=thumb,
            captions=tuple(list_of(document["captions"], lambda one, at: expect(one, str, at), "captions")),
            findings=tuple(list_of(document["findings"], _finding, "findings")),
            identity=None if identity is None else _identity(*expect(identity, list, "identity")))
    except Unparsed:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise Unparsed(f"what was found lacks a part: {error}") from None


def unpack_all_examined(document: Mapping[str, Any], data: bytes, count: int) -> list[Examined]:
    """What a worker's answer says of `count` items. Raises `Unparsed`."""
    found = list_of(document.get("found"), lambda one, at: expect(one, dict, at), "found")
    lengths = list_of(document.get("lengths"), lambda one, at: expect(one, int, at), "lengths")
    ends = list(accumulate(lengths, initial=0))
    if len(found) != count or len(lengths) != count or min(ends) < 0 or ends[-1] != len(data):
        raise Unparsed(f"an answer has {len(found)} items and {len(data)} bytes, expected {count} and {ends[-1]}")
    return [unpack_examined(one, unpack_thumb(data[start:end])) for one, start,
            end in zip(found, ends, ends[1:], strict=False)]


def pack_thumb(thumb: Thumb | None) -> bytes:
    """A thumbnail as bytes: both its lengths, and its pixels."""
    if thumb is None:
        return b""
    lengths = struct.pack("<HH", thumb.across.shape[1], thumb.down.shape[1])
    return lengths + thumb.across.tobytes() + thumb.down.tobytes()


def unpack_thumb(data: bytes) -> Thumb | None:
    """The thumbnail of bytes that `of_thumb` made. Raises `Unparsed`."""
    if not data:
        return None
    across, down = struct.unpack_from("<HH", data) if len(data) >= 4 else (0, 0)
    if not (0 < across <= LONG and 0 < down <= LONG) or len(data) != 4 + SIDE * (across + down):
        raise Unparsed(f"a thumbnail has {len(data)} bytes for lengths of {across} and {down}")
    split = 4 + SIDE * across
    return Thumb(across=_gray(data[4:split], across), down=_gray(data[split:], down))


def _gray(data: bytes, length: int) -> Gray:
    return np.frombuffer(data, np.uint8).reshape(SIDE, length)


def _finding(value: Any, where: str) -> Finding:
    path, code, severity, detail = list_of(value, lambda one, at: expect(one, str, at), where)
    kind: Any = one_of(severity, ("error", "warning", "info"), where)
    return Finding(path=path, code=code, severity=kind, detail=detail)


def _identity(file: Any, sample: Any, width: Any, height: Any, signature: Any) -> Identity:
    return Identity(file=expect(file, str, "file"), sample=count(sample, "sample"),
                    signature=bytes.fromhex(expect(signature, str, "signature")),
                    size=(count(width, "width"), count(height, "height")))
