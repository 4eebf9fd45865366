"""Weights that are read, changed and written one tensor at a time, so that the memory is that of the largest."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from prep.errors import ModelError, PathError, first_line
from prep.formatting import format_bytes
from prep.parse import Unparsed
from prep.runs.documents import open_plain, refused
from prep.training.schema import Dtype
from train.merging.trained import another
from train.runs.checkpoint import files_of, open_weights
from train.runs.checkpoint_files import CheckpointFile
from train.runs.safetensors.header import ITEM_BYTES, TensorInfo, first_rows, joined, read_header_and_metadata
from train.runs.safetensors.reader import DTYPES, STORED, read_tensor

Infos = Mapping[str, TensorInfo]  # of a file
SPELLED: Mapping[Dtype, str] = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """The tensors of a run's file of weights, or of the pieces of one."""

    path: Path
    infos: Infos  # of the whole tensors; of pieces without their places
    rows: Mapping[str, Sequence[tuple[Path, TensorInfo]]]  # where the rows of each are, in their order

    def read(self, name: str) -> Tensor:
        """A whole tensor. Raises `CacheError`."""
        try:
            parts = [read_tensor(path, info, STORED) for path, info in self.rows[name]]
        except (OSError, Unparsed) as error:
            raise refused(self.path, error, another(self.path)) from None
        return parts[0] if len(parts) == 1 else torch.cat(parts)


def stored_at(path: Path) -> Stored:
    """The tensors of the file at `path`, or of the pieces in that directory. Raises `ModelError`, `CacheError`."""
    if not path.is_dir():
        infos = infos_of(path, from_run=True)
        return Stored(path=path, infos=infos, rows={name: [(path, info)] for name, info in infos.items()})
    headers: dict[Path, tuple[Infos, Mapping[str, int]]] = {}
    try:
        for piece in files_at(path):
            with open_weights(piece) as handle:
                tensors, metadata = read_header_and_metadata(handle, os.fstat(handle.fileno()).st_size)
            headers[piece] = tensors, first_rows(tensors, metadata)
        whole = joined(headers.values())
    except (OSError, Unparsed) as error:
        raise refused(path, error, another(path)) from None
    rows = {name: sorted((first[name], piece) for piece, (tensors, first) in headers.items() if name in tensors)
            for name in whole}
    return Stored(path=path, infos={name: TensorInfo(dtype=dtype, shape=shape, start=0,
                                                     end=prod(shape) * ITEM_BYTES[dtype])
                                    for name, (dtype, shape) in whole.items()},
                  rows={name: [(piece, headers[piece][0][name]) for _, piece in places]
                        for name, places in rows.items()})


def files_at(path: Path) -> list[Path]:
    """The file at `path`, or the pieces in that directory. Raises `Unparsed` if some are missing."""
    if not path.is_dir():
        return [path]
    names = [f"{path.name}/{each.name}" for each in path.iterdir()]
    return [path.parent / name for name in files_of(f"{path.name}.safetensors", names)]


def infos_of(path: Path, *, from_run: bool = False) -> Infos:
    """The tensors of a file of weights: of a run if `from_run`, else of a model. Raises `ModelError`, `CacheError`."""
    try:
        with open_weights(path) if from_run else open_plain(path.resolve()) as handle:
            tensors, _ = read_header_and_metadata(handle, os.fstat(handle.fileno()).st_size)
    except (OSError, Unparsed) as error:
        if from_run:
            raise refused(path, error, another(path)) from None
        raise ModelError(f"{path} cannot be used: {first_line(error)}") from None
    for name, info in tensors.items():
        if info.dtype not in SPELLED.values():
            raise ModelError(f"{path} has '{name[:80]}' in {info.dtype}, expected {' or '.join(SPELLED.values())}",
                             hint="name a model that is not quantized")
    return tensors


def part_of(files: Mapping[Path, Infos], dtype: Dtype | None, changed: Callable[[str, Tensor], Tensor],
            metadata: Mapping[str, str], read: Callable[[str], Tensor] | None = None) -> CheckpointFile:
    """A file of the tensors in `files`, in this dtype or their own; each is read, or by `read` if that is given, and
    `changed` when it is written."""
    sources = {name: (path, info) for path, infos in files.items() for name, info in infos.items()}
    tensors = {name: torch.empty(info.shape, dtype=DTYPES[info.dtype if dtype is None else SPELLED[dtype]],
                                 device="meta") for name, (_, info) in sources.items()}
    names = {id(value): name for name, value in tensors.items()}

    def made(value: Tensor) -> Tensor:
        name = names[id(value)]
        if read is not None:
            return changed(name, read(name))
        path, info = sources[name]
        try:
            stored = read_tensor(path, info)
        except (OSError, Unparsed) as error:
            raise ModelError(f"{path} cannot be used: {first_line(error)}") from None
        return changed(name, stored)

    return CheckpointFile(name="", tensors=tensors, metadata=metadata, fetch=made)


def cast(name: str, whole: Tensor, dtype: Dtype | None, value: Tensor) -> Tensor:
    """`whole` in the dtype that is asked for, else in that of `value`. Raises `ModelError` for what that cannot hold.
    """
    cast = whole.to(value.dtype if dtype is None else DTYPES[SPELLED[dtype]])
    if not bool(cast.isfinite().all()) and bool(value.isfinite().all()):
        raise ModelError(f"'{name[:80]}' has values that {str(cast.dtype).removeprefix('torch.')} cannot hold",
                         hint="choose another dtype: --dtype bfloat16 or --dtype float32")
    return cast


def size_of(infos: Infos, dtype: Dtype | None) -> int:
    """Bytes of the tensors in this dtype; `None`: in their own."""
    item = None if dtype is None else ITEM_BYTES[SPELLED[dtype]]
    return sum((info.end - info.start) // ITEM_BYTES[info.dtype] * (item or ITEM_BYTES[info.dtype])
               for info in infos.values())


def check_space(output: Path, needed: int, what: str) -> None:
    """Raises `PathError` unless the disk has room for so many bytes at `output`."""
    disk = next(place for place in output.absolute().parents if place.exists())
    free = shutil.disk_usage(disk).free
    if free < needed:
        raise PathError(f"{disk} has {format_bytes(free)} of free space, expected {format_bytes(needed)} for the "
                        f"{what}", hint="free some space, or name another place with -o")


def sha256_of(path: Path) -> str:
    """The digest of a file. Raises `OSError`."""
    running = hashlib.sha256()
    with open_weights(path) as handle:
        while data := handle.read(1 << 20):
            running.update(data)
    return running.hexdigest()
