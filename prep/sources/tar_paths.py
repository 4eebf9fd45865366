"""Expands a source's path into tars, here or in an object store: one, or several by braces and globs, in bounded time
for any pattern."""

from __future__ import annotations

import fnmatch
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath
from threading import Event

from braceexpand import braceexpand

from prep.errors import PathError
from prep.fs.blob import Blob
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import list_objects, version_of
from prep.fs.remote.retry import side_by_side

MOST_TARS = 1_000_000  # names that braces may expand to
MOST_CHARACTERS = 1 << 28  # of all these names together
MOST_FOLDERS = 1_000_000  # directories that a glob may search
ASKED = 32  # tars of a store at a time
LONGEST = 4096  # characters of a path; Linux accepts no more bytes
HINT = ("SOURCE is a directory of pictures, here or in a store (s3://bucket/photos), a .tar (braces and globs allowed) "
        "or a recipe .toml")
_RANGE = re.compile(r"\{(-?\d+)\.\.(-?\d+)(?:\.\.-?(\d+))?\}")
_GLOB = re.compile(r"[*?\[]")


def tars_of(path: Path) -> list[Path]:
    """The tars that `path` names: itself if it exists, else its braces and then its globs expanded.

    Raises `PathError` for a tar that does not exist, a glob without a match, and more than `MOST_TARS` tars.
    """
    if len(str(path)) > LONGEST:
        raise PathError(f"source {str(path)[:80]}… has {len(str(path))} characters, expected at most {LONGEST}")
    if path.exists():
        return [path]
    tars: list[Path] = []
    try:
        for pattern in map(Path, _expanded(str(path))):
            matches = _matching(pattern) if _GLOB.search(str(pattern)) else [pattern]
            if not matches:
                raise PathError(f"source {pattern} matches no file", hint=HINT)
            tars += matches
    except (ValueError, RecursionError) as error:
        raise PathError(f"source {path} cannot be expanded: {error}", hint=HINT) from None
    if missing := [tar for tar in tars if not tar.exists()]:
        raise PathError(f"source {missing[0]} does not exist" + (f", and neither do {len(missing) - 1} others of {path}"
                                                                 if len(missing) > 1 else ""), hint=HINT)
    return list(dict.fromkeys(tars))


def stored_tars(pattern: Bucket) -> list[Blob]:
    """Returns the tars in a store that `pattern` names by braces and globs, with the versions that listings give: one
    request for each tar, or for a thousand objects where there are globs.

    Raises `PathError` as `tars_of`; `StoreError`.
    """
    versions: dict[str, str] = {}
    try:
        for place in map(Bucket.parse, _expanded(str(pattern))):
            if _GLOB.search(str(place)):
                matches = _matching_in_store(place)
                if not matches:
                    raise PathError(f"source {place} matches no object", hint=HINT)
                versions |= matches
            else:
                versions.setdefault(str(place), "")
    except (ValueError, RecursionError) as error:
        raise PathError(f"source {pattern} cannot be expanded: {error}", hint=HINT) from None
    unchecked = [url for url, version in versions.items() if not version]
    versions |= dict(zip(unchecked, side_by_side(_version_at, unchecked, ASKED, Event()), strict=True))
    return [Blob(file=url, version=version) for url, version in versions.items()]


def _version_at(url: str) -> str:
    try:
        return version_of(url)
    except FileNotFoundError as error:
        raise PathError(f"source {url} does not exist: {error.strerror}", hint=HINT) from None


def _matching_in_store(pattern: Bucket) -> dict[str, str]:
    """The objects that a glob matches, and their versions, in the order of names."""
    names = pattern.parts[1:]
    start = next(number for number, part in enumerate(names) if _GLOB.search(part))
    if not start:
        raise ValueError(f"{names[0]!r} is no bucket")
    folder, parts = replace(pattern, key="/".join(names[1:start])), _parts(names[start:])
    return {f"{folder}/{name}": listing.version for name, listing in list_objects(folder.url).items()
            if _fits(parts, PurePosixPath(name).parts)}


def _fits(parts: list[_Part], names: tuple[str, ...]) -> bool:
    """Whether a glob matches a path."""
    places = _with_empty(parts, frozenset({0}))
    for name in names:
        following = {place for place in places if place < len(parts) and parts[place] is None}
        for place in places - following:
            part = parts[place] if place < len(parts) else None
            if part == name or (isinstance(part, re.Pattern) and part.match(name)):
                following.add(place + 1)
        places = _with_empty(parts, frozenset(following))
    return len(parts) in places


