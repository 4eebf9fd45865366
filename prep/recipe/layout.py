"""Finds the parts of a dataset: sources, projects of kohya's GUI, and directories of masks and references.

A project of kohya's GUI has `img`, and optionally `reg` and `mask`, side by side, with directories named N_class below.
A set of edits has `main` and `control_1`, `control_2` … side by side.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from prep.batching.split import Role
from prep.errors import PathError
from prep.fs.paths import is_inside, resolve
from prep.sources.companions import Companions
from prep.sources.item import Item
from prep.sources.tree import folders_below, stem_of
from prep.sources.walk import is_tars

TRAIN = ("img", "image", "images", "train")
PRIOR = ("reg", "regularization", "regularisation")
MASKS = ("masks", "mask", "{}_masks", "{}-masks")  # {}: the name of the picture directory
REPEATED = re.compile(r"(\d{1,9})_(.+)", re.DOTALL)  # kohya's directories: 10_cat is repeated ten times an epoch
_MASKED = ("mask", "masks")
REFERENCES = ("control", "controls", "conditioning", "references", "reference", "refs", "ref")
EDITED = ("main", "target", "targets")  # pictures beside directories of references


@dataclass(frozen=True, kw_only=True, slots=True)
class SourcePlace:
    """A directory or tars whose pictures all have one role."""

    path: Path
    role: Role = "train"
    top: Path  # the highest directory that may hold its masks and references
    siblings: tuple[str, ...] = ()  # of a project: directories beside it whose pictures are not read


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundMasks:
    """A mask directory, and how many pictures have a mask in it."""

    folder: Path | None = None
    count: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundReferences:
    """Directories of references, in order, and how many pictures have one in each."""

    folders: tuple[Path, ...] = ()
    count: int = 0


def places_in(sources: Sequence[Path]) -> list[SourcePlace]:
    """The places of the given sources. Directories named like kohya's get the role that kohya gives them.

    Raises `PathError` if the sources have only masks or regularization pictures.
    """
    if len(sources) == 1:
        found = _project(sources[0]) or _edits(sources[0])
        return found or [SourcePlace(path=sources[0], top=_above(sources[0]))]
    named = [path for path in sources if path.name.lower() not in _MASKED or is_tars(path)]
    places: list[SourcePlace] = []
    for path in named:
        prior = path.name.lower() in PRIOR and not is_tars(path)
        inner = [] if prior else _project(path)
        places += inner or [SourcePlace(path=path, role="prior" if prior else "train", top=_above(path))]
    if all(place.role == "prior" for place in places):
        raise PathError(f"sources {', '.join(map(str, sources))} have no training pictures",
                        hint="name the directory that holds them, too")
    return places


def _above(path: Path) -> Path:
    return path if is_tars(path) else path.absolute().parent


def _project(root: Path) -> list[SourcePlace]:
    """The parts of a kohya project; empty for any other directory."""
    if is_tars(root) or not root.is_dir():
        return []
    names = {folder.name.lower(): folder for folder in sorted(root.iterdir()) if folder.is_dir()}
    train = next((names[name] for name in TRAIN if name in names), None)
    prior = next((names[name] for name in PRIOR if name in names), None)
    beside = {folder for name, folder in names.items() if name in _MASKED}
    numbered = train is not None and any(
        REPEATED.fullmatch(folder.name) for folder in train.iterdir() if folder.is_dir())
    if train is None or not (prior or beside or numbered) or _has_pictures(root, below=False):
        return []
    taken = {train, prior, *beside}
    siblings = tuple(folder.name for folder in names.values() if folder not in taken and _has_pictures(folder))
    places = [SourcePlace(path=train, top=root.absolute(), siblings=siblings)]
    if prior is not None and _has_pictures(prior):
        places.append(SourcePlace(path=prior, role="prior", top=prior.absolute()))
    return places


def _edits(root: Path) -> list[SourcePlace]:
    """The part of a set of edits that trains; empty for any other directory."""
    if is_tars(root) or not root.is_dir():
        return []
    names = {folder.name.lower(): folder for folder in sorted(root.iterdir()) if folder.is_dir()}
    main = next((names[name] for name in (*EDITED, *TRAIN) if name in names), None)
    beside = [] if main is None else _reference_folders(root, main.name)
    if main is None or not any(map(_has_pictures, beside)) or _has_pictures(root, below=False):
        return []
    siblings = tuple(folder.name for folder in names.values()
                     if folder not in (main, *beside) and folder.name not in _MASKED and _has_pictures(folder))
    return [SourcePlace(path=main, top=root.absolute(), siblings=siblings)]


def _has_pictures(root: Path, below: bool = True) -> bool:
    folders = folders_below(root)
    return any(folder.pictures for folder in folders) if below else bool(next(iter(folders)).pictures)


def find_masks(root: Path, items: Sequence[Item], place: SourcePlace) -> FoundMasks:
    """The directory inside or beside `root`, up to `place.top`, that has masks for the most `items`.

    Masks have the same relative paths as below `root`, either directly in it or in a subdirectory named like `root`.
    """
    best = FoundMasks()
    for folder in dict.fromkeys(_candidates(root.absolute(), place.top)):
        real = resolve(folder)
        if not is_inside(resolve(place.path), real) and resolve(root) != real:
            masks = Companions.read(folder, "mask")
            inside = f"{folder.relative_to(root.absolute()).as_posix()}/" if is_inside(folder, root.absolute()) else ""
            count = sum(masks.find(stem_for_masks(item)) is not None for item in items
                        if not (inside and item.name.startswith(inside)))
            best = max(best, FoundMasks(folder=folder, count=count), key=lambda matches: matches.count)
    return best if best.count else FoundMasks()


def find_references(root: Path, items: Sequence[Item], place: SourcePlace) -> FoundReferences:
    """The directories inside or beside `root`, up to `place.top`, that have references for at least half of `items`.

    References have the same relative paths as below `root`, either directly in it or in a subdirectory named like
    `root`.
    """
    for base in _bases(root.absolute(), place.top):
        found: dict[Path, set[str]] = {}
        for folder in _reference_folders(base, root.name):
            folder = folder / root.name if (folder / root.name).is_dir() else folder
            inside = f"{folder.relative_to(root.absolute()).as_posix()}/" if is_inside(folder, root.absolute()) else ""
            stems = {stem_for_masks(item) for item in items if not (inside and item.name.startswith(inside))}
            others = {stem.rpartition("/")[2] for stem in stems}
            if is_inside(resolve(place.path), resolve(folder)) or resolve(root) == resolve(folder):
                continue
            pictures = Companions.read(folder, "reference")
            paired = {stem for stem in stems if pictures.find_all(stem, others=others)}
            if paired and 2 * len(paired) >= len(stems):
                found[folder] = paired
        if found:
            return FoundReferences(folders=tuple(found), count=len(set.intersection(*found.values())))
    return FoundReferences()


def _reference_folders(base: Path, name: str) -> list[Path]:
    """The directories in `base` that are called as those of references of the pictures in a directory `name` are, in
    their order: the first of control, photos-control, references …, or control_1, control_2 and so on."""
    for start in (f"{prefix}{word}" for word in REFERENCES for prefix in ("", f"{name}_", f"{name}-")):
        for dash in ("_", "-", ""):
            first = 0 if (base / f"{start}{dash}0").is_dir() else 1
            numbered = [*takewhile(Path.is_dir, (base / f"{start}{dash}{number}" for number in count(first)))]
            if numbered:
                return [*([base / start] if (base / start).is_dir() else []), *numbered]
        if (base / start).is_dir():
            return [base / start]
    return []


def _bases(root: Path, top: Path) -> list[Path]:
    """The directories that may hold directories of masks and references of `root`, the nearest first."""
    bases = [root, *root.parents]
    return bases[:bases.index(top) + 1] if top in bases else bases[:1]


def _candidates(root: Path, top: Path) -> Iterator[Path]:
    for base in _bases(root, top):
        for pattern in MASKS:
            folder = base / pattern.format(root.name)
            yield from (path for path in (folder / root.name, folder) if path.is_dir())


def stem_for_masks(item: Item) -> str:
    """The stem of an item's mask in a mask directory; for a tar member, its key."""
    return item.picture.member.rpartition(".")[0] or stem_of(item.name)
