"""The frame of tables: what would grow in memory, or lead out of the file, is seen before Arrow is asked."""

from __future__ import annotations

import struct

import pyarrow as pa
import pytest

from prep.cache import arrow as frame
from prep.cache import plans
from prep.cache.arrow import check_stream, parse_table, stream_of
from prep.cache.plans import SCHEMA as PLAN
from prep.cache.plans import TRAILER, read_plan, write_plan
from prep.cache.publish import publish_table
from prep.cache.records import Task
from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.manifest import tables
from prep.manifest.tables import read_table
from prep.parse import Unparsed

TABLE = pa.table({"number": pa.array(range(100), pa.int32()), "word": [f"word {number}" for number in range(100)]})


def file_of(table=TABLE, chunk=40, **options):
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema, options=pa.ipc.IpcWriteOptions(**options)) as writer:
        writer.write_table(table, max_chunksize=chunk)
    return bytearray(sink.getvalue())


def refused(data, message):
    with pytest.raises(Unparsed, match=message):
        stream_of(memoryview(data))


def first_batch(data):
    """The place of the first batch's message in a file, and that message."""
    schema = frame._message(memoryview(data), frame.BEGIN)
    return schema.end, frame._message(memoryview(data), schema.end)


def test_a_file_is_a_stream_with_something_around_it():
    data = file_of()
    stream = stream_of(memoryview(data))
    assert parse_table(stream, TABLE.schema).equals(TABLE) and check_stream(stream) == len(stream)
    assert parse_table(stream_of(memoryview(file_of(TABLE.slice(0, 0)))), TABLE.schema).num_rows == 0


@pytest.mark.parametrize(("options", "message"), [
    ({"compression": "zstd"}, "a batch is compressed, expected plain buffers"),
    ({"compression": "lz4"}, "a batch is compressed, expected plain buffers"),
    ({"metadata_version": pa.ipc.MetadataVersion.V4}, "is of version 4 or has metadata, expected version 5, none"),
    ({"use_legacy_format": True}, "a message at byte 8 begins with 0x.* and a size of "),
])  # fmt: skip
def test_files_written_in_another_way(options, message):
    refused(file_of(**options), message)


def test_a_bomb_is_not_expanded():
    """A gigabyte of zeros in some kilobytes."""
    data = file_of(pa.table({"word": pa.array(["\0" * (1 << 22)] * 16)}), compression="zstd")
    before = pa.default_memory_pool().max_memory()
    refused(data, "a batch is compressed")
    assert len(data) < 1 << 18 and pa.default_memory_pool().max_memory() == before


def test_dictionaries_and_views():
    refused(file_of(pa.table({"word": TABLE["word"].dictionary_encode()})), "message 1 is of kind 2, expected a schema")
    refused(file_of(pa.table({"word": pa.array(["a" * 30, "b"], pa.string_view())})), "variadic buffers, expected none")


def test_batches_without_number(monkeypatch):
    monkeypatch.setattr(frame, "MOST_BATCHES", 2)
    refused(file_of(), "it has more than 2 batches")


def test_a_batch_named_twice_by_the_footer_is_read_once():
    """Arrow's reader of files follows the footer: forty bytes there would be as many rows again, at no cost."""
    data = file_of(chunk=100)
    place = first_batch(data)[0]
    block = struct.pack("<q", place)
    assert bytes(data).count(block) == 1  # in the footer
    whole = parse_table(stream_of(memoryview(data)), TABLE.schema)
    assert whole.num_rows == 100
    data[bytes(data).index(block):][:8] = struct.pack("<q", 8)
    assert parse_table(stream_of(memoryview(data)), TABLE.schema).equals(whole)


@pytest.mark.parametrize(("number", "offset", "length", "message"), [
    (1, 8, 1 << 40, "a batch has a buffer outside its body of"), (1, -8, 8, "a batch has a buffer outside its body"),
    (1, 1 << 62, 8, "a batch has a buffer outside its body"), (1, 4, 8, "a batch has a buffer outside its body"),
    (3, 0, 160, "a batch has buffers that overlap"),
])  # fmt: skip
def test_buffers_that_lead_elsewhere(number, offset, length, message):
    data = file_of()
    place, batch = first_batch(data)
    vector = batch.header.offset(batch.header.member(batch.table, 2))
    struct.pack_into("<qq", data, place + 8 + vector + 4 + 16 * number, offset, length)
    refused(data, message)


def test_metadata_that_leads_out_of_itself():
    for at, form, number in ((0, "<I", 1 << 31), (0, "<I", 0), (0, "<I", 1 << 20)):
        data = file_of()
        place, batch = first_batch(data)
        struct.pack_into(form, data, place + 8 + at, number)
        refused(data, "its metadata leads out of itself")
    data = file_of()
    place, batch = first_batch(data)
    vector = batch.header.offset(batch.header.member(batch.table, 2))
    struct.pack_into("<I", data, place + 8 + vector, 1 << 30)
    refused(data, "its metadata leads out of itself")
    assert frame._Flat(memoryview(bytes(8))).number("<q", 0) == 0
    with pytest.raises(Unparsed, match="its metadata leads out of itself"):
        frame._Flat(memoryview(bytes(8))).number("<q", 4)


