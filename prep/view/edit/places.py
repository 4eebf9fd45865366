"""Where edited captions and masks are written: below a directory of their own, or beside the pictures; nowhere else."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from prep.dataset.edits import CAPTION_END, MASK_END, edited_name
from prep.dataset.listing import picture_places
from prep.digest import digest_strings
from prep.errors import ConfigError, PathError, UsageError
from prep.fs.mirror import is_url, shown, url_of
from prep.fs.paths import NamedPath, check_disjoint, in_cache, resolve
from prep.fs.user_cache import user_cache
from prep.recipe.schema import Recipe
from prep.sources.item import Item
from prep.sources.tree import stem_of
from prep.sources.walk import is_tars
from prep.view.edit.refused import Refused

UNDO = ".undo"  # in a directory of edits; hidden, so that it is no picture's
ENDS = {"caption": CAPTION_END, "mask": MASK_END}


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a picture's caption or mask is written."""

    path: Path
    root: Path  # nothing is written outside
    name: str  # for people, and for what can be undone


@dataclass(frozen=True, kw_only=True, slots=True)
class Places:
    """Chooses places by an item alone, never by a request."""

    recipe: Recipe
    folder: Path | None  # of edits; None: beside the pictures

    def of(self, item: Item, kind: str) -> Place:
        """The place of an item's `kind`, "caption" or "mask"."""
        if self.folder is not None:
            name = edited_name(item.name, ENDS[kind])
            return Place(path=self.folder / PurePosixPath(name), root=self.folder, name=name)
        picture = Path(item.picture.file)
        return Place(path=picture.with_name(stem_of(picture.name) + ENDS[kind]),
                     root=self.recipe.sources[item.source].path, name=edited_name(item.label, ENDS[kind]))

    @property
    def undo(self) -> Path:
        """The directory of what can be undone. Raises `PathError` for a user without a cache directory."""
        if self.folder is not None:
            return self.folder / UNDO
        cache = user_cache()
        if cache is None:
            raise PathError("what edits replace cannot be kept: there is no home directory",
                            hint="set LATENTRY_USER_CACHE to a directory of yours, or leave --sidecars out")
        sources = [os.fsdecode(os.fsencode(resolve(source.path))) for source in self.recipe.sources]
        return cache / "undo" / digest_strings(sources)[:32]


def check_place(place: Place) -> None:
    """Raises `Refused` for a place outside its root, or that a link leads away from."""
    parts = PurePosixPath(place.name).parts
    try:
        root, above = place.root.resolve(), place.path.parent.resolve()
        inside = (above == root or root in above.parents) and not {"..", UNDO} & set(parts)
        plain = not place.path.is_symlink() and (not place.path.exists() or place.path.is_file())
    except (OSError, RuntimeError, ValueError) as error:
        raise Refused(409, f"{place.name} cannot be written: {error}") from None
    if not inside or not plain:
        raise Refused(409, f"{place.name} is a link, or lies behind one that leads elsewhere: edit it where it is")


def check_editable(recipe: Recipe, items: list[Item], folder: Path | None) -> None:
    """Raises `UsageError` or `ConfigError` for pictures whose captions cannot be written as asked."""
    for source in recipe.sources:
        stored = is_url(source.path) or url_of(source.path) is not None
        if folder is None and (stored or is_tars(source.path)):
            raise UsageError(f"--sidecars is given, but {shown(source.path)} is {'in a store' if stored else 'a tar'}, "
                             "where nothing can be written beside pictures",
                             hint="leave --sidecars out: edits go to a directory of their own")
    if folder is None or len(recipe.sources) == 1:
        return
    owners: dict[str, Item] = {}
    for item in items:
        place = edited_name(item.name, CAPTION_END)
        other = owners.setdefault(place, item)
        if other.source != item.source:
            raise ConfigError(f"{other.label} and {item.label} would share the edited caption {place}",
                              hint="edit each source by itself, or use --sidecars")


def check_folder(recipe: Recipe, folder: Path) -> None:
    """Raises `PathError` for a directory of edits that lies among the pictures or masks, in a cache, or is a file."""
    places = [*picture_places(recipe), *(NamedPath(role="masks", path=one) for one in recipe.mask_folders)]
    for place in places:
        check_disjoint([place, NamedPath(role="edits", path=folder)])
    if folder.exists() and not folder.is_dir():
        raise PathError(f"edits {folder} is a file, expected a directory")
    if in_cache(folder):
        raise PathError(f"edits {folder} would lie in a cache", hint="name another directory: --edits DIR")


def usual_folder(source: Path) -> Path:
    """The directory for edits of a source that names none: beside it, `photos-edits` of `photos`. Raises `UsageError`
    for one in a store."""
    if is_url(source):
        raise UsageError(f"--edit is given, but {shown(source)} is in a store, where no edits are written",
                         hint="name a directory of this computer for them: --edits DIR")
    at = resolve(source)
    if is_tars(source):
        return resolve(source.parent) / "edits"
    return at.with_name(f"{at.stem if at.suffix == '.toml' else at.name}-edits")
