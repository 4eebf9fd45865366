"""Checks the framing of an Arrow IPC file before Arrow parses it: only what Latentry's tables contain is accepted.

    b"ARROW1" 0 0 · schema · record batches · end of stream · footer · its length, int32 · b"ARROW1"
    a message: 0xFFFFFFFF, bytes of metadata as int32, metadata (a flatbuffer, Message.fbs), body; each a multiple of 8

Arrow would expand compressed bodies, read dictionaries, and follow a footer that names one batch ten thousand times:
each makes a small file large in memory. So compression and dictionaries are refused, batches and buffers must not share
bytes, and batches are read in their order; the footer is for other programs. `Table.validate` then checks the contents
of the buffers.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from prep.cache.ledger.columns import KEY, Column
from prep.errors import first_line
from prep.parse import Unparsed, brief

MAGIC = b"ARROW1"
BEGIN = 8  # offset of the stream in a file: after the padded magic
CONTINUED = 0xFFFFFFFF
SCHEMA, BATCH = 1, 3  # of Arrow's MessageHeader
V5 = 4  # of Arrow's MetadataVersion; since Arrow 1.0
MOST_BATCHES = 1 << 14  # of 65,536 rows
MOST_METADATA = 1 << 20  # bytes per message; Latentry writes hundreds to thousands


def stream_of(data: memoryview) -> memoryview:
    """The stream inside a file. Raises `Unparsed` unless the file holds exactly one table as Latentry writes it."""
    if len(data) < BEGIN + len(MAGIC) + 4 or data[:BEGIN] != MAGIC + b"\0\0" or data[-len(MAGIC):] != MAGIC:
        raise Unparsed("it is not an Arrow IPC file")
    end = check_stream(data, BEGIN)
    (footer,) = struct.unpack_from("<i", data, len(data) - len(MAGIC) - 4)
    if end + footer != len(data) - len(MAGIC) - 4:
        raise Unparsed(f"its footer has {footer} bytes, expected all bytes after its batches")
    return data[BEGIN:end]


def check_stream(data: memoryview, start: int = 0) -> int:
    """The end of the stream that starts at `start`. Raises `Unparsed` unless it has a schema, batches and an end."""
    at, number = start, 0
    while (message := _message(data, at)) is not None:
        if message.kind != (BATCH if number else SCHEMA):
            raise Unparsed(f"message {number} is of kind {message.kind}, expected a schema and then record batches")
        if number > MOST_BATCHES:
            raise Unparsed(f"it has more than {MOST_BATCHES} batches")
        if number:
            _check_batch(message)
        at = message.end
        number += 1
    if not number:
        raise Unparsed("it ends before its schema")
    return at + 8


@dataclass(frozen=True, kw_only=True, slots=True)
class _Message:
    """One message of a stream; its body lies within the data."""

    kind: int
    header: _Flat
    table: int  # offset of the header's table
    body: int  # bytes
    end: int  # offset of the next message


def _message(data: memoryview, at: int) -> _Message | None:
    """The message at `at`; `None` for the end of the stream."""
    if len(data) - at < 8:
        raise Unparsed("it ends in the middle")
    mark, size = struct.unpack_from("<Ii", data, at)
    if mark != CONTINUED or not 0 <= size <= min(MOST_METADATA, len(data) - at - 8) or size % 8:
        raise Unparsed(f"a message at byte {at} begins with {mark:#x} and a size of {size}")
    if not size:
        return None
    flat = _Flat(data[at + 8:at + 8 + size])
    message = flat.offset(0)
    version = flat.number("<h", flat.member(message, 0))
    if version != V5 or flat.member(message, 4):  # member 4: metadata, which marks compression in older files
        raise Unparsed(f"a message at byte {at} is of version {version + 1} or has metadata, expected version 5, none")
    body = flat.number("<q", flat.member(message, 3))
    if not 0 <= body <= len(data) - at - 8 - size or body % 8:
        raise Unparsed(f"a message at byte {at} has a body of {body} bytes, but the file ends before that")
    kind, header = flat.number("<B", flat.member(message, 1)), flat.member(message, 2)
    return _Message(kind=kind, header=flat, table=flat.offset(header) if header else 0, body=body,
                    end=at + 8 + size + body)


def _check_batch(message: _Message) -> None:
    """Raises `Unparsed` if a batch is compressed, or its buffers overlap or exceed its body."""
    flat, table = message.header, message.table
    if flat.member(table, 3):
        raise Unparsed("a batch is compressed, expected plain buffers")
    if flat.member(table, 4):
        raise Unparsed("a batch has variadic buffers, expected none")
    buffers = flat.pairs(flat.member(table, 2))
    offsets, lengths = buffers[:, 0], buffers[:, 1]
    inside = (offsets >= 0) & (lengths >= 0) & (offsets <= message.body) & (lengths <= message.body)
    if not inside.all() or (offsets + lengths > message.body).any() or (offsets % 8).any():
        raise Unparsed(f"a batch has a buffer outside its body of {message.body} bytes")
    if (offsets[1:] < offsets[:-1] + lengths[:-1]).any():
        raise Unparsed("a batch has buffers that overlap")


class _Flat:
    """A flatbuffer; every offset is checked to be inside it. Raises `Unparsed`."""

    def __init__(self, data: memoryview) -> None:
        self._data = data

    def number(self, form: str, at: int) -> int:
        """The number at an offset; 0, Arrow's default, for an absent member (`at` 0)."""
        if not at:
            return 0
        if not 0 < at <= len(self._data) - struct.calcsize(form):
            raise Unparsed("its metadata leads out of itself")
        return int(struct.unpack_from(form, self._data, at)[0])

    def offset(self, at: int) -> int:
        """The target of the relative offset at `at`."""
        target = at + (self.number("<I", at) if at else int.from_bytes(self._data[:4], "little"))
        if not at < target <= len(self._data) - 4:
            raise Unparsed("its metadata leads out of itself")
        return target

    def member(self, table: int, number: int) -> int:
        """The offset of a table's member; 0 if it is absent."""
        listing = table - self.number("<i", table)
        if listing <= 0 or 4 + 2 * number + 2 > self.number("<H", listing):
            return 0
        inside = self.number("<H", listing + 4 + 2 * number)
        return table + inside if inside else 0

    def pairs(self, at: int) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
        """A vector of pairs of int64, [n, 2]; empty if it is absent."""
        start = self.offset(at) if at else 0
        count = self.number("<I", start)
        if count * 16 > len(self._data) - start - 4:
            raise Unparsed("its metadata leads out of itself")
        return np.frombuffer(self._data, "<i8", 2 * count, start + 4).reshape(count, 2)


