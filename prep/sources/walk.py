"""Lists the items of a recipe's source of any kind: a directory, or tars by name, braces or glob."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path, PurePosixPath

from prep.errors import PathError
from prep.findings import Finding
from prep.fs.blob import Blob
from prep.fs.place import Place, is_directory, is_here
from prep.fs.remote.bucket import SCHEMES, Bucket
from prep.sources.companions import Companions, references_of
from prep.sources.directory import unused_masks, walk
from prep.sources.item import Item, MaskFrom
from prep.sources.readers import readers
from prep.sources.tar_index import Listings
from prep.sources.tar_paths import HINT, stored_tars, tars_of
from prep.sources.tars import Tar, walk_tar
from prep.workers.pool import WorkerPool

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]+):", re.IGNORECASE)  # s3://, pipe:cat; not C:


def walk_source(path: Place, *, source: int, masks: MaskFrom | Companions,
                references: Sequence[Companions] | None = None, table: Place | None = None, rehash: bool = False,
                prefix: str = "", workers: WorkerPool | None = None) -> Iterator[Item | Finding]:
    """The items of the source at `path`, with captions from `table` if they have no caption file, and their references
    in each of the directories `references` (`None`: those that the source itself has); `rehash`: list tars again,
    ignoring the memory of them. Labels of items begin with `prefix`.

    `workers` (default: a new pool) read tables and tars. Raises `PathError` for a source that does not exist or has an
    unsupported scheme.
    """
    if workers is None:
        with readers() as pool:
            yield from walk_source(path, source=source, masks=masks, references=references, table=table, rehash=rehash,
                                   prefix=prefix, workers=pool)
        return
    if not is_tars(path):
        yield from walk(path, source=source, mask_from=masks, references=references, table=table, prefix=prefix,
                        workers=workers)
        return
    own, unused = masks in ("sidecar", "none", "alpha"), 0
    with closing(Listings(trust=not rehash)) as listings:
        for tar in tars_at(path, source=source, prefix=prefix):
            entries = list(walk_tar(tar, sidecar=own, listings=listings, workers=workers))
            others = {_stems_of(entry)[-1].rpartition("/")[2] for entry in entries if isinstance(entry, Item)}
            for entry in entries:
                if isinstance(entry, Finding):
                    yield entry
                    continue
                if isinstance(masks, Companions):
                    entry = replace(entry, mask=masks.find(*_stems_of(entry)) or entry.mask)
                elif entry.mask is not None and masks in ("none", "alpha"):
                    unused += masks == "none"
                    entry = replace(entry, mask=None)
                if references is not None:
                    found, bare = references_of(references, *_stems_of(entry), others=others)
                    entry = replace(entry, references=found, unreferenced=bare)
                yield entry
    yield from unused_masks(unused)


def is_tars(path: Place) -> bool:
    """Whether a source's path names tars, not a directory. Raises `PathError` for a pipe, and for a URL that is not
    read."""
    scheme = _SCHEME.match(str(path))
    if scheme and scheme[1] not in SCHEMES and not is_here(path):
        raise PathError(f"source {path} has the scheme '{scheme.group(1)}', expected a local path, or "
                        f"{', '.join(SCHEMES)}", hint="download it first; " + HINT)
    return path.suffix == ".tar" and not is_directory(path)


def tars_in(path: Place) -> int:
    """The number of tars directly in a directory, which a directory source does not read; 0 if `path` is not one."""
    return sum(file.suffix.lower() == ".tar" for file in path.iterdir()) if is_directory(path) else 0


def places_of(path: Place) -> list[Place]:
    """The directory, or the tars, that a source's path names; in a store, the path itself. Raises `PathError`."""
    return [*tars_of(path)] if isinstance(path, Path) and is_tars(path) else [path]


def tars_at(path: Place, *, source: int = 0, prefix: str = "") -> list[Tar]:
    """The tars that a source's path names, labelled. Raises `PathError`, `StoreError`."""
    tars = stored_tars(path) if isinstance(path, Bucket) else [Blob(file=str(place)) for place in tars_of(path)]
    labels = labelled([tar.place for tar in tars])
    return [Tar(whole=tar, label=label, source=source, prefix=prefix)
            for tar, (_, label) in zip(tars, labels, strict=True)]


def labelled(places: Sequence[Place]) -> list[tuple[Place, str]]:
    """Each tar with the prefix of its members' names: its own name, with as many directories as make it unique."""
    depth = 1
    parts = [PurePosixPath(place.as_posix()).parts for place in places]
    while len({names[-depth:] for names in parts}) < len(places) and depth < max(map(len, parts)):
        depth += 1
    return [(place, "/".join(names[-depth:]).lstrip("/")) for place, names in zip(places, parts, strict=True)]


def _stems_of(item: Item) -> tuple[str, str]:
    """What files of a picture in a tar are called in another directory: with the tar's name before it, or without."""
    return item.name.rpartition(".")[0], item.picture.member.rpartition(".")[0]
