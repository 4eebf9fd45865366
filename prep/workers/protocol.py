"""Messages between a command and its workers: frames of msgpack, decoded into types.

A frame is its kind (1 byte), its length (4 bytes, little-endian) and that many bytes. A question is a `HEADER` and a
`QUESTION`; its answer is any number of `PART`s and an `END`, `MEMORY` or `BUG`. A hostile file that takes a worker over
can only send such frames: their size is bounded, and values of another type are refused. Nothing is unpickled.

A value is encoded once, after space reserved for its frame's head, and written from there; a `memoryview` in a type is
a view of the bytes that were read.
"""

from __future__ import annotations

import struct
from typing import Any, BinaryIO, TypeVar

import msgspec

from prep.parse import Unparsed

T = TypeVar("T")

READY, HEADER, QUESTION, PART, END, MEMORY, BUG = b"RHQPEMB"
VERSION = b"latentry worker 2"  # the body of READY
MOST_BYTES = 1 << 28  # of a frame
_HEAD = struct.Struct("<BI")
_ROOM = bytes(_HEAD.size)
_ENCODER = msgspec.msgpack.Encoder()


class TaskHeader(msgspec.Struct, frozen=True, array_like=True):
    """The task of the question that follows, and its limits."""

    task: str
    seconds: float
    memory: int  # bytes


def write_frame(stream: BinaryIO, kind: int, body: bytes = b"") -> None:
    """Sends a frame of raw bytes. Raises `OSError`."""
    stream.write(_HEAD.pack(kind, len(body)) + body)


def frame_of(kind: int, value: Any) -> bytearray:
    """A whole frame of one value. Raises `MemoryError` for more than `MOST_BYTES`."""
    frame = bytearray(_ROOM)
    _ENCODER.encode_into(value, frame, len(_ROOM))
    length = len(frame) - len(_ROOM)
    if length > MOST_BYTES:
        raise MemoryError(f"a message has {length} bytes, expected at most {MOST_BYTES}")
    _HEAD.pack_into(frame, 0, kind, length)
    return frame


def read_frame(stream: BinaryIO) -> tuple[int, bytes] | None:
    """(kind, body) of the next frame; `None` at the end of the stream. Raises `OSError`, `Unparsed`."""
    head = stream.read(_HEAD.size)
    if len(head) < _HEAD.size:
        return None
    kind, length = _HEAD.unpack(head)
    if length > MOST_BYTES:
        raise Unparsed(f"a message has {length} bytes, expected at most {MOST_BYTES}")
    body = stream.read(length)
    return (kind, body) if len(body) == length else None


def encode(value: Any) -> bytes:
    """A value as msgpack."""
    return _ENCODER.encode(value)


def decode(body: bytes, kind: type[T]) -> T:
    """The value in a body. Raises `Unparsed` for a value of another type."""
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:  # ValidationError is a DecodeError
        raise Unparsed(str(error)[:200]) from None
    except UnicodeDecodeError as error:
        raise Unparsed(f"a string is not UTF-8: {error.reason}") from None
