"""Frames: any value survives, and any bytes are a frame, an end, or refused."""

from __future__ import annotations

import io

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prep.parse import Unparsed
from prep.workers import protocol
from prep.workers.protocol import PART, TaskHeader, decode, encode, frame_of, read_frame, write_frame

VALUES = st.recursive(st.none() | st.booleans() | st.integers(-2**63, 2**64 - 1) | st.binary() |
                      st.text(st.characters(codec="utf-8")), lambda inner: st.lists(inner), max_leaves=20)


@given(VALUES)
def test_frames_survive_the_way(value):
    kind, body = read_frame(io.BytesIO(frame_of(PART, value)))
    assert (kind, msgspec.msgpack.decode(body)) == (PART, value) and body == encode(value)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_frame_an_end_or_refused(data):
    stream = io.BytesIO(data)
    try:
        while (frame := read_frame(stream)) is not None:
            assert len(frame[1]) <= len(data)
    except Unparsed as error:
        assert "expected at most" in str(error)


@given(st.binary(max_size=40))
def test_any_bytes_are_a_value_or_refused(data):
    try:
        assert type(decode(data, TaskHeader)) is TaskHeader
    except Unparsed as error:
        assert 0 < len(str(error)) <= 200


@pytest.mark.parametrize("data", [b"\x91" * 100_000, b"\xa1\xff", b"\x93\xa1\xff\x01\x01", b"", b"\xc1"])
def test_what_no_worker_sends_is_refused(data):
    """Nested without end, a string that is not UTF-8, nothing."""
    for kind in (TaskHeader, str):
        with pytest.raises(Unparsed):
            decode(data, kind)


def test_a_string_that_is_not_utf_8_is_refused():
    with pytest.raises(Unparsed, match="a string is not UTF-8: invalid start byte"):
        decode(b"\xa1\xff", str)


def test_frames_have_a_bound(monkeypatch):
    monkeypatch.setattr(protocol, "MOST_BYTES", 100)
    stream = io.BytesIO()
    write_frame(stream, PART, b"x" * 101)
    stream.seek(0)
    with pytest.raises(Unparsed, match="a message has 101 bytes, expected at most 100"):
        read_frame(stream)
    with pytest.raises(MemoryError, match="a message has 202 bytes"):
        frame_of(PART, "x" * 200)
