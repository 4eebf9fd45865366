"""Notices pictures that two sources of a recipe have: the same file, under two names or one."""

from __future__ import annotations

from prep.findings import Finding, finding
from prep.formatting import counted, join_names
from prep.fs.blob import Blob
from prep.fs.place import real_name
from prep.recipe.schema import Recipe
from prep.sources.item import Item
from prep.sources.walk import places_of

SHOWN = 5  # names in a finding


class SharedFiles:
    """The pictures of sources that lie within each other, or name the same tars; those of others take no memory."""

    def __init__(self, recipe: Recipe) -> None:
        self._paths = [source.path for source in recipe.sources]
        roots = [{real_name(place) for place in places_of(source.path)} for source in recipe.sources]
        self._near = {number for number, mine in enumerate(roots) for other, theirs in enumerate(roots)
                      if number != other and _overlap(mine, theirs)}
        self._folders: dict[str, str] = {}
        self._owners: dict[tuple[str, str, int], int] = {}
        self._found: dict[int, list[str]] = {}  # names in the source that is walked, by the earlier source

    def add(self, item: Item) -> None:
        """Notes a picture."""
        if item.source not in self._near:
            return
        owner = self._owners.setdefault(self._place(item.picture), item.source)
        if owner != item.source:
            self._found.setdefault(owner, []).append(item.name)

    def findings(self, prefix: str) -> list[Finding]:
        """The findings since the last call, for the source whose labels begin with `prefix`."""
        shared, self._found = self._found, {}
        return [finding(f"{prefix}.", "shared-source", f"{counted(len(names), 'picture')} of it "
                        f"{'is' if len(names) == 1 else 'are'} in {self._paths[owner]}, too, and "
                        f"{'trains' if len(names) == 1 else 'train'} as a sample of each: {join_names(names, SHOWN)}")
                for owner, names in shared.items()]

    def _place(self, picture: Blob) -> tuple[str, str, int]:
        """The place of a picture, the same however its source is spelled."""
        folder, _, name = picture.file.rpartition("/")
        if folder not in self._folders:
            self._folders[folder] = real_name(picture.place.parent)
        return self._folders[folder], name, picture.offset


def _overlap(first: set[str], second: set[str]) -> bool:
    if first & second:
        return True
    return any(inner.startswith(f"{outer.rstrip('/')}/") for mine, theirs in ((first, second), (second, first))
               for inner in mine for outer in theirs) if len(first) == len(second) == 1 else False
