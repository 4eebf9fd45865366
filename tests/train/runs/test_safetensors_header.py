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
from train.runs.safetensors_header import read_header

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
    (b"\x10\0\0", "it ends within its header, expected 8 more bytes"),
    (b"\xff\xff\0\0\0\0\0\0{}", "its header claims 65535 bytes, expected at most 2"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_what_the_format_does_not_allow(data, said):
    with pytest.raises(Unparsed) as caught:
        read(data)
    assert said in str(caught.value)


@given(st.binary(max_size=200), st.integers(0, 60))
def test_any_bytes_are_a_header_or_one_clear_error(data, length):
    try:
        read(length.to_bytes(8, "little") + data)
    except Unparsed as error:
        assert "\n" not in str(error)
