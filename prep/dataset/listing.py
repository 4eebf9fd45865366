"""Lists all items of a recipe, each with its label."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from prep.dataset.edits import EditFolder
from prep.dataset.overlap import SharedFiles
from prep.findings import Finding
from prep.fs.labels import source_prefixes
from prep.fs.paths import NamedPath
from prep.fs.place import Place
from prep.recipe.edits import source_folders
from prep.recipe.schema import Recipe
from prep.sources.globs import chosen_by
from prep.sources.item import Item
from prep.sources.mask_directory import MaskFolder
from prep.sources.readers import readers
from prep.sources.walk import places_of, tars_in, walk_source


def picture_places(recipe: Recipe) -> list[NamedPath]:
    """Each directory and tar of the recipe's pictures, once; a prefix in a store as it is. Raises `PathError`."""
    paths = (path for source in recipe.sources for path in places_of(source.path))
    return [NamedPath(role="pictures", path=path) for path in dict.fromkeys(paths)]


def walk_recipe(recipe: Recipe, *, rehash: bool = False) -> Iterator[Item | Finding]:
    """All items in a recipe's sources, and findings, whose paths are labels like the items'. `rehash` lists tars again.
    Raises `PathError`, and `ConfigError` for an edit of two sources.
    """
    folders = {path: MaskFolder.read(path) for path in recipe.mask_folders}
    places, count = source_folders(recipe), len(recipe.sources)
    edits = None if recipe.edits is None else EditFolder(root=recipe.edits, sources=places[:count],
                                                         unused=places[count:])
    shared, prefixes = SharedFiles(recipe), source_prefixes([source.path for source in recipe.sources])
    with readers() as workers:
        for number, source in enumerate(recipe.sources):
            mask = recipe.mask_of(number)
            fits = chosen_by(source.include, source.exclude)
            masks = folders[mask] if isinstance(mask, Place) else "sidecar" if mask == "auto" else mask
            prefix = prefixes[number]
            included = excluded = 0
            for entry in walk_source(source.path, source=number, masks=masks, table=source.table, rehash=rehash,
                                     prefix=prefix, workers=workers):
                if isinstance(entry, Finding):
                    yield replace(entry, path=prefix + entry.path)
                elif fits(entry.name):
                    included += 1
                    shared.add(entry)
                    yield entry if edits is None else edits.apply(entry, masks=mask not in ("none", "alpha"))
                else:
                    excluded += 1
            if not included:
                yield Finding(path=f"{prefix}.", code="empty-source", severity="warning",
                              detail=why_empty(source.path, excluded))
            yield from shared.findings(prefix)
    for folder in folders.values():
        yield from folder.orphans()
    if edits is not None:
        yield from edits.orphans()


def why_empty(path: Place, excluded: int) -> str:
    """The reason why a source yields no picture; `excluded`: the number of pictures that its globs exclude."""
    if excluded:
        return f"no picture is used: include and exclude leave out all {excluded}"
    tars = tars_in(path)
    return f"no pictures in it, but {tars} tars: name them, like '*.tar'" if tars else "no pictures in it"