def parse_table(stream: memoryview, schema: pa.Schema) -> pa.Table:
    """The table in a stream whose framing `check_stream` has checked; its columns share the stream's memory.

    Checks everything that NumPy and Arrow rely on (14 ms for a million samples): types, offsets, lengths, UTF-8, and no
    nulls except where the schema allows them. Raises `Unparsed`.
    """
    try:
        reader = pa.ipc.open_stream(pa.py_buffer(stream))
        if not reader.schema.equals(schema, check_metadata=True):
            raise Unparsed(f"it has columns {brief(reader.schema.names)}, expected {schema.names}")
        table = reader.read_all()
        table.validate(full=True)
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: names that are not UTF-8
        raise error if isinstance(error, Unparsed) else Unparsed(brief(first_line(error))) from None
    for field, column in zip(schema, table.columns, strict=True):
        for chunk in column.chunks:
            _refuse_nulls(chunk, field)
    return table


def digests_of(array: pa.Array) -> Column:
    """Digests, binary(32) without nulls, as S32 [N]; they share the array's memory."""
    buffer = array.buffers()[1]
    return np.frombuffer(buffer if buffer is not None else b"", KEY)[array.offset : array.offset + len(array)]


def _refuse_nulls(array: pa.Array, field: pa.Field) -> None:
    if array.null_count and not field.nullable:
        raise Unparsed(f"its column '{field.name}' has nulls")
    if pa.types.is_list(field.type):
        _refuse_nulls(array.values, field.type.value_field)
    elif pa.types.is_struct(field.type):
        for number, inner in enumerate(field.type):
            _refuse_nulls(array.field(number), inner)
