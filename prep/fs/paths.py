"""Checks, before anything is written, that no source, mask, cache or output path lies inside another.

Paths are resolved first (links, `..`), and existing paths are compared by device and inode: so a link, a bind mount or
a different case on a case-insensitive disk cannot hide that two names are the same place.
"""

from __future__ import annotations

import os
import stat
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import overload

from prep.errors import PathError
from prep.formatting import shell_name
from prep.fs.place import Place, require_local
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import copy_of
from prep.fs.remote.objects import read_range

MARKER = "latentry.json"
HEAD = 1024  # bytes of a file that is to be replaced, which show what it is
_CHOSEN = ("grid", "run", "output")  # roles of what -o names, which is compared with what is there already
KINDS = {stat.S_ISDIR: "directory", stat.S_ISFIFO: "pipe", stat.S_ISCHR: "device", stat.S_ISBLK: "device",
         stat.S_ISSOCK: "socket"}


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedPath:
    """A path and its role, as messages name it."""

    role: str  # "pictures", "masks", "cache", "manifest", "output"
    path: Place
    may_hold: tuple[str, ...] = ()  # roles that may lie inside this one


def in_cache(path: str | Path) -> bool:
    """Whether a path, which need not exist, is a cache or lies in one; works below unsearchable directories, too."""
    return any(_is_cache(above) for above in (Path(path).absolute(), *Path(path).absolute().parents))


def cache_around(path: Path) -> Path | None:
    """The cache that a resolved path lies in, if any; a cache does not lie in itself."""
    return next((above for above in path.parents if _is_cache(above)), None)


def _is_cache(folder: Path) -> bool:
    try:
        return (folder / MARKER).is_file()
    except (OSError, ValueError):
        return False


def check_disjoint(places: Iterable[NamedPath]) -> None:
    """Raises `PathError` for the first pair of places that are the same, or of which one lies inside the other.

    Only pairs that share a name or an inode are compared: a thousand tars would be half a million pairs.
    """
    resolved = [(place, _compared(place.path)) for place in places]
    for first, second in _near([at for _, at in resolved]):
        (first_place, first_path), (second_place, second_path) = resolved[first], resolved[second]
        if same_place(first_path, second_path):
            role = f"{first_place.role} with -o" if first_place.role in _CHOSEN else second_place.role
            raise PathError(f"{first_place.role} {_show(first_place, first_path)} and {second_place.role} "
                            f"{_show(second_place, second_path)} are the same place",
                            hint=f"choose another path for the {role}")
        _check_inside(first_place, first_path, second_place, second_path)
        _check_inside(second_place, second_path, first_place, first_path)


def _near(paths: Sequence[Path]) -> list[tuple[int, int]]:
    """Pairs of which one may equal or contain the other, in the order of `itertools.combinations`: every pair for which
    `same_place` could be true of one path and of the other or a directory above it."""
    names: dict[Path, tuple[object, ...]] = {}
    called: dict[object, list[int]] = {}

    def names_of(path: Path) -> tuple[object, ...]:
        if path not in names:
            names[path] = (_fold(path), mark) if (mark := _mark(path)) else (_fold(path),)
        return names[path]

    for number, path in enumerate(paths):
        for name in names_of(path):
            called.setdefault(name, []).append(number)
    pairs = {(min(number, candidate), max(number, candidate)) for number, path in enumerate(paths)
             for above in (path, *path.parents) for name in names_of(above) for candidate in called.get(name, ())
             if number != candidate}
    return sorted(pairs)


def _compared(place: Place) -> Path:
    """A path that tells places apart: of one in a store, where its copy would be."""
    return copy_of(place) if isinstance(place, Bucket) else resolve(place)


@overload
def resolve(path: Path) -> Path: ...
@overload
def resolve(path: Bucket) -> Bucket: ...
def resolve(path: Place) -> Place:
    """`path` as an absolute path without links and `..`; it need not exist. A place in a store is what it is.

    Raises `PathError` for a loop of links, and for a path that is spelled like a URL.
    """
    if isinstance(path, Bucket):
        return path
    require_local(path)
    try:
        return path.resolve()
    except (OSError, RuntimeError) as error:
        raise PathError(f"cannot resolve path {str(path)[:200]}: {error}") from None


def same_place(first: Path, second: Path) -> bool:
    """Whether two resolved paths are the same place, by the rules of this disk."""
    if first == second:
        return True
    marks = _mark(first), _mark(second)
    if marks[0] is not None and marks[1] is not None:
        return marks[0] == marks[1]
    return first.parent != first and second.parent != second and _fold(first) == _fold(second) and _folds_case(first)


def is_inside(inner: Path, outer: Path) -> bool:
    """Whether resolved `inner` lies below resolved `outer`, at any depth."""
    return any(same_place(parent, outer) for parent in inner.parents)


