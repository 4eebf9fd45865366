"""Saves checkpoints beside the next steps: a thread writes them from a copy in host memory of as many bytes.

Of a divided model each rank writes its own part, and the first one publishes the checkpoint when all have written.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from prep.errors import PathError
from prep.fs import atomic
from prep.loader.device import copied_to_host
from train.parallel.ranks import ALONE, Ranks
from train.runs.checkpoint import PIECES, State, step_name
from train.runs.checkpoint_files import CheckpointFile, publish, remove_old, save, state_part, write_parts

LOOKS, SECONDS = 60, 1.0  # NFS may take a minute to show a new directory on another machine


def save_pieces(run: Path, state: State, parts: Iterable[CheckpointFile], keep: int, ranks: Ranks) -> None:
    """Writes a checkpoint like `save`, to which each rank adds its own `parts`; all ranks call this.

    If one fails, all fail, and nothing is left. Raises `PathError` if the ranks do not share the directory of the run.
    """
    pieces = _Pieces(run, state, keep, ranks)
    pieces.publish(partial(pieces.write, parts))


class _Pieces:
    """A checkpoint of which each rank writes its own parts, in a directory that the first one makes. All ranks make
    this, which raises as `Ranks.share`, and call `publish`."""

    def __init__(self, run: Path, state: State, keep: int, ranks: Ranks) -> None:
        self._run, self._state, self._keep, self.ranks = run, state, keep, ranks
        self._folder = run / "checkpoints" / step_name(state.step)
        self._given_up = threading.Event()
        staged = atomic.temporary_name(self._folder)

        def stage() -> str:
            atomic.make_dirs(staged)
            return staged.name

        self._staged = self._folder.with_name(ranks.share(lambda: stage() if ranks.first else "")[0])

    def write(self, parts: Iterable[CheckpointFile]) -> dict[str, dict[str, Any]]:
        """Writes the parts of this rank; their sizes and digests. Raises `PathError` if it sees no directory."""
        _require(self._run, self._staged, self._given_up)
        return write_parts(self._staged, parts)

    def publish(self, written: Callable[[], dict[str, dict[str, Any]]]) -> None:
        """Makes the checkpoint of what all ranks have `written`. If one fails, all fail, and nothing is left."""
        try:
            pieces = self.ranks.share(written)
            self.ranks.share(lambda: self._publish(pieces) if self.ranks.first else None)
        finally:
            self.discard()

    def give_up(self, saving: Future[Any]) -> None:
        """Waits until this rank no longer writes, and removes what was written. Asks no other rank."""
        self._given_up.set()
        wait([saving])
        self.discard()

    def discard(self) -> None:
        """Removes what was written, unless it has become the checkpoint.

        A lost rank may still be writing: it does not find the renamed directory. What cannot be removed does not hide
        why the checkpoint was given up; the next start removes it.
        """
        if self.ranks.first:
            superseded = atomic.temporary_name(self._folder)
            with suppress(OSError):
                atomic.rename(self._staged, superseded)
                atomic.remove_tree(superseded)

    def _publish(self, written: list[dict[str, dict[str, Any]]]) -> None:
        files = {name: facts for each in written for name, facts in each.items()}
        publish(self._staged, self._folder, state_part(self._state, PIECES, files))
        remove_old(self._run, self._keep)


def require_shared(run: Path, ranks: Ranks) -> None:
    """Raises `PathError` unless all ranks see the same directory `run`; all ranks call this before the first step."""
    mark, first = atomic.temporary_name(run / "shared"), ranks.first

    def leave() -> str:
        mark.mkdir()
        return mark.name

    try:
        name = ranks.share(lambda: leave() if first else "")[0]
        ranks.share(lambda: _require(run, run / name, threading.Event()))
    finally:
        if first:
            atomic.remove_tree(mark)


def _require(run: Path, folder: Path, given_up: threading.Event) -> None:
    """Raises `PathError` if this rank does not see what the first one has made in `run`; stops waiting once it is given
    up."""
    for _ in range(LOOKS):
        if folder.is_dir():
            return
        if given_up.wait(SECONDS):
            break
    raise PathError(f"{run} is not the same directory on all ranks, but with --shard each writes its part of a "
                    "checkpoint", hint="name a directory that all ranks share with -o")


class Saver:
    """Saves one checkpoint at a time. As a context manager, waits for the last one; its error is `wait`'s to raise.

    Of a checkpoint in pieces, all ranks call each method at the same point of their steps.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._saving: Future[Any] | None = None
        self._pieces: _Pieces | None = None  # of what is being saved
        self._ranks = ALONE  # those that write pieces
        self._done: Callable[[], None] = _nothing
        self._then: Callable[[], object] = _nothing

    def save(self, run: Path, state: State, parts: Iterable[CheckpointFile], keep: int, *, beside: bool,
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

    def save_pieces(self, run: Path, state: State, parts: Iterable[CheckpointFile], keep: int, ranks: Ranks, *,
                    beside: bool, done: Callable[[], None]) -> None:
        """As `save`, but each rank writes its own parts of the checkpoint.

        With `beside`, it becomes one in a call of `check` or `wait`, when all ranks have written theirs.
        """
        self.wait()
        self._ranks = ranks
        if not beside:
            save_pieces(run, state, parts, keep, ranks)
            done()
            return
        pieces, copies = _Pieces(run, state, keep, ranks), list[CheckpointFile]()
        try:
            ranks.share(lambda: copies.extend(_copied(part) for part in parts))
        except BaseException:
            pieces.discard()
            raise
        self._pieces, self._done, self._saving = pieces, done, self._pool.submit(pieces.write, copies)

    def then(self, act: Callable[[], object]) -> None:
        """Calls `act` when what was saved last is whole on disk: now, or in the call of `check` or `wait` that ends it.
        """
        if self._saving is None:
            act()
        else:
            self._then = act

    def is_ready(self) -> bool:
        """Whether a save has ended meanwhile on this rank, well or not: it is time to `check`."""
        return self._saving is not None and self._saving.done()

    def check(self) -> None:
        """Ends a save that all ranks have written meanwhile. Raises the error of one that has failed."""
        if not self._ranks.any(not self.is_ready()):  # asked in each step: what ranks exchange depends on no clock
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is being saved. Raises what that raised, once."""
        saving, self._saving = self._saving, None
        pieces, self._pieces = self._pieces, None
        then, self._then = self._then, _nothing
        if saving is not None and pieces is not None:
            pieces.publish(saving.result)
            self._done()
        elif saving is not None:
            saving.result()
        then()

    def leave(self) -> None:
        """Like `wait`, but gives up a checkpoint in pieces: the connection to other ranks was lost."""
        if self._pieces is None:
            self.wait()
        elif self._saving is not None:
            self._pieces.give_up(self._saving)
            self._saving = self._pieces = None
            self._then = _nothing
        self._ranks = ALONE

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._pool.shutdown()


def _nothing() -> None:
    pass


def _save(run: Path, state: State, parts: Iterable[CheckpointFile], keep: int, done: Callable[[], None]) -> None:
    save(run, state, parts, keep)
    done()


def _copied(part: CheckpointFile) -> CheckpointFile:
    """A part of copies in host memory, whose writing needs no other rank any more."""
    if part.tensors is None:
        return part
    written: list[CheckpointFile] = []

    def take(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
        copies = {name: (part.fetch if value.is_meta else copied_to_host)(value) for name, value in tensors.items()}
        written.append(CheckpointFile(name=part.name, tensors=copies, metadata={**(part.metadata or {}), **metadata}))

    part.write(part.tensors, take)
    return written[0]
