"""Lists all items of a recipe, each with its label; and tells by names and stamps whether anything changed."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from prep.dataset.edits.apply import EditFolder
from prep.dataset.overlap import SharedFiles
from prep.findings import Finding
from prep.formatting import printable_name
from prep.fs.labels import source_prefixes
from prep.fs.memo import is_at_rest
from prep.fs.paths import NamedPath
from prep.fs.place import Place, real_name
from prep.fs.stamps import blob_stamp
from prep.progress import Tick
from prep.recipe.edits import source_folders
from prep.recipe.schema import Recipe
from prep.sources.companions import Companions
from prep.sources.globs import chosen_by
from prep.sources.item import Item
from prep.sources.readers import readers
from prep.sources.walk import places_of, tars_in, walk_source
from prep.workers.pool import WorkerPool


@dataclass(frozen=True, kw_only=True, slots=True)
class Listed:
    """What is in a recipe's sources, before any file of it is opened."""

    items: list[Item]
    findings: list[Finding]
    # Digest of all names, and of the stamps of all pictures, captions, masks and references; "" if nobody asked for it,
    # one of them is missing, or was not at rest when listing began: then its stamp says nothing of what it holds.
    digest: str = ""


def list_recipe(recipe: Recipe, *, rehash: bool = False, stamped: bool = False, tick: Tick = lambda _: None) -> Listed:
    """Lists a recipe's sources, with a digest of all of it if `stamped`; `tick` counts pictures. Raises as
    `walk_recipe` does."""
    begun, seen = time.time_ns(), hashlib.blake2b(digest_size=32)
    items: list[Item] = []
    findings: list[Finding] = []
    newest: int | None = 0 if stamped else None
    for entry in walk_recipe(recipe, rehash=rehash):
        if isinstance(entry, Finding):
            findings.append(entry)
            seen.update(repr(entry).encode("utf-8", "surrogatepass"))
            continue
        items.append(entry)
        tick(1)
        if newest is not None:
            try:
                newest = max(newest, _add(seen, entry))
            except OSError:  # it is gone, which reading it reports
                newest = None
    known = newest is not None and is_at_rest(newest, begun)
    return Listed(items=items, findings=findings, digest=seen.hexdigest() if known else "")


def _add(seen: hashlib.blake2b, item: Item) -> int:
    """Adds an item and the stamps of its files to a digest; when they last changed (ns). Raises `OSError`."""
    newest, words = 0, [item.name, item.label, str(item.source), item.caption_format, item.uncaptioned, *item.captions]
    words += ["unreferenced", item.unreferenced] if item.unreferenced else []
    blobs = [("picture", item.picture), ("caption", item.caption), ("mask", item.mask)]
    if item.references:
        blobs += [("reference", blob) for blob in item.references]
    for kind, blob in blobs:
        if blob is not None:
            stamp, changed = blob_stamp(blob)
            newest = max(newest, changed)
            words += [kind, blob.file, blob.member, stamp.hex()]
    spelled = "\0".join(words)  # no name or caption has a zero byte
    seen.update(f"{len(words)} {len(spelled)} {spelled}".encode("utf-8", "surrogatepass"))
    return newest


def picture_places(recipe: Recipe) -> list[NamedPath]:
    """Each directory and tar of the recipe's pictures, once, and those of references; a prefix in a store as it is.
    Raises `PathError`."""
    paths = (path for source in recipe.sources for path in places_of(source.path))
    return [*(NamedPath(role="pictures", path=path) for path in dict.fromkeys(paths)),
            *(NamedPath(role="references", path=path) for path in recipe.reference_folders)]


def walk_recipe(recipe: Recipe, *, rehash: bool = False) -> Iterator[Item | Finding]:
    """All items in a recipe's sources, and findings, whose paths are labels like the items'. `rehash` lists tars again.
    Raises `PathError`, and `ConfigError` for an edit of two sources.
    """
    companions = _companions(recipe)
    places, count = source_folders(recipe), len(recipe.sources)
    edits = None if recipe.edits is None else EditFolder(root=recipe.edits, sources=places[:count],
                                                         unused=places[count:])
    shared, prefixes = SharedFiles(recipe), source_prefixes([source.path for source in recipe.sources])
    with readers() as workers:
        for number, (source, prefix) in enumerate(zip(recipe.sources, prefixes, strict=True)):
            masked = recipe.mask_of(number) not in ("none", "alpha")
            fits = chosen_by(source.include, source.exclude)
            included = excluded = 0
            for entry in _walk_one(recipe, number, companions, rehash=rehash, prefix=prefix, workers=workers):
                if isinstance(entry, Finding):
                    yield replace(entry, path=prefix + entry.path)
                elif fits(entry.name):
                    included += 1
                    shared.add(entry)
                    yield entry if edits is None else edits.apply(entry, masks=masked)
                else:
                    excluded += 1
            if not included:
                yield Finding(path=f"{prefix}.", code="empty-source", severity="warning",
                              detail=why_empty(source.path, excluded))
            yield from shared.findings(prefix)
    for folder in companions.values():
        yield from folder.orphans()
    if edits is not None:
        yield from edits.orphans()


_Kept = Mapping[tuple[str, Place], Companions]  # directories of masks and of references, each read once


def _companions(recipe: Recipe) -> _Kept:
    """The directories of masks and of references that a recipe names. Raises `PathError`."""
    return {("mask", path): Companions.read(path, "mask") for path in recipe.mask_folders} | {
        ("reference", path): Companions.read(path, "reference") for path in recipe.reference_folders}


def _walk_one(recipe: Recipe, number: int, companions: _Kept, *, rehash: bool, prefix: str,
              workers: WorkerPool) -> Iterator[Item | Finding]:
    """The items of one source, without those that are only references, and its findings."""
    source, mask, folders = recipe.sources[number], recipe.mask_of(number), recipe.references_of(number)
    masks = companions["mask", mask] if isinstance(mask, Place) else "sidecar" if mask == "auto" else mask
    only_references, strict = _inside(source.path, folders or ()), recipe.missing_reference_of(number) == "reject"
    conditions = None if folders is None else [companions["reference", path] for path in folders]
    entries = walk_source(source.path, source=number, masks=masks, references=conditions, table=source.table,
                          rehash=rehash, prefix=prefix, workers=workers)
    if strict and not only_references:
        yield from entries
        return
    for entry in entries:
        if isinstance(entry, Finding) or not entry.name.startswith(only_references):
            yield entry if isinstance(entry, Finding) or strict else replace(entry, unreferenced="")


def _inside(root: Place, folders: Sequence[Place]) -> tuple[str, ...]:
    """What the names of pictures in a source begin with that lie in one of the directories."""
    above = f"{real_name(root).rstrip('/')}/"
    return tuple(f"{printable_name(name.removeprefix(above))}/" for name in map(real_name, folders)
                 if name.startswith(above))


def why_empty(path: Place, excluded: int) -> str:
    """The reason why a source yields no picture; `excluded`: the number of pictures that its globs exclude."""
    if excluded:
        return f"no picture is used: include and exclude leave out all {excluded}"
    tars = tars_in(path)
    return f"no pictures in it, but {tars} tars: name them, like '*.tar'" if tars else "no pictures in it"
