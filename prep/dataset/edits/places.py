"""Places for edited captions and masks: below a directory of their own, or beside the pictures, and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prep.dataset.edits.apply import CAPTION_END, MASK_END, edited_name
from prep.dataset.edits.refused import Refused
from prep.dataset.listing import picture_places
from prep.digest import digest_strings
from prep.errors import PathError, UsageError
from prep.fs.below import Below
from prep.fs.paths import NamedPath, check_disjoint, in_cache, resolve
from prep.fs.place import require_local
from prep.fs.remote.bucket import Bucket
from prep.fs.user_cache import user_cache
from prep.recipe.edits import UNDO, source_folders, usual_folder
from prep.recipe.schema import Recipe
from prep.sources.item import Item
from prep.sources.tree import stem_of
from prep.sources.walk import is_tars

ENDS = {"caption": CAPTION_END, "mask": MASK_END}


@dataclass(frozen=True, kw_only=True, slots=True)
class EditPlace:
    """The file to which a picture's caption or mask is written."""

    folder: Below  # nothing is written outside its root
    file: str
    name: str  # for people, and for what can be undone

    @property
    def path(self) -> Path:
        return self.folder.path / self.file


@dataclass(frozen=True, kw_only=True, slots=True)
class EditPlaces:
    """Chooses places by an item alone, never by a request."""

    recipe: Recipe
    folder: Path | None  # of edits; None: beside the pictures

    def of(self, item: Item, kind: str) -> EditPlace:
        """The place of an item's `kind`, "caption" or "mask". Raises `Refused` for one that would be outside."""
        end = ENDS[kind]
        if self.folder is not None:
            name = str(PurePosixPath(source_folders(self.recipe)[item.source], edited_name(item.name, end)))
            return _place(self.folder, PurePosixPath(name).parts, name)
        picture, root = Path(item.picture.file), require_local(self.recipe.sources[item.source].path, "source")
        name = edited_name(item.label, end)
        if root not in picture.parents:
            raise Refused(409, f"{name} would not be below {root}: edit it where it is")
        return _place(root, (*picture.relative_to(root).parent.parts, stem_of(picture.name) + end), name)

    @property
    def undo(self) -> Below:
        """The directory of what can be undone. Raises `PathError` for a user without a cache directory."""
        if self.folder is not None:
            return Below(self.folder, (UNDO,))
        cache = user_cache()
        if cache is None:
            raise PathError("what edits replace cannot be kept: there is no home directory",
                            hint="set LATENTRY_USER_CACHE to a directory of yours, or leave --sidecars out")
        sources = [os.fsdecode(os.fsencode(str(resolve(source.path)))) for source in self.recipe.sources]
        return Below(cache / "undo" / digest_strings(sources)[:32])


def _place(root: Path, parts: Sequence[str], name: str) -> EditPlace:
    """The place of a file below `root`. Raises `Refused` for one outside, or among what can be undone."""
    if any(part == ".." or part.casefold() == UNDO or "/" in part or os.sep in part for part in parts):
        raise Refused(409, f"{name} would not be below {root}: edit it where it is")
    return EditPlace(folder=Below(root, tuple(parts[:-1])), file=parts[-1], name=name)


def check_editable(recipe: Recipe, folder: Path | None) -> None:
    """Raises `UsageError` for pictures beside which nothing can be written, if that is asked."""
    for source in recipe.sources:
        stored = isinstance(source.path, Bucket)
        if folder is None and (stored or is_tars(source.path)):
            raise UsageError(f"--sidecars is given, but {source.path} is {'in a store' if stored else 'a tar'}, "
                             "where nothing can be written beside pictures",
                             hint="leave --sidecars out: edits go to a directory of their own")


def check_folder(recipe: Recipe, folder: Path) -> None:
    """Raises `PathError` for a directory of edits that lies among the pictures or masks, in a cache, or is a file."""
    places = [*picture_places(recipe), *(NamedPath(role="masks", path=folder) for folder in recipe.mask_folders)]
    for place in places:
        check_disjoint([place, NamedPath(role="edits", path=folder)])
    if folder.exists() and not folder.is_dir():
        raise PathError(f"edits {folder} is a file, expected a directory")
    if in_cache(folder):
        raise PathError(f"edits {folder} would lie in a cache", hint="name another directory: --edits DIR")


def folder_of(source: Path | Bucket) -> Path:
    """The directory for edits of a source that names none. Raises `UsageError` for one in a store."""
    folder = usual_folder(source)
    if folder is None:
        raise UsageError(f"--edit is given, but {source} is in a store, where no edits are written",
                         hint="name a directory of this computer for them: --edits DIR")
    return folder
