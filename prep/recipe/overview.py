"""Inspects sources: counts pictures, captions, masks and tables, reading headers but decoding no pixels.

It walks all names; files are opened by `prep.recipe.sampled`.
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

from prep.errors import PathError
from prep.findings import Finding
from prep.fs.blob import Blob
from prep.progress import Tick
from prep.recipe.layout import (
    REPEATED,
    FoundMasks,
    FoundReferences,
    SourcePlace,
    find_masks,
    find_references,
    places_in,
)
from prep.recipe.sampled import SampledFiles, open_some
from prep.sources.item import Item
from prep.sources.readers import readers
from prep.sources.table_files import KINDS
from prep.sources.tables import Tables
from prep.sources.tree import PICTURES, TABLES, stem_of
from prep.sources.walk import is_tars, tars_in, walk_source
from prep.workers.pool import WorkerPool

MOST_TABLE = 1 << 26  # bytes of a file that may be a table of captions


@dataclass(frozen=True, kw_only=True, slots=True)
class RepeatFolder:
    """A directory of kohya's in the source: its name gives its repeats and class."""

    name: str
    repeats: int
    words: str
    pictures: int
    masks: FoundMasks
    references: FoundReferences


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceOverview:
    """The contents of one place."""

    place: SourcePlace
    pictures: int
    captions: dict[str, int]  # by origin: ".txt", ".caption", ".json", "table"
    missing: int  # pictures without a caption
    sidecars: int  # pictures with a mask beside them
    masks: FoundMasks  # for the pictures in none of `folders`
    references: FoundReferences  # for the same
    paired: int  # pictures with references in a table, in their tar or beside them
    spoken: int  # pictures without a caption whose name could be one
    folders: tuple[RepeatFolder, ...]
    outside: int  # pictures in none of `folders`
    table: Path | None  # of captions, for the recipe to name
    opened: SampledFiles
    unread: tuple[Finding, ...] = ()  # tables, tars and directories that cannot be read

    @property
    def path(self) -> Path:
        """The source's absolute path, for the recipe."""
        return self.place.path.absolute()

    @property
    def mask_folders(self) -> tuple[Path, ...]:
        """The source's mask directories, each once."""
        folders = (match.folder for match in (self.masks, *(folder.masks for folder in self.folders)))
        return tuple(dict.fromkeys(folder for folder in folders if folder is not None))

    @property
    def reference_folders(self) -> tuple[Path, ...]:
        """The source's directories of references, each once."""
        every = (self.references, *(folder.references for folder in self.folders))
        return tuple(dict.fromkeys(folder for found in every for folder in found.folders))

    @property
    def masked(self) -> int:
        """Pictures that have a mask."""
        return self.sidecars + self.masks.count + sum(folder.masks.count for folder in self.folders)


@dataclass(frozen=True, kw_only=True, slots=True)
class Overview:
    """The contents of all places."""

    parts: tuple[SourceOverview, ...]

    def total(self, name: str) -> int:
        """A count, summed over the places."""
        return sum(getattr(part, name) for part in self.parts)

    @property
    def captions(self) -> dict[str, int]:
        """Number of captions by origin."""
        return dict(sum((Counter(part.captions) for part in self.parts), Counter()))

    @property
    def folders(self) -> tuple[RepeatFolder, ...]:
        """All directories named N_class."""
        return tuple(folder for part in self.parts for folder in part.folders)

    @property
    def mask_folders(self) -> tuple[Path, ...]:
        """All mask directories, each once."""
        return tuple(dict.fromkeys(folder for part in self.parts for folder in part.mask_folders))

    @property
    def unread(self) -> tuple[Finding, ...]:
        """Tables, tars and directories that cannot be read."""
        return tuple(finding for part in self.parts for finding in part.unread)

    @property
    def opened(self) -> SampledFiles:
        """Counts from the opened files of all places."""
        whole = SampledFiles()
        for part in self.parts:
            for name in SampledFiles.__dataclass_fields__:
                setattr(whole, name, getattr(whole, name) + getattr(part.opened, name))
        return whole


def overview_of(sources: Sequence[Path], *, jobs: int, tick: Tick = lambda _: None) -> Overview:
    """The contents of the given sources: directories, tars, or a kohya project. Raises `PathError`."""
    return Overview(parts=tuple(_overview(place, jobs, tick) for place in places_in(sources)))


def _overview(place: SourcePlace, jobs: int, tick: Tick) -> SourceOverview:
    path = place.path
    with readers() as workers:
        items, unread = _walked(path, None, workers)
        table = None if is_tars(path) or not any(_bare(item) for item in items) else _table_of(path, items, workers)
        if table is not None:
            items, unread = _walked(path, table, workers)
    if not items:
        _raise_empty(path, unread)
    named = {} if is_tars(path) else _by_folder(items)
    named[""] = [item for item in items if item.name.partition("/")[0] not in named]
    masks = {name: _masks_for(path / name, inside, name, place) for name, inside in named.items()}
    references = {name: _references_for(path / name, inside, name, place) for name, inside in named.items()}
    mine = _below(path, [*(match.folder for match in masks.values()),
                         *(folder for found in references.values() for folder in found.folders)])
    items = [item for item in items if not item.name.startswith(mine)]
    bare = [item for item in items if _bare(item)]
    folders = tuple(_folders(items, masks, references)) if len(named) > 1 else ()
    return SourceOverview(place=place, pictures=len(items),
                          captions=dict(Counter(_kind(item) for item in items if not _bare(item))),
                          missing=len(bare), sidecars=sum(item.mask is not None for item in items), masks=masks[""],
                          references=references[""], paired=sum(bool(item.references) for item in items),
                          spoken=sum(_speaks(item.name) for item in bare), folders=folders,
                          outside=len(items) - sum(folder.pictures for folder in folders),
                          table=None if table is None else table.absolute(), opened=open_some(items, jobs, tick),
                          unread=tuple(unread))


