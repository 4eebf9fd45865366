"""Writes the files of checkpoints and results atomically; reads tensors back and checks their digests."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from prep.digest import digest_bytes
from prep.fs import atomic
from prep.loader.device import to_device, to_host
from prep.parse import Unparsed
from prep.runs.documents import refused, with_checksum
from train.runs.checkpoint import (
    AVERAGES,
    FORMAT,
    POWERS,
    STATE,
    VERSION,
    State,
    files_of,
    list_checkpoints,
    step_name,
    way_out,
)
from train.runs.safetensors.reader import Wanted, names_of, read_joined
from train.runs.safetensors.writer import write_safetensors

Write = Callable[[Mapping[str, Tensor], Mapping[str, str]], None]  # of tensors with metadata
Writer = Callable[[Mapping[str, Tensor], Write], None]


def _written_whole(tensors: Mapping[str, Tensor], write: Write) -> None:
    write(tensors, {})


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFile:
    """One file of a checkpoint: tensors with metadata, or bytes."""

    name: str  # relative path
    tensors: Mapping[str, Tensor] | None = None
    metadata: Mapping[str, str] | None = None
    fetch: Callable[[Tensor], Tensor] = to_host  # the values of a tensor, if it is on the meta device
    data: bytes = b""
    write: Writer = _written_whole  # of tensors


def save(run: Path, state: State, parts: Iterable[CheckpointFile], keep: int) -> Path:
    """Writes the checkpoint of `state.step`, removes all but the newest `keep` (0: none); returns its directory."""
    folder = run / "checkpoints" / step_name(state.step)
    write_folder(folder, parts, last=lambda files: state_part(state, VERSION, files))
    remove_old(run, keep)
    return folder


def state_part(state: State, version: int, files: Mapping[str, Any]) -> CheckpointFile:
    assert state.data is not None and state.micro_batch is not None, "a state that is saved is complete"
    return CheckpointFile(name=STATE, data=with_checksum({
        "format": FORMAT, "version": version, "step": state.step, "manifest": state.manifest,
        "data": {"digest": state.data.digest, "facts": dict(state.data.facts)}, "base": dict(state.base),
        "config": dict(state.config), "init": dict(state.init), "meaning": state.meaning,
        "micro_batch": state.micro_batch, "adopted": [dict(each) for each in state.adopted], "files": files}))


def remove_old(run: Path, keep: int) -> None:
    """Removes all checkpoints but the newest `keep` (0: none); their power-function averages stay."""
    for old in list_checkpoints(run)[:-keep] if keep else ():
        remove(run, old)


def remove(run: Path, old: Path) -> None:
    """Removes a checkpoint, whose power-function averages stay: files, or directories of their pieces."""
    for power in [place for name in POWERS for place in (old / name, (old / name).with_suffix("")) if place.exists()]:
        kept = run / AVERAGES / old.name
        atomic.make_dirs(kept)
        atomic.rename(power, kept / power.name)
    atomic.remove_tree(old)


def write_folder(folder: Path, parts: Iterable[CheckpointFile],
                 last: Callable[[Mapping[str, Any]], CheckpointFile] | None = None) -> None:
    """Writes a directory of exactly `parts` and syncs it; replaces an older directory.

    `last` makes a final part from the sizes and digests of the others: {name: {"bytes", "sha256"}}.
    """
    with atomic.new_directory(folder, replace=True) as staged:
        files = write_parts(staged, parts)
        if last is not None:
            write_parts(staged, [last(files)])


def write_parts(staged: Path, parts: Iterable[CheckpointFile]) -> dict[str, dict[str, Any]]:
    """Writes files into a directory and returns their sizes and digests. Raises `FileNotFoundError` if the directory is
    gone."""
    files = {}
    for part in parts:
        _make_parents(staged, part.name)
        digest = write_part(staged / part.name, part)
        files[part.name] = {"bytes": (staged / part.name).stat().st_size, "sha256": digest}
    return files


def publish(staged: Path, folder: Path, last: CheckpointFile) -> None:
    """Writes the last file into a directory, and puts that in the place of `folder`."""
    write_parts(staged, [last])
    atomic.publish_directory(staged, folder, replace=True)


def write_file(path: Path, part: CheckpointFile) -> None:
    """Writes a part to `path` and syncs it; replaces an older file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic.staged(path) as staged:
        write_part(staged, part)
        atomic.publish(staged, path, undo=False)


def write_part(path: Path, part: CheckpointFile) -> str:
    """Creates the file and syncs it; returns its SHA-256."""
    if part.tensors is None:
        atomic.write_synced(path, part.data)
        return digest_bytes(part.data)
    digests = []

    def write(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        with atomic.create(path) as handle:
            digests.append(write_safetensors(handle, tensors, {"format": "pt", **(part.metadata or {}), **metadata},
                                             part.fetch))
            atomic.sync(handle)

    part.write(part.tensors, write)
    return digests[0]


def has(folder: Path, state: State, name: str) -> bool:
    """Whether a checkpoint has a file, or pieces of it. Raises `CacheError`."""
    try:
        return bool(files_of(name, state.files))
    except Unparsed as error:
        raise refused(folder / PurePosixPath(name), error, way_out(folder)) from None


def read_tensors(folder: Path, state: State, name: str, wanted: Wanted,
                 only: Mapping[str, range] | None = None) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, or of its pieces: exactly `wanted`, with digests checked.

    `only`: the rows to return of a tensor, if not all. Files without any of these are not read. Raises `CacheError`.
    """
    files = {folder / PurePosixPath(each): state.files[each].sha256 for each in _files(folder, state, name)}
    return read_joined(files, wanted, lambda path, error: refused(path, error, way_out(folder)), only)


def tensor_names(folder: Path, state: State, name: str) -> set[str]:
    """The names of the tensors in one file of a checkpoint, or in its pieces. Raises `CacheError`."""
    names: set[str] = set()
    for each in _files(folder, state, name):
        try:
            names |= names_of(folder / PurePosixPath(each))
        except (OSError, Unparsed) as error:
            raise refused(folder / PurePosixPath(each), error, way_out(folder)) from None
    return names


def _files(folder: Path, state: State, name: str) -> tuple[str, ...]:
    if not has(folder, state, name):
        raise refused(folder / PurePosixPath(name), Unparsed("it is missing"), way_out(folder))
    return files_of(name, state.files)


def copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies `values` into the tensors of the same names; shapes were checked before."""
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(to_device(values[name], target.device))


def _make_parents(folder: Path, name: str) -> None:
    """Makes the directories of file `name` below `folder`, but not `folder`, which another rank may have given up."""
    for parent in reversed(PurePosixPath(name).parents[:-1]):
        (folder / parent).mkdir(exist_ok=True)
