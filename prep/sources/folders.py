"""Lists directories by kinds of names, on this computer or in an object store, where prefixes count as directories."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prep.errors import PathError
from prep.fs.paths import MARKER, check_source
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import ObjectEntry, list_objects
from prep.sources.tree import Directory, add_file, add_folder, folders_below, note_cache, note_directory, note_hidden


def folders_of(root: Place) -> Iterator[Directory]:
    """Every directory from `root` down, once, in the order of names: a directory's files before its subdirectories.

    In a store it takes one request for a thousand objects. Raises `PathError` unless `root` is a directory outside any
    cache, or a prefix that objects have; `StoreError`.
    """
    if not isinstance(root, Bucket):
        check_source(root)
        return folders_below(root)
    listed = list_objects(root.url)
    if not listed:
        raise PathError(f"source {root} does not exist: no object is below it",
                        hint="name what the keys of the pictures begin with, up to a slash: s3://bucket/photos")
    if MARKER in listed and any(name.startswith("shards/") for name in listed):
        raise PathError(f"source {root} is a cache, which holds no pictures",
                        hint="name the prefix of the original pictures")
    return _folders_in(root, listed)


def _folders_in(root: Bucket, listed: Mapping[str, ObjectEntry]) -> Iterator[Directory]:
    """The directories that the names of objects below a place have."""
    files: dict[str, list[str]] = {"": []}
    inner: dict[str, set[str]] = {"": set()}
    for name in listed:
        prefix, slash, last = name.rpartition("/")
        prefix += slash
        _add_parents(prefix, files, inner)
        files[prefix].append(last)
    todo = [""]
    while todo:
        prefix = todo.pop()
        names = files.pop(prefix)
        folder = Directory(prefix=prefix, base=f"{root}/{prefix}",
                           versions={name: listed[prefix + name].version for name in names})
        _fill(folder, names, inner.pop(prefix))
        todo.extend(f"{prefix}{name}/" for name in reversed(folder.folders))
        yield folder


def _add_parents(prefix: str, files: dict[str, list[str]], inner: dict[str, set[str]]) -> None:
    """Adds a directory, and those above it that are new."""
    while prefix not in files:
        files[prefix] = []
        inner.setdefault(prefix, set())  # it may have a directory, if that was met first
        above, slash, last = prefix[:-1].rpartition("/")
        inner.setdefault(above + slash, set()).add(last)
        prefix = above + slash


def _fill(folder: Directory, names: list[str], inner: set[str]) -> None:
    if folder.prefix and MARKER in names:
        note_cache(folder)
        return
    kinds = [*((name, False) for name in names), *((name, True) for name in inner)]
    for name, is_folder in sorted(kinds):
        if name.startswith("."):
            note_hidden(folder, name)
        elif is_folder:
            add_folder(folder, name)
        else:
            add_file(folder, name, _usable)
            if name in inner and name not in folder.pictures:
                note_directory(folder, name)


def _usable() -> bool:
    return True  # what is listed is an object