def _by_folder(items: Iterable[Item]) -> dict[str, list[Item]]:
    """The items in directories named N_class directly in the source."""
    folders: dict[str, list[Item]] = {}
    for item in items:
        top, slash, _ = item.name.partition("/")
        if slash and REPEATED.fullmatch(top):
            folders.setdefault(top, []).append(item)
    return folders


def _masks_for(root: Path, items: Sequence[Item], name: str, place: SourcePlace) -> FoundMasks:
    """The mask directory for the items in `root`, called `name` in the place; empty if masks lie beside pictures."""
    if not items or any(item.mask is not None for item in items):
        return FoundMasks()
    return find_masks(root, _named_below(items, name), place)


def _references_for(root: Path, items: Sequence[Item], name: str, place: SourcePlace) -> FoundReferences:
    """The directories of references for the items in `root`, as `_masks_for` finds masks."""
    if not items or any(item.references for item in items) or is_tars(place.path):
        return FoundReferences()
    return find_references(root, _named_below(items, name), place)


def _named_below(items: Iterable[Item], name: str) -> list[Item]:
    """The items of the directory `name` of a source, named below it."""
    start = f"{name}/" if name else ""
    return [replace(item, name=item.name.removeprefix(start)) for item in items]


def _below(path: Path, folders: Iterable[Path | None]) -> tuple[str, ...]:
    """Name prefixes of the directories of masks and references inside the source."""
    root = path.absolute()
    return tuple(f"{folder.relative_to(root).as_posix()}/" for folder in folders
                 if folder is not None and folder.is_relative_to(root))


def _walked(path: Path, table: Path | None, workers: WorkerPool) -> tuple[list[Item], list[Finding]]:
    """The pictures in a source, and its errors."""
    entries = list(walk_source(path, source=0, masks="sidecar", table=table, workers=workers))
    return ([entry for entry in entries if isinstance(entry, Item)],
            [entry for entry in entries if isinstance(entry, Finding) and entry.severity == "error"])


def _raise_empty(path: Path, unread: Sequence[Finding]) -> NoReturn:
    if unread:
        raise PathError(f"source {path} has no pictures that can be read: {unread[0].path}: {unread[0].detail}",
                        hint=f"prep scan {shlex.quote(str(path))} lists what is wrong")
    tars = tars_in(path)
    raise PathError(f"source {path} has no pictures, expected {' '.join(PICTURES)}",
                    hint=f"it has {tars} tars: prep init {shlex.quote(f'{path}/*.tar')}" if tars else
                    "name the directory that holds them; subdirectories are searched")


def _bare(item: Item) -> bool:
    return item.caption is None and not item.captions


def _kind(item: Item) -> str:
    return "table" if item.caption is None else f".{item.caption.name.rpartition('.')[2].lower()}"


def _speaks(name: str) -> bool:
    """Whether a name could be a caption: it has at least two words, unlike a camera's names."""
    return len(re.findall(r"[^\W\d_]{3,}", stem_of(name.rpartition("/")[2]))) >= 2


def _folders(items: Iterable[Item], masks: Mapping[str, FoundMasks],
             references: Mapping[str, FoundReferences]) -> Iterator[RepeatFolder]:
    """The directories named N_class directly in the source, in name order."""
    for name, inside in _by_folder(items).items():
        match = REPEATED.fullmatch(name)
        assert match is not None, "_by_folder groups by this pattern"
        yield RepeatFolder(name=name, repeats=int(match[1]), words=match[2], pictures=len(inside), masks=masks[name],
                           references=references[name])


def _table_of(root: Path, items: Sequence[Item], workers: WorkerPool) -> Path | None:
    """The file directly in `root` with captions for more than half of the pictures that have none."""
    stems = {stem_of(item.name) for item in items}
    bare = [item.name for item in items if _bare(item)]
    best: tuple[int, Path | None] = (len(bare) // 2, None)
    for path in sorted(root.iterdir()):
        side = path.suffix.lower() not in KINDS or path.name in TABLES or path.name.startswith(".")
        if side or stem_of(path.name) in stems or not path.is_file() or path.stat().st_size > MOST_TABLE:
            continue
        table = Tables(root=root, workers=workers)
        table.add(Blob(file=str(path)), "", path.name)
        fits = sum(1 for name in bare if (row := table.find(name)) is not None and row.captions)
        best = max(best, (fits, path), key=lambda candidate: candidate[0])
    return best[1]
