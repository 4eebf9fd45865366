"""Reads what an ONNX file says of itself without running it: the shape of its input, and that it needs no other files.

An ONNX file is a protobuf message; the numbers of its fields are those of
https://github.com/onnx/onnx/blob/main/onnx/onnx.proto, which a test compares with. A tensor may name another file by a
path that leads anywhere (`external_data`), or an address in memory, and a runtime would read there: such a file is
refused, wherever the tensor is. None of the taggers has one; a file without is limited to 2 GiB by protobuf itself.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from prep.errors import ModelError
from prep.models.files import open_regular, unreadable

AGAIN = "download the model again; a tagger has the files of SmilingWolf/wd-vit-tagger-v3"
MOST_PARTS = 2_000_000  # fields that are looked at; the largest tagger has 30,000
LARGEST = 1 << 31  # bytes of a protobuf message
# Which fields of a message are messages again that have, or are, tensors.
PARTS: Final[Mapping[str, Mapping[int, str]]] = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto",
                       22: "SparseTensorProto", 23: "SparseTensorProto"},
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
    "TensorProto": {},
}
EXTERNAL_DATA, DATA_LOCATION = 13, 14  # fields of a TensorProto
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5  # types of fields

Value = int | memoryview  # of a field


class _Broken(Exception):
    """The bytes are no protobuf message."""


def input_shape(path: Path) -> tuple[int | None, ...]:
    """The shape of the first input of the ONNX model at `path`; `None`: a length that may vary. Raises `ModelError`,
    also for a model with tensors outside the file."""
    try:
        with open_regular(path) as file:
            size = path.stat().st_size
            if not 0 < size < LARGEST:
                raise ModelError(f"{path} has {size} bytes, expected an ONNX model of less than 2 GiB", hint=AGAIN)
            return _shape_in(memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)), path)
    except OSError as error:
        raise unreadable(path, error) from None
    except _Broken:
        raise ModelError(f"{path} is no ONNX model, or only a part of one", hint=AGAIN) from None


def _shape_in(data: memoryview, path: Path) -> tuple[int | None, ...]:
    _require_whole(data, path)
    for graph in _messages(data, 7):
        # Files of older exporters list the weights (initializer, 5) among the inputs (11), too.
        weights = {bytes(name) for tensor in _messages(graph, 5) for name in _messages(tensor, 8)}
        for given in _messages(graph, 11):
            if any(bytes(name) in weights for name in _messages(given, 1)):
                continue
            sizes = [_messages(shape, 1) for kind in _messages(given, 2) for tensor in _messages(kind, 1)
                     for shape in _messages(tensor, 2)]
            return tuple(next((value for number, value in _fields(dim) if number == 1 and isinstance(value, int)), None)
                         for dims in sizes for dim in dims)
    raise ModelError(f"{path} has no input, expected an ONNX model that takes pictures", hint=AGAIN)


def _require_whole(data: memoryview, path: Path) -> None:
    """Raises `ModelError` for a model with tensors outside its file, `_Broken` for what is no model."""
    left: list[tuple[str, memoryview]] = [("ModelProto", data)]
    count = 0
    while left:
        kind, message = left.pop()
        for number, value in _fields(message):
            count += 1
            if count > MOST_PARTS:
                raise ModelError(f"{path} has more than {MOST_PARTS} parts, expected a tagger", hint=AGAIN)
            inner = PARTS[kind].get(number)
            if inner is not None and isinstance(value, memoryview):
                left.append((inner, value))
            elif kind == "TensorProto" and (number == EXTERNAL_DATA or (number == DATA_LOCATION and value != 0)):
                raise ModelError(f"{path} names other files for its weights, expected a model in one file",
                                 hint="which files those are the model's author decides, so none is opened; save it "
                                 "with onnx.save(onnx.load(FILE), NEW), which has all in one")


def _messages(message: memoryview, wanted: int) -> list[memoryview]:
    """The values of a field that are messages or texts."""
    return [value for number, value in _fields(message) if number == wanted and isinstance(value, memoryview)]


def _fields(message: memoryview) -> Iterator[tuple[int, Value]]:
    """(number, value) of each field of a message, in order; those of fixed size without their value. Raises
    `_Broken`."""
    at, end = 0, len(message)
    while at < end:
        tag, at = _varint(message, at)
        if not 8 <= tag < 1 << 32:
            raise _Broken
        number, kind, value = tag >> 3, tag & 7, 0
        if kind == _VARINT:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind not in (_FIXED64, _BYTES, _FIXED32):
            raise _Broken
        start, size = (at, 8 if kind == _FIXED64 else 4) if kind != _BYTES else _varint(message, at)[::-1]
        at = start + size
        if at > end:
            raise _Broken
        yield number, message[start:at] if kind == _BYTES else 0


def _varint(message: memoryview, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and the place behind it. Raises `_Broken`."""
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(message):
            break
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise _Broken
