"""Headers of safetensors files: what the format does not allow is refused before anything is allocated."""

from __future__ import annotations

import io
import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save

from prep.parse import Unparsed
from train.runs.safetensors.header import TensorInfo, first_rows, joined, read_header

GOOD = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def file_of(header, size=8):
    spelled = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(spelled).to_bytes(8, "little") + spelled + b"\0" * size


def read(data):
    return read_header(io.BytesIO(data), len(data))


def test_a_header_of_the_library_is_read():
    tensors = {"b": torch.zeros(2, 3), "a": torch.ones(4, dtype=torch.bfloat16), "none": torch.zeros(0, 4)}
    found = read(save(tensors, {"x": "1"}))
    assert {name: (info.dtype, info.shape) for name, info in found.items()} == {
        "b": ("F32", (2, 3)), "a": ("BF16", (4,)), "none": ("F32", (0, 4))}


@pytest.mark.parametrize(("data", "said"), [
    (file_of({"a": {**GOOD, "dtype": "X9"}}), "tensor 'a' has dtype 'X9', expected one of: "),
    (file_of({"a": {**GOOD, "shape": [3]}}), "tensor 'a' has data_offsets [0, 8], expected a range for [3] F32"),
    (file_of({"a": {**GOOD, "shape": [-1]}}), "the shape of tensor 'a'"),
    (file_of({"a": {**GOOD, "shape": [1 << 40, 1 << 40]}}), "expected a range for"),
    (file_of({"a": {**GOOD, "data_offsets": [4, 12]}}, 12), "tensor 'a' begins at byte 4, expected 0"),
    (file_of({"a": GOOD, "b": GOOD}), "begins at byte 0, expected 8"),
    (file_of({"a": GOOD}, 9),
     f"it has {len(file_of({'a': GOOD}, 9))} bytes, expected {len(file_of({'a': GOOD}))} for its tensors"),
    (file_of(b'{"a": {}, "a": {}}'), "its header is not JSON: a name occurs twice"),
    (file_of({"a": 3}), "tensor 'a' is 3, expected a table"),
    (file_of({str(number): {**GOOD, "shape": [0], "data_offsets": [0, 0]} for number in range(65537)}, 0),
     "it has 65537 tensors, expected at most 65536"),
    (b"\x10\0\0", "it ends within its header, expected 8 more bytes"),
    (b"\xff\xff\0\0\0\0\0\0{}", "its header claims 65535 bytes, expected at most 2"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_the_format_does_not_allow(data, said):
    with pytest.raises(Unparsed) as caught:
        read(data)
    assert said in str(caught.value)


A = {"a": TensorInfo(dtype="F32", shape=(2, 3), start=0, end=24)}


@pytest.mark.parametrize(("places", "said"), [
    ("{", "its DCP_SHARDING_INFO is not JSON: "),
    ("[]", "DCP_SHARDING_INFO is [], expected a table"),
    ("{}", "its DCP_SHARDING_INFO and its header name different tensors"),
    ('{"a": 3}', "the offsets of tensor 'a' is 3, expected a table"),
    ('{"a": {"saved_offsets": [-1, 0]}}', "the offsets of tensor 'a'[0] is -1, expected a count"),
    ('{"a": {"saved_offsets": [2, 1]}}', "the offsets of tensor 'a' are [2, 1], expected those of rows of [2, 3]"),
    ('{"a": {"saved_offsets": [2]}}', "the offsets of tensor 'a' are [2], expected those of rows of [2, 3]"),
    ('{"a": {"saved_offsets": [4, 0]}}', ""),
])
def test_rows_of_a_file(places, said):
    if not said:
        assert first_rows(A, {"DCP_SHARDING_INFO": places}) == {"a": 4} and first_rows(A, {}) == {"a": 0}
        return
    with pytest.raises(Unparsed) as caught:
        first_rows(A, {"DCP_SHARDING_INFO": places})
    assert str(caught.value).startswith(said)


def info(*shape, dtype="F32"):
    return {"a": TensorInfo(dtype=dtype, shape=shape, start=0, end=0)}


@pytest.mark.parametrize(("pieces", "said"), [
    ([(0, info(2, 3)), (3, info(1, 3))], "tensor 'a' has [1, 3] F32 from row 3 on, expected rows like [2, 3] F32 from "
     "row 2 on"),
    ([(1, info(2, 3))], "tensor 'a' has [2, 3] F32 from row 1 on, expected rows like [2, 3] F32 from row 0 on"),
    ([(0, info(2, 3)), (1, info(2, 3))], "from row 1 on, expected rows like [2, 3] F32 from row 2 on"),
    ([(0, info(2, 3)), (2, info(2, 4))], "tensor 'a' has [2, 4] F32 from row 2 on"),
    ([(0, info(2, 3)), (2, info(2, 3, dtype="F16"))], "tensor 'a' has [2, 3] F16 from row 2 on"),
    ([(0, info()), (0, info())], "tensor 'a' has [] F32 from row 0 on, expected rows like [] F32 from row 1 on"),
])
def test_rows_follow_each_other(pieces, said):
    with pytest.raises(Unparsed) as caught:
        joined([(tensors, {"a": row}) for row, tensors in pieces])
    assert said in str(caught.value)
    assert joined([(info(1, 3), {"a": 4}), (info(4, 3), {"a": 0})]) == {"a": ("F32", (5, 3))}


@given(st.binary(max_size=200), st.integers(0, 60))
def test_any_bytes_are_a_header_or_one_clear_error(data, length):
    try:
        read(length.to_bytes(8, "little") + data)
    except Unparsed as error:
        assert "\n" not in str(error)