def test_files_that_are_cut():
    data = file_of()
    refused(data[:10], "it is not an Arrow IPC file")
    refused(b"x" + data[1:], "it is not an Arrow IPC file")
    refused(data[:8] + data[-6:], "it is not an Arrow IPC file")
    refused(data[:8] + b"\xff\xff\xff\xff\0\0\0\0" + data[-10:], "it ends before its schema")
    place, batch = first_batch(data)
    refused(data[:place] + data[-6:], "it ends in the middle")
    refused(data[:batch.end - 64] + data[-10:], r"has a body of \d+ bytes, but the file ends before that")
    refused(data[:-10] + struct.pack("<i", 7) + data[-6:], "its footer has 7 bytes, expected all bytes after")


def words(offsets, data):
    """Strings as an attacker would lay them out."""
    buffers = [None, pa.py_buffer(struct.pack(f"<{len(offsets)}i", *offsets)), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), len(offsets) - 1, buffers)


def test_what_arrow_finds_is_a_clean_error(cache, monkeypatch):
    """Offsets, UTF-8, nulls and other schemas; an empty file; one larger than any."""
    broken, noise = words([0, 90, 3], b"abc"), words([0, 2], b"\xff\xfe")
    schema = pa.schema([pa.field("word", pa.string(), nullable=False)])

    def read(data):
        return read_table(cache, publish_table(cache, lambda: [bytes(data)]), schema)

    for column, message in ((broken, "cannot be read: "), (noise, "cannot be read: .*UTF8"),
                            (pa.array(["a", None]), "its column 'word' has nulls")):
        with pytest.raises(CacheError, match=message):
            read(file_of(pa.table([column], schema=schema)))
    with pytest.raises(CacheError, match=r"it has columns .'number', 'word'., expected .'word'"):
        read(file_of())
    with pytest.raises(CacheError, match="it is empty"):
        read(b"")
    monkeypatch.setattr(tables, "MOST", 9)
    with pytest.raises(CacheError, match=r"it has \d+ bytes, expected at most 9$"):
        read(file_of())


def test_plans_are_looked_over_too(cache):
    """A plan is not named by its bytes, and whoever edits it makes its digest anew."""
    wanted = "ab" * 32
    task = Task(key="cd" * 32, field="latent", rows=("01" * 32, "02" * 32))
    write_plan(cache, wanted, [task])
    assert tuple(read_plan(cache, wanted)) == (task,)
    body = cache.plan(wanted).read_bytes()[:-TRAILER]
    rows = pa.ipc.open_stream(body).read_all().to_pylist()

    def read_as(body):
        cache.plan(wanted).write_bytes(body + bytes.fromhex(digest_bytes(body)))
        return read_plan(cache, wanted)

    def stream(changed, **options):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, PLAN, options=pa.ipc.IpcWriteOptions(**options)) as writer:
            writer.write_table(changed if isinstance(changed, pa.Table) else pa.Table.from_pylist(changed, schema=PLAN))
        return sink.getvalue().to_pybytes()

    def in_batches(changed):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, PLAN) as writer:
            writer.write_table(pa.Table.from_pylist(changed, schema=PLAN), max_chunksize=1)
        return sink.getvalue().to_pybytes()

    assert tuple(read_as(stream(rows))) == (task,)
    later = {**rows[0], "task": b"\xef" * 32, "field": "text"}  # its rows begin below the end of the others
    assert [one.field for one in read_as(stream([*rows, later]))] == ["latent", "text"]
    assert [one.field for one in read_as(in_batches([*rows, later]))] == ["latent", "text"]
    assert read_as(in_batches([{**rows[0], "rows": []}, later])) is None
    assert read_as(body + b"12345678") is None, "it has data after its end"
    assert read_as(stream(rows, compression="zstd")) is None
    for wrong in ({"task": None}, {"field": None}, {"field": "../x"}, {"rows": []}, {"rows": rows[0]["rows"][::-1]},
                  {"rows": None}, {"rows": [None]}, {"rows": rows[0]["rows"][:1] * 2}):
        assert read_as(stream([{**rows[0], **wrong}])) is None, f"a task has {wrong}"
    ends = pa.py_buffer(struct.pack("<2i", 0, 2))
    null = pa.Array.from_buffers(PLAN.field("rows").type, 1, [pa.py_buffer(b"\0"), ends],
                                 children=[pa.array(rows[0]["rows"], pa.binary(32))])  # a null that has rows
    assert read_as(stream(pa.Table.from_pylist(rows, schema=PLAN).set_column(2, "rows", null))) is None
    backwards = pa.Table.from_pylist([{**rows[0], "rows": rows[0]["rows"][::-1]}], schema=PLAN)
    with pytest.raises(Unparsed, match="a task has nulls, no rows, or rows that do not ascend, expected keys in asc"):
        plans._parse(backwards)