def check_source(path: Path) -> None:
    """Raises `PathError` unless `path` is a directory outside any cache."""
    check_directory(path)
    check_not_cache(path)


def check_directory(source: Place, hint: str = "") -> None:
    """Raises `PathError` unless a source is a directory; whether objects are below one in a store, listing them shows.
    """
    if isinstance(source, Bucket) or source.is_dir():
        return
    if source.suffix.lower() == ".zip" and source.is_file():
        hint = unpacking(source)
    raise PathError(f"source {source} {'is not a directory' if source.exists() else 'does not exist'}", hint=hint)


def unpacking(path: Path) -> str:
    """What to do with a zip of pictures, as Civitai and others give data sets out."""
    return (f"unpack it first: python -m zipfile -e {shell_name(str(path))} {shell_name(path.stem)}; the directory is "
            "then the SOURCE")


def check_not_cache(path: Path) -> None:
    """Raises `PathError` if `path` is a cache or lies inside one: a cache is never read as a source of pictures."""
    at = resolve(path)
    for folder in (at, *at.parents):
        if (folder / MARKER).is_file() and (folder / "shards").is_dir():
            raise PathError(f"source {path} is part of the cache {folder}, which holds no pictures",
                            hint="name the directory with the original pictures")


def check_replaceable(path: Place, what: str, ours: Callable[[bytes], bool]) -> None:
    """Raises `PathError` unless `path` is a new file, or a regular file that `ours` accepts as one of the same kind; or
    likewise an object. Raises `StoreError`.

    `ours` gets the first kilobyte of an existing file; `what` names the kind, such as "manifest". Links are followed.
    """
    if isinstance(path, Bucket):
        with suppress(FileNotFoundError):
            if not ours(read_range(path.url, 0, HEAD)):
                raise PathError(f"{path} exists and is no {what}, so it is not replaced", hint="choose another URL")
        return
    folder = path.absolute().parent
    check_above(path, what)
    if not folder.is_dir():
        raise PathError(f"{what} {path} cannot be written: there is no directory {folder}",
                        hint="make the directory first")
    if not os.access(folder, os.W_OK):
        raise PathError(f"{what} {path} cannot be written: no permission to write in {folder}")
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISREG(mode):  # opening a pipe would wait, and renaming a file over a device would replace it
        kind = next((name for test, name in KINDS.items() if test(mode)), "something else")
        raise PathError(f"{what} {path} is a {kind}, expected a file name",
                        hint="name a file, new or existing; the summary, or --json, is printed on stdout")
    with path.open("rb") as file:
        if not ours(file.read(HEAD)):
            raise PathError(f"{path} exists and is no {what}, so it is not replaced", hint="choose another file name")


def check_above(path: Path, what: str) -> None:
    """Raises `PathError` if the nearest existing place above `path` is no directory, so that none can be made there."""
    above = next(place for place in path.absolute().parents if place.exists())
    if not above.is_dir():
        raise PathError(f"{what} {path} cannot be written: {above} is not a directory",
                        hint="name a file in a directory")


def _check_inside(inner: NamedPath, inner_path: Path, outer: NamedPath, outer_path: Path) -> None:
    if inner.role not in outer.may_hold and is_inside(inner_path, outer_path):
        raise PathError(f"{inner.role} {_show(inner, inner_path)} lies inside {outer.role} {_show(outer, outer_path)}",
                        hint=f"choose a path for the {inner.role} outside {_resolved(outer, outer_path)}")


def _resolved(place: NamedPath, resolved: Path) -> Place:
    return place.path if isinstance(place.path, Bucket) else resolved


def _show(place: NamedPath, resolved: Path) -> str:
    """The path as it was given, and its resolved form if that differs."""
    if isinstance(place.path, Bucket):
        return f"'{place.path}'"
    absolute = Path.cwd() / place.path
    return f"'{place.path}'" if absolute == resolved else f"'{place.path}' (resolves to {resolved})"


def _mark(path: Path) -> tuple[int, int] | None:
    try:
        stamp = path.stat()
    except OSError:
        return None
    return stamp.st_dev, stamp.st_ino


def _fold(path: Path) -> str:
    return unicodedata.normalize("NFC", str(path)).casefold()


def _folds_case(path: Path) -> bool:
    """Whether the disk under `path` ignores case in names; tested on the nearest existing folder."""
    for folder in _existing(path):
        swapped = folder.with_name(folder.name.swapcase())
        if folder.name and swapped != folder:
            return _mark(swapped) == _mark(folder)
    return os.name == "nt"


def _existing(path: Path) -> Iterator[Path]:
    return (folder for folder in (path, *path.parents) if folder.exists())
