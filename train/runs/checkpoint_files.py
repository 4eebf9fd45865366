"""Writes the files of checkpoints and results atomically; reads tensors back and checks their digests.

Checkpoints can be written in a thread, beside the next steps, from a copy in host memory of as many bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from prep.digest import digest_bytes
from prep.fs import atomic
from prep.loader.device import copied_to_host, to_device, to_host
from prep.parse import Unparsed
from train.runs.checkpoint import FORMAT, STATE, VERSION, State, list_checkpoints, step_name, way_out
from train.runs.documents import refused, seal
from train.runs.safetensors_reader import Wanted, names_of, read_safetensors
from train.runs.safetensors_writer import write_safetensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """One file of a checkpoint: tensors with metadata, or bytes."""

    name: str  # relative path
    tensors: Mapping[str, Tensor] | None = None
    metadata: Mapping[str, str] | None = None
    fetch: Callable[[Tensor], Tensor] = to_host  # the values of a tensor, if it is on the meta device
    data: bytes = b""


def save(run: Path, state: State, parts: Iterable[Part], keep: int) -> Path:
    """Writes the checkpoint of `state.step`, removes all but the newest `keep` (0: none); returns its directory."""
    folder = run / "checkpoints" / step_name(state.step)
    assert state.data is not None and state.micro_batch is not None, "a state that is saved is complete"
    body = {"format": FORMAT, "version": VERSION, "step": state.step, "manifest": state.manifest,
            "data": {"digest": state.data.digest, "facts": dict(state.data.facts)}, "base": dict(state.base),
            "config": dict(state.config), "init": dict(state.init), "meaning": state.meaning,
            "micro_batch": state.micro_batch,
            "adopted": [dict(each) for each in state.adopted]}
    write_folder(folder, parts, last=lambda files: Part(name=STATE, data=seal({**body, "files": files})))
    for old in list_checkpoints(run)[:-keep] if keep else ():
        atomic.remove_tree(old)
    return folder


class Saver:
    """Saves one checkpoint at a time. As a context manager, waits for the last one; its error is `wait`'s to raise."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[None] | None = None

    def save(self, run: Path, state: State, parts: Iterable[Part], keep: int, *, beside: bool,
             done: Callable[[], None]) -> None:
        """Saves a checkpoint as `checkpoint_files.save` does, then calls `done`.

        With `beside`, returns when `parts` are copied, and a thread writes them. Raises what saving the one before
        raised, and without `beside` what saving this one raises.
        """
        self.wait()
        if beside:
            self._saving = self._pool.submit(_save, run, state, [_copied(part) for part in parts], keep, done)
        else:
            _save(run, state, parts, keep, done)

    def check(self) -> None:
        """Raises the error of a save that has failed meanwhile."""
        if self._saving is not None and self._saving.done():
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being saved. Raises what that raised, once."""
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()


def _save(run: Path, state: State, parts: Iterable[Part], keep: int, done: Callable[[], None]) -> None:
    save(run, state, parts, keep)
    done()


def _copied(part: Part) -> Part:
    if part.tensors is None:
        return part
    return replace(part, tensors={name: copied_to_host(value) for name, value in part.tensors.items()})


def write_folder(folder: Path, parts: Iterable[Part],
                 last: Callable[[Mapping[str, Any]], Part] | None = None) -> None:
    """Writes a directory of exactly `parts` and syncs it; replaces an older directory.

    `last` makes a final part from the sizes and digests of the others: {name: {"bytes", "sha256"}}.
    """
    atomic.make_dirs(folder.parent)
    staged = atomic.temporary_name(folder)
    staged.mkdir()
    try:
        files: dict[str, dict[str, Any]] = {}
        for part in parts:
            digest = write_part(staged / part.name, part)
            files[part.name] = {"bytes": (staged / part.name).stat().st_size, "sha256": digest}
        if last is not None:
            part = last(files)
            write_part(staged / part.name, part)
        _sync_tree(staged)
        atomic.remove_tree(folder)
        atomic.rename(staged, folder)
        atomic.sync_dir(folder.parent)
    finally:
        atomic.remove_tree(staged)


def write_file(path: Path, part: Part) -> None:
    """Writes a part to `path` and syncs it; replaces an older file atomically."""
    staged = atomic.temporary_name(path)
    try:
        write_part(staged, part)
        atomic.rename(staged, path)
    finally:
        atomic.remove(staged)
    atomic.sync_dir(path.parent)


def write_part(path: Path, part: Part) -> str:
    """Creates the file and syncs it; returns its SHA-256."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if part.tensors is None:
        atomic.write_synced(path, part.data)
        return digest_bytes(part.data)
    with atomic.create(path) as handle:
        digest = write_safetensors(handle, part.tensors, {"format": "pt", **(part.metadata or {})}, part.fetch)
        atomic.sync(handle)
    return digest


def read_tensors(folder: Path, state: State, name: str, wanted: Wanted) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint: exactly `wanted`, with the digest checked. Raises `CacheError`."""
    path = folder / PurePosixPath(name)
    try:
        if name not in state.files:
            raise Unparsed("it is missing")
        return read_safetensors(path, wanted, state.files[name].sha256)
    except (OSError, Unparsed) as error:
        raise refused(path, error, way_out(folder)) from None


def tensor_names(folder: Path, state: State, name: str) -> set[str]:
    """The names of the tensors in one file of a checkpoint. Raises `CacheError`."""
    path = folder / PurePosixPath(name)
    try:
        if name not in state.files:
            raise Unparsed("it is missing")
        return names_of(path)
    except (OSError, Unparsed) as error:
        raise refused(path, error, way_out(folder)) from None


def copy_into(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copies `values` into the tensors of the same names; shapes were checked before."""
    with torch.no_grad():
        for name, target in targets.items():
            target.copy_(to_device(values[name], target.device))


def _sync_tree(folder: Path) -> None:
    for inner in sorted(folder.rglob("*")):
        if inner.is_dir():
            atomic.sync_dir(inner)
    atomic.sync_dir(folder)
