"""A source of a recipe → its items, whatever kind it is: a directory, or tars by name, braces or glob."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePosixPath

from braceexpand import braceexpand

from prep.errors import PathError
from prep.findings import Finding
from prep.fs.blob import Blob
from prep.sources.directory import unused_masks, walk
from prep.sources.item import Item, MaskFrom
from prep.sources.mask_directory import MaskFolder
from prep.sources.tar_index import Listings
from prep.sources.tars import walk_tar

MOST_TARS = 1_000_000  # that braces may name
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)  # s3://, pipe:cat; not C:
_RANGE = re.compile(r"\{(-?[0-9]{1,99})\.\.(-?[0-9]{1,99})")
_GLOB = re.compile(r"[*?\[]")
HINT = "SOURCE is a directory of pictures, a .tar (braces and globs allowed) or a recipe .toml"


def walk_source(path: Path, *, source: int, masks: MaskFrom | MaskFolder, table: Path | None = None,
                rehash: bool = False) -> Iterator[Item | Finding]:
    """The items of the source at `path`, with captions from `table` where they have no file; `rehash`: tars are
    listed whatever is remembered of them.

    Raises `PathError` for one that is not there or is not read.
    """
    if not is_tars(path):
        yield from walk(path, source=source, mask_from=masks, table=table)
        return
    own, unused = masks in ("sidecar", "none", "alpha"), 0
    with closing(Listings(trust=not rehash)) as listings:
        for place, label in labelled(tars_of(path)):
            for one in walk_tar(place, label=label, source=source, sidecar=own, listings=listings):
                if isinstance(one, Item) and isinstance(masks, MaskFolder):
                    yield _with_mask(one, masks)
                elif isinstance(one, Item) and one.mask is not None and masks in ("none", "alpha"):
                    unused += masks == "none"
                    yield replace(one, mask=None)
                else:
                    yield one
    yield from unused_masks(unused)


def is_tars(path: Path) -> bool:
    """Whether a source's path names tars, and not a directory. Raises `PathError` for a scheme that is not read."""
    scheme = _SCHEME.match(str(path))
    if scheme and not path.exists():
        raise PathError(f"source {path} has the scheme '{scheme.group(1)}', expected files of this machine",
                        hint="fetch it first; " + HINT)
    return path.suffix == ".tar" and not path.is_dir()


def tars_in(path: Path) -> int:
    """How many tars lie directly in a directory, which is read for pictures alone; 0 for anything else."""
    return sum(one.suffix.lower() == ".tar" for one in path.iterdir()) if path.is_dir() else 0


def places_of(path: Path) -> list[Path]:
    """The directory, or the tars, that a source's path names. Raises `PathError`."""
    return tars_of(path) if is_tars(path) else [path]


def tars_of(path: Path) -> list[Path]:
    """The tars that `path` names: itself where it exists, else with its braces and globs expanded, in that order.

    Raises `PathError` for one that is not there, for a glob that nothing fits, and for more than `MOST_TARS`.
    """
    if path.exists():
        return [path]
    try:
        _check_ranges(path)
        named = [Path(text) for text in islice(braceexpand(str(path)), MOST_TARS + 1)]
    except (ValueError, RecursionError) as error:
        raise _unexpanded(path, error) from None
    if len(named) > MOST_TARS:
        raise _too_many(path)
    found: list[Path] = []
    for one in named:
        try:
            matches = _matching(one) if _GLOB.search(str(one)) else [one]
        except (ValueError, RecursionError) as error:
            raise _unexpanded(path, error) from None
        if not matches:
            raise PathError(f"source {one} matches no file", hint=HINT)
        found += matches
    if missing := [one for one in found if not one.exists()]:
        raise PathError(f"source {missing[0]} does not exist" + (f", nor do {len(missing) - 1} others of {path}"
                                                                 if len(missing) > 1 else ""), hint=HINT)
    return list(dict.fromkeys(found))


def _check_ranges(path: Path) -> None:
    """Raises for ranges of more numbers than are ever listed: `braceexpand` makes each a list before it is cut."""
    total = 1
    for start, end in _RANGE.findall(str(path)):
        total *= abs(int(end) - int(start)) + 1
    if total > MOST_TARS:
        raise _too_many(path)


def _unexpanded(path: Path, error: Exception) -> PathError:
    return PathError(f"source {path} cannot be expanded: {error}", hint=HINT)


def _too_many(path: Path) -> PathError:
    return PathError(f"source {path} names more than {MOST_TARS} tars", hint=HINT)


def labelled(places: list[Path]) -> list[tuple[Path, str]]:
    """Each tar with what the names of its members begin with: its name, with as many directories as tell them apart."""
    depth = 1
    parts = [PurePosixPath(place.as_posix()).parts for place in places]
    while len({one[-depth:] for one in parts}) < len(places) and depth < max(map(len, parts)):
        depth += 1
    return [(place, "/".join(one[-depth:]).lstrip("/")) for place, one in zip(places, parts, strict=True)]


def _matching(pattern: Path) -> list[Path]:
    start = next(number for number, part in enumerate(pattern.parts) if _GLOB.search(part))
    base = Path(*pattern.parts[:start]) if start else Path()
    return sorted(one for one in base.glob("/".join(pattern.parts[start:])) if one.is_file())


def _with_mask(item: Item, masks: MaskFolder) -> Item:
    """The item with the mask that a directory of masks has for it, below its tar's name or not."""
    found = masks.find(*(name.rpartition(".")[0] for name in (item.name, item.picture.member)))
    return item if found is None else replace(item, mask=Blob(file=found))
