"""Reads safetensors files of a checkpoint: checks the header before allocating, computes the digest while reading.

The safetensors library's own reader is not used. It maps the file, so a file that is truncated meanwhile would kill the
process with a signal; and it would read the file a second time after its digest was computed.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from prep.parse import Unparsed
from train.runs.checkpoint import open_weights
from train.runs.safetensors.header import TensorInfo, first_rows, joined, read_header, read_header_and_metadata

DTYPES: Mapping[str, torch.dtype] = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
_KEPT = {**DTYPES, "F64": torch.float64, "I64": torch.int64, "U8": torch.uint8}  # also by optimizers
# Also by LoRA files of other programs: factors in 8 bits, alphas as whole numbers.
STORED = {**_KEPT, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I32": torch.int32,
          "I16": torch.int16, "I8": torch.int8, "BOOL": torch.bool}
Wanted = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
Refused = Callable[[Path, Exception], Exception]


def read_safetensors(path: Path, wanted: Wanted | None, digest: str | None,
                     known: Mapping[str, torch.dtype] | None = None) -> dict[str, Tensor]:
    """The tensors of the file at `path`, on the CPU; they must be exactly those in `wanted` (None: any of the dtypes
    that are `known`, by default those that are trained).

    `digest`: the expected SHA-256 of the file, if any. Raises `Unparsed`, `OSError`.
    """
    return read_joined({path: digest}, wanted, lambda _, error: error, known=known)


def read_tensor(path: Path, info: TensorInfo, known: Mapping[str, torch.dtype] = DTYPES) -> Tensor:
    """One tensor of the file at `path`, whose header says `info` of it, of a dtype that is `known`. Raises `Unparsed`,
    `OSError`."""
    with open_weights(path) as handle:
        length = int.from_bytes(handle.read(8), "little")
        handle.seek(8 + length + info.start)
        return _read(handle, info, known)


def read_joined(files: Mapping[Path, str | None], wanted: Wanted | None, refused: Refused,
                only: Mapping[str, range] | None = None, known: Mapping[str, torch.dtype] | None = None,
                ) -> dict[str, Tensor]:
    """The tensors whose rows are in `files`, on the CPU; they must be exactly those in `wanted` (None: any of the
    dtypes that are `known`, by default those that are trained).

    `files`: each with its expected SHA-256, if any. `only`: the rows to return of a tensor, if not all. Of a file that
    has none of these nothing but the header is read. Raises what `refused` makes of an error in one file.
    """
    headers: dict[Path, _Header] = {}
    for path in files:
        with _refusing(refused, path), open_weights(path) as handle:
            headers[path] = _header(handle, os.fstat(handle.fileno()).st_size)
    with _refusing(refused, path if len(files) == 1 else path.parent):
        whole = joined((header.tensors, header.rows) for header in headers.values())
        if wanted is not None:
            _compare(whole, wanted)
    request = _JoinedRequest(whole=whole, only=only or {}, known=known or (DTYPES if wanted is None else _KEPT))
    tensors: dict[str, Tensor] = {}
    for path, digest in files.items():
        if request.any_of(headers[path]):
            with _refusing(refused, path):
                _read_file(path, digest, headers[path], request, tensors)
    return {name: tensors[name] if name in tensors else request.empty(name) for name in wanted or whole}


def names_of(path: Path) -> set[str]:
    """The names of the tensors in the file at `path`. Raises `Unparsed`, `OSError`."""
    with open_weights(path) as handle:
        return set(read_header(handle, os.fstat(handle.fileno()).st_size))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Header:
    """The tensors of a file, and the row of the whole tensor with which each begins."""

    tensors: Mapping[str, TensorInfo]
    rows: Mapping[str, int]


def _header(handle: Any, size: int) -> _Header:
    tensors, metadata = read_header_and_metadata(handle, size)
    return _Header(tensors=tensors, rows=first_rows(tensors, metadata))


@dataclass(frozen=True, kw_only=True, slots=True)
class _JoinedRequest:
    """What `read_joined` returns."""

    whole: Mapping[str, tuple[str, tuple[int, ...]]]
    only: Mapping[str, range]
    known: Mapping[str, torch.dtype]

    def span(self, name: str) -> range:
        """The rows of a tensor."""
        return self.only.get(name, range((*self.whole[name][1], 1)[0]))

    def empty(self, name: str) -> Tensor:
        dtype, shape = self.whole[name]
        return torch.empty(shape if name not in self.only else (len(self.span(name)), *shape[1:]),
                           dtype=self.known[dtype])

    def any_of(self, header: _Header) -> bool:
        """Whether a file has any of it. One without tensors is read for its digest, which nobody else would check."""
        return not header.tensors or any(
            name not in self.only or (header.rows[name] < self.span(name).stop
                                      and header.rows[name] + info.shape[0] > self.span(name).start)
            for name, info in header.tensors.items())


def _read_file(path: Path, digest: str | None, header: _Header, request: _JoinedRequest,
               tensors: dict[str, Tensor]) -> None:
    """Adds the tensors of a file, or their rows, to `tensors`. Raises `Unparsed`, `OSError`."""
    with open_weights(path) as handle:
        hashed = _Hashed(handle)
        if _header(hashed, os.fstat(handle.fileno()).st_size) != header:
            raise Unparsed("it was changed while it was read")
        for name, info in header.tensors.items():
            value, first, span = _read(hashed, info, request.known), header.rows[name], request.span(name)
            if not info.shape or range(first, first + len(value)) == span:
                tensors[name] = value
                continue
            target = tensors.setdefault(name, request.empty(name))
            begin, end = max(first, span.start), min(first + len(value), span.stop)
            if begin < end:
                target[begin - span.start : end - span.start] = value[begin - first : end - first]
    if digest is not None and hashed.hexdigest() != digest:
        raise Unparsed("its bytes do not match their digest")


@contextmanager
def _refusing(refused: Refused, path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, Unparsed) as error:
        raise refused(path, error) from None


class _Hashed:
    """A file that hashes the bytes read from it."""

    def __init__(self, handle: BinaryIO) -> None:
        self._handle, self._running = handle, hashlib.sha256()
        self.hexdigest = self._running.hexdigest

    def read(self, size: int) -> bytes:
        data = self._handle.read(size) or b""
        self._running.update(data)
        return data

    def readinto(self, buffer: memoryview) -> int:
        count = self._handle.readinto(buffer) or 0  # type: ignore[attr-defined]
        self._running.update(buffer[:count])
        return int(count)


def _compare(present: Mapping[str, tuple[str, tuple[int, ...]]], wanted: Wanted) -> None:
    """Raises `Unparsed` unless names, dtypes and shapes are as in `wanted`."""
    for name, (dtype, shape) in wanted.items():
        if name not in present:
            raise Unparsed(f"'{name}' is missing, expected shape {list(shape)}")
        seen, sides = present[name]
        if sides != shape or _KEPT.get(seen) != dtype:
            spelled = str(dtype).removeprefix("torch.")
            raise Unparsed(f"'{name}' has shape {list(sides)} {seen}, expected {list(shape)} {spelled}")
    for name in present:
        if name not in wanted:
            raise Unparsed(f"'{name[:80]}' is not a tensor of this run")


def _read(file: _Hashed | BinaryIO, info: TensorInfo, known: Mapping[str, torch.dtype] = DTYPES) -> Tensor:
    if info.dtype not in known:
        raise Unparsed(f"it has a tensor of dtype {info.dtype}, expected one of: {', '.join(known)}")
    value = torch.empty(info.shape, dtype=known[info.dtype])
    bytes_: Any = value.reshape(-1).view(torch.uint8).numpy()
    rest = memoryview(bytes_)
    while rest:
        count = file.readinto(rest)  # type: ignore[union-attr]  # opened without text
        if not count:
            raise Unparsed(f"it ends {len(rest)} bytes early")
        rest = rest[count:]
    return value
