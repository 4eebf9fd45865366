"""Places that people name: a path on this computer, or a place in an object store.

A word becomes a place once, where it is read: on a command line, in a recipe, a manifest or a run. From there it is
handed down as a value. Both kinds have the names of `Path`: `/`, name, stem, suffix, parent; as `str`, both are what a
person would type.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeGuard

from prep.errors import PathError, UsageError
from prep.fs.remote.bucket import Bucket, names_bucket

Place = Path | Bucket


@dataclass(frozen=True, slots=True)
class Local:
    """Files on this computer: those that a person named, or copies of what is at a place in a store.

    As `str`, it is what the person would type, for messages.
    """

    path: Path
    origin: Bucket | None = None  # the place in a store; None: `path` is what was named
    partial: bool = False  # whether some files of `origin` may have no copy

    def __str__(self) -> str:
        return str(self.origin or self.path)

    def __truediv__(self, name: str) -> Local:
        """What has `name` below this."""
        return replace(self, path=self.path / name, origin=self.origin and self.origin / name)

    def with_name(self, name: str) -> Local:
        """What has `name` beside this."""
        return replace(self, path=self.path.with_name(name), origin=self.origin and self.origin.with_name(name))


def place_of(named: str | os.PathLike[str] | Bucket) -> Place:
    """The place that a person's word names, relative to the working directory. Raises `PathError` for an odd URL."""
    if isinstance(named, Bucket):
        return named
    text = os.fspath(named)
    return Bucket.parse(text) if names_bucket(text) else Path(text)


def maybe_place(named: str | os.PathLike[str] | Bucket | None) -> Place | None:
    """As `place_of`; `None` for no word."""
    return None if named is None else place_of(named)


def place_below(base: Path, text: str) -> Place:
    """The place that a word in a file names, relative to the file's directory `base`. Raises `PathError`."""
    return Bucket.parse(text) if names_bucket(text) else base / text


def local_of(place: Place, bring: Callable[[Bucket], Path], *, partial: bool = True) -> Local:
    """The files of a place on this computer; `bring` copies what is needed of one in a store, and returns where it is.

    `partial`: whether that may be a part. Raises what `bring` raises.
    """
    return Local(place) if isinstance(place, Path) else Local(bring(place), place, partial)


def is_here(place: Place) -> TypeGuard[Path]:
    """Whether something is at a place on this computer."""
    return isinstance(place, Path) and place.exists()


def is_file(place: Place) -> TypeGuard[Path]:
    """Whether a place is a file on this computer."""
    return isinstance(place, Path) and place.is_file()


def is_directory(place: Place) -> TypeGuard[Path]:
    """Whether a place is a directory on this computer."""
    return isinstance(place, Path) and place.is_dir()


def require_here(named: str | os.PathLike[str] | Bucket, role: str) -> Path:
    """A place on this computer. Raises `PathError` for another; `role` is what it should be: "prompt file"."""
    place = place_of(named)
    if isinstance(place, Bucket):
        raise PathError(f"{role} {place} is in an object store, expected a path on this computer",
                        hint="name one; what is to be read can be downloaded first, and what is written uploaded later")
    return place


def require_output(named: str | os.PathLike[str] | Bucket, what: str) -> None:
    """Raises `UsageError` for a place in a store as the output of a command that writes `what` to a disk only."""
    place = place_of(named)
    if isinstance(place, Bucket):
        raise UsageError(f"{place} is in an object store, but {what} is written to a disk",
                         hint="name a place on this computer with -o, and upload it from there")


def require_disk(named: str | os.PathLike[str] | Bucket) -> Path:
    """A place on this computer, for what works there only. Raises `PathError` for another."""
    place = place_of(named)
    if isinstance(place, Bucket):
        raise PathError(f"{place} is in an object store, where this command does not work",
                        hint="name a place on this computer; of a manifest, prep pull MANIFEST DIR downloads what it "
                        "needs, and prep push MANIFEST URL uploads it again, to a new place without what no manifest "
                        "needs")
    return place