def _expanded(text: str) -> list[str]:
    """The path or URL with its braces expanded. Raises `PathError`, `ValueError`."""
    count = expansions(text)
    if count > MOST_TARS or count * len(text) > MOST_CHARACTERS:
        raise PathError(f"source {text} names more than {MOST_TARS} tars", hint=HINT)
    return list(islice(braceexpand(text), MOST_TARS + 1))


def expansions(text: str) -> int:
    """The number of names that `braceexpand` makes of `text`, without making them: it builds whole ranges, and all
    combinations within a brace, before it yields the first."""
    open_braces = [[0, 1]]  # for each: number of names in earlier alternatives, and in the current one
    place = 0
    while place < len(text):
        here = text[place]
        if here == "{" and (match := _RANGE.match(text, place)):
            start, end, step = (int(part or 0) for part in match.groups())
            open_braces[-1][1] *= abs(end - start) // (step or 1) + 1
            place = match.end()
            continue
        if here == "{":
            open_braces.append([0, 1])
        elif here == "," and len(open_braces) > 1:
            open_braces[-1] = [sum(open_braces[-1]), 1]
        elif here == "}" and len(open_braces) > 1:
            names = sum(open_braces.pop())
            open_braces[-1][1] *= names
        place += 2 if here == "\\" else 1
    return open_braces[0][1]


def _matching(pattern: Path) -> list[Path]:
    """The files that match a glob, sorted. A directory is listed once, for all positions in the glob that it may have,
    so that `**/**/**` takes no longer than `**`. Raises `PathError`, `ValueError`."""
    start = next(number for number, part in enumerate(pattern.parts) if _GLOB.search(part))
    parts = _parts(pattern.parts[start:])
    files: list[Path] = []
    todo = [(Path(*pattern.parts[:start]) if start else Path(), frozenset({0}))]
    seen: dict[Path, set[int]] = {}
    while todo:
        folder, places = todo.pop()
        done = seen.setdefault(folder, set())
        fresh = _with_empty(parts, places) - done
        done |= fresh
        if len(seen) > MOST_FOLDERS:
            raise PathError(f"source {pattern} searches more than {MOST_FOLDERS} directories",
                            hint="write out more of the path in place of ** and *")
        for name, next_places, is_folder in _entries(folder, parts, fresh):
            if len(parts) in next_places and _is(Path.is_file, folder / name):
                files.append(folder / name)
            if is_folder and next_places - {len(parts)}:
                todo.append((folder / name, next_places - {len(parts)}))
    return sorted(set(files))


_Part = re.Pattern[str] | str | None  # a pattern of names; a literal name; None: **


def _parts(spelled: tuple[str, ...]) -> list[_Part]:
    parts: list[_Part] = []
    for part in spelled:
        if part == "**":
            if not parts or parts[-1] is not None:
                parts.append(None)
        elif "**" in part:
            raise ValueError(f"{part!r} mixes ** with other characters between two slashes")
        elif _GLOB.search(part):
            parts.append(re.compile(fnmatch.translate(part), re.IGNORECASE if os.name == "nt" else 0))
        else:
            parts.append(part)
    return parts


def _with_empty(parts: list[_Part], places: frozenset[int]) -> set[int]:
    """These positions in a glob, and those after a `**`, which also matches no directory at all."""
    return {*places, *(place + 1 for place in places if place < len(parts) and parts[place] is None)}


def _entries(folder: Path, parts: list[_Part], places: set[int]) -> list[tuple[str, frozenset[int], bool]]:
    """The entries of a directory that match a glob so far: (name, next positions in it, whether it is a directory)."""
    named = [(part, frozenset({place + 1}), _is(Path.is_dir, folder / part))
             for place in places if place < len(parts) and isinstance(part := parts[place], str)]
    globs = {place for place in places if place < len(parts) and not isinstance(parts[place], str)}
    if not globs:
        return named
    matches = []
    with suppress(OSError), os.scandir(folder) as entries:  # an unreadable directory counts as empty
        for entry in entries:
            next_places = {place + 1 for place in globs
                           if isinstance(part := parts[place], re.Pattern) and part.match(entry.name)}
            if entry.is_dir(follow_symlinks=False):
                next_places |= {place for place in globs if parts[place] is None}
            if next_places:
                matches.append((entry.name, frozenset(next_places), _is(Path.is_dir, folder / entry.name)))
    return [*named, *matches]


def _is(kind: Callable[[Path], bool], path: Path) -> bool:
    try:
        return kind(path)
    except OSError:  # no permission, or a name longer than the file system allows
        return False
