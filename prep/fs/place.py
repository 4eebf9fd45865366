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

from prep.errors import PathError, Problem
from prep.fs.remote.bucket import Bucket, names_bucket
from prep.parse import Unparsed, relative

Place = Path | Bucket
ANYWHERE = ("name one; what is to be read can be downloaded first, a dataset by prep pull MANIFEST DIR, and what is "
            "written uploaded later, by prep push MANIFEST URL")
OUTPUT = "name one with -o, and upload it from there"


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

    def new_file(self, name: str) -> Path:
        """Where what is made from these files is written: among them; of a store's, in the working directory."""
        return self.path / name if self.origin is None else Path(name)

    def name_of(self, target: Place) -> str:
        """How a document among these files names a place: by a relative path, so that both can move together. By an
        absolute one for copies, or if there is no relative one, as on another drive; and one in a store by its URL."""
        if isinstance(target, Bucket):
            return str(target)
        path, base = target.resolve(), self.path.resolve()
        try:
            return (path if self.origin is not None else Path(os.path.relpath(path, base))).as_posix()
        except ValueError:
            return path.as_posix()


def place_of(named: str | os.PathLike[str] | Bucket) -> Place:
    """The place that a person's word names, relative to the working directory. Raises `PathError` for an odd URL."""
    if isinstance(named, Bucket):
        return named
    text = os.fspath(named)
    return Bucket.parse(text) if names_bucket(text) else Path(text)


def maybe_place(named: str | os.PathLike[str] | Bucket | None) -> Place | None:
    """As `place_of`; `None` for no word."""
    return None if named is None else place_of(named)


def place_below(base: Place, text: str) -> Place:
    """The place that a word in a file names, relative to the file's directory `base`. Raises `PathError`, also for a
    relative path that leaves the bucket of `base`."""
    if names_bucket(text):
        return Bucket.parse(text)
    if isinstance(base, Path):
        return base / text
    if (place := base.follow(text)) is None:
        raise PathError(f"{text} leads out of the bucket of {base}", hint="name what is in the same bucket")
    return place


def relative_name(target: Place, document: Place) -> str | None:
    """How a document names a place: by a POSIX path relative to the document's directory, or in a store by its URL.

    A document in a store names a path relative to the working directory: as if it had been written there, and uploaded.
    `None` if no relative path exists (another drive), or if it is not portable (a backslash in a name).
    """
    if isinstance(target, Bucket):
        return str(target)
    base = Path.cwd() if isinstance(document, Bucket) else document.resolve().parent
    try:
        name = Path(os.path.relpath(target.resolve(), base)).as_posix()
    except ValueError:
        return None
    name = f"./{name}" if ":" in name.split("/")[0] else name  # otherwise Windows reads a drive letter
    return None if "\\" in name else name


def movable_name(target: Place, document: Place) -> str | None:
    """As `relative_name`, but relative in a store, too, so that both can move together if they are in one."""
    if isinstance(target, Bucket) and isinstance(document, Bucket):
        return document.parent.leads_to(target)
    return relative_name(target, document)


def name_from(source: Place, target: Place) -> str | None:
    """How a source of pictures names a place that may be outside of it: by a relative path, as `place_from` reads it.

    Of tars it is relative to their directory. `None` as in `relative_name`.
    """
    return movable_name(target, _directory_of(source) / "-")


def place_from(source: Place, name: str) -> Place | None:
    """The place that a source names; `None` for a name that no relative path could have, or that leaves its bucket."""
    try:
        if not names_bucket(name):
            relative(name, "name")
        place = place_below(_directory_of(source), name)
        return place if isinstance(place, Bucket) else Path(os.path.realpath(place.parent), place.name)
    except (Unparsed, PathError):
        return None


def _directory_of(source: Place) -> Place:
    """The directory of a source: where its tars are, or itself."""
    return source.parent if source.suffix == ".tar" and not is_directory(source) else source


def may_name(document: Place, target: Place) -> bool:
    """Whether a document can name a place: one in a store names only what is in its bucket."""
    return isinstance(document, Path) or document.shares_bucket(target)


def shortest_name(place: Place) -> str:
    """How a person would type a place: relative to the working directory if that is shorter."""
    if isinstance(place, Bucket):
        return str(place)
    try:
        return min(str(place), os.path.relpath(place), key=len)
    except ValueError:  # another drive
        return str(place)


def real_name(place: Place) -> str:
    """A name that a place has however it is spelled: its path without links, or its URL."""
    return str(place) if isinstance(place, Bucket) else os.path.realpath(place)


def mark_of(place: Place) -> object:
    """What tells a file or an object from others, whatever name leads there. Raises `OSError`."""
    if isinstance(place, Bucket):
        return place
    status = place.stat()
    return status.st_dev, status.st_ino


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


def is_link(place: Place) -> TypeGuard[Path]:
    """Whether a place is a link on this computer."""
    return isinstance(place, Path) and place.is_symlink()


def require_local(named: str | os.PathLike[str] | Bucket, role: str = "place", hint: str = ANYWHERE,
                  error: type[Problem] = PathError) -> Path:
    """A place on this computer. Raises `error` for one in a store; `role` is what it should be: "prompt file"."""
    place = place_of(named)
    if isinstance(place, Bucket):
        raise error(f"{role} {place} is in an object store, expected a path on this computer", hint=hint)
    return place


def require_stored(named: str | os.PathLike[str] | Bucket, example: str, hint: str) -> Bucket:
    """A place in a store, like `example`. Raises `PathError` for one on this computer."""
    place = place_of(named)
    if not isinstance(place, Bucket):
        raise PathError(f"{place} is not in an object store, expected a URL like {example}", hint=hint)
    return place
