"""What the directory of a project has: pictures, recipes, settings, models, manifests and runs, one level deep."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from os import DirEntry
from pathlib import Path

from prep.fs.untrusted import check_dir, open_regular, read_regular, stream_of
from prep.jobs.job import FOLDER
from prep.manifest.document import looks_like_manifest
from prep.models.files import INDEX, MODULAR
from prep.runs.document import NAME as RUN
from prep.sources.tree import PICTURES

MOST = 2000  # entries of a directory that are looked at
MOST_TEXT = 1 << 20  # bytes of a .toml
START = 4096  # bytes of a .json
USUAL = {"source": "dataset.toml", "recipes": "dataset.toml", "settings": "train.toml", "manifests": "manifest.json"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Project:
    """Names in the directory of a project, each kind sorted."""

    folder: Path
    pictures: tuple[str, ...] = ()  # directories
    recipes: tuple[str, ...] = ()  # dataset.toml, whatever its name
    settings: tuple[str, ...] = ()  # train.toml
    models: tuple[str, ...] = ()  # directories, and single files
    manifests: tuple[str, ...] = ()
    runs: tuple[str, ...] = ()
    links: tuple[str, ...] = ()  # to other directories, which are not looked into: they may lead out of the project

    def names(self, kind: str) -> tuple[str, ...]:
        """The names of a kind, a field of this record; "source": recipes, then pictures."""
        if kind == "source":
            return self.recipes + self.pictures
        found: tuple[str, ...] = getattr(self, kind)
        return found

    def likely(self, kind: str) -> str:
        """The name of a kind, which has some, that is probably meant: the usual one, of runs the newest, or the first.
        """
        names = self.names(kind)
        if kind == "runs":
            return max(names, key=lambda name: _modified(self.folder / name / RUN))
        return USUAL[kind] if USUAL.get(kind) in names else names[0]


def read_project(folder: Path) -> Project:
    """What a project has now. Raises `OSError` if its directory cannot be read."""
    found: dict[str, list[str]] = {}
    for entry in _some(folder):
        for kind, name in _kinds(entry):
            found.setdefault(kind, []).append(name)
    return Project(folder=folder, **{kind: tuple(names) for kind, names in found.items()})


def _modified(path: Path) -> int:
    """When a file changed, in nanoseconds; 0 if it is gone."""
    with suppress(OSError):
        return path.stat().st_mtime_ns
    return 0


def _some(folder: Path) -> Sequence[DirEntry[str]]:
    """Some entries, sorted; not hidden ones, nor those whose names no form takes and no address has."""
    check_dir(folder)
    with os.scandir(folder) as found:
        shown = (entry for entry in found if not entry.name.startswith(".") and entry.name.isprintable())
        return sorted(islice(shown, MOST), key=lambda entry: entry.name)


def _kinds(entry: DirEntry[str]) -> Iterator[tuple[str, str]]:
    """The kind of an entry, if it is one of ours, and its name; directories may contain models and runs."""
    path = Path(entry.path)
    with suppress(OSError):
        if entry.is_dir():
            kind = "" if entry.name == FOLDER else _kind_of_directory(path)
            if kind:
                yield kind, entry.name
            if kind in ("", "pictures"):
                yield from ((found, f"{entry.name}/{inner.name}") for inner in _some(path) if inner.is_dir()
                            if (found := _kind_of_directory(Path(inner.path))) in ("models", "runs"))
        elif not entry.is_file():  # a pipe, which would not end
            return
        elif path.suffix == ".toml":
            yield "recipes" if _is_recipe(path) else "settings", entry.name
        elif path.suffix == ".json":
            with stream_of(open_regular(path)) as handle:
                if looks_like_manifest(handle.read(START)):
                    yield "manifests", entry.name
        elif path.suffix in (".safetensors", ".gguf"):
            yield "models", entry.name


def _kind_of_directory(path: Path) -> str:
    if (path / RUN).is_file():
        return "runs"
    if (path / INDEX).is_file() or (path / MODULAR).is_file():
        return "models"
    if path.is_symlink():
        return "links"
    inside = _some(path)
    if any(_is_picture(inner) for inner in inside):
        return "pictures"
    return "pictures" if any(_is_picture(deeper) for inner in inside[:20] if inner.is_dir(follow_symlinks=False)
                             for deeper in _some(Path(inner.path))) else ""


def _is_picture(entry: DirEntry[str]) -> bool:
    return Path(entry.name).suffix.lower() in PICTURES


def _is_recipe(path: Path) -> bool:
    with suppress(OSError, ValueError, RecursionError):
        return "source" in tomllib.loads(read_regular(path, MOST_TEXT).decode())
    return False
