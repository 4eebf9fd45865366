"""Finds the directory of edits of a source, which `prep view --edit` or `prep caption` wrote, and names it in a recipe.

What one command wrote is used by the next: where neither a recipe's [edits] nor `--edits` names a directory, the usual
one of the source is used, and said. `--edits none`, or `from = "none"`, leaves it out.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator
from dataclasses import replace
from pathlib import Path

from prep.formatting import shell_name
from prep.fs import atomic
from prep.fs.paths import resolve
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.fs.text import parse_toml, read_small, read_text
from prep.recipe.schema import Recipe
from prep.recipe.write import quoted, relative_to
from prep.sources.walk import is_tars

NONE = Path("none")  # in place of a directory: no edits
UNDO = ".undo"  # in a directory of edits: what can be undone; hidden, so that it is no picture's


def usual_folder(source: Place) -> Path | None:
    """The directory for edits of a source that names none: beside it, `photos-edits` of `photos`; `None` for one in a
    store."""
    if isinstance(source, Bucket):
        return None
    at = resolve(source)
    if is_tars(source):
        return resolve(source.parent) / "edits"
    return at.with_name(f"{at.stem if at.suffix == '.toml' else at.name}-edits")


def with_usual_edits(recipe: Recipe) -> Recipe:
    """The recipe, which asks for no edits, with those that `prep view --edit` made of the recipe itself, of its only
    source, or of the directory that its sources lie in; and with notes on what is used, and on what is not."""
    folders = list(dict.fromkeys(_written(recipe)))
    above = {source.path.parent for source in recipe.sources}
    whole = recipe.sources[0].path if len(recipe.sources) == 1 else above.pop() if len(above) == 1 else None
    usual = [usual_folder(place) for place in (recipe.file, whole) if place is not None]
    used = next((folder for folder in folders if folder in usual), None)
    notes = [f"note: edits in {shell_name(str(folder))} are not used: name it with --edits, or as from in [edits] of a "
             "recipe" for folder in folders if folder != used]
    if used is not None:
        notes.insert(0, f"note: captions and masks of prep view and prep caption are used, those in "
                     f"{shell_name(str(used))}; --edits none leaves them out")
    return replace(recipe, edits=used, notes=(*recipe.notes, *notes))


def _written(recipe: Recipe) -> Iterator[Path]:
    """Yields the usual directories of a recipe's file, its sources and their parents, if edits were saved in them."""
    sources = [source.path for source in recipe.sources]
    for place in (recipe.file, *sources, *(path.parent for path in sources)):
        folder = None if place is None else usual_folder(place)
        if folder is not None and (folder / UNDO).is_dir() and any(
                not inner.name.startswith(".") for inner in folder.iterdir()):
            yield folder


def source_folders(recipe: Recipe) -> tuple[str, ...]:
    """The directory of each source's edits, below that of all edits, and then of each that is not used: "" for the only
    one of a recipe, else its name, with as much of what is above as tells it from others: `a/img` and `b/img`."""
    places = [*(source.path for source in recipe.sources), *recipe.unused]
    if len(places) == 1:
        return ("",)
    paths = [resolve(place).parts[1:] for place in places]
    return tuple(_shortest(path, {other for other in paths if other != path}) for path in paths)


def _shortest(path: tuple[str, ...], others: Collection[tuple[str, ...]]) -> str:
    """The fewest last names of a path that none of the others ends with."""
    ends = (path[-depth:] for depth in range(1, len(path)))
    return "/".join(next((end for end in ends if all(other[-len(end):] != end for other in others)), path))


def record_edits(recipe: Path, folder: Path) -> bool:
    """Adds an [edits] that names `folder` to the end of a recipe's file, whose other bytes stay; returns False, and
    changes nothing, if it has one. Raises `OSError`, `ConfigError`, `PathError`, `Unparsed`."""
    at = recipe.resolve()
    text = read_text(at, regular=True)
    table = parse_toml(text, str(recipe))
    if "edits" in table:
        return False
    named, data = relative_to(folder, at.parent), read_small(at, regular=True)
    end = "\r\n" if b"\r\n" in data else "\n"
    lines = ["", "[edits]", f"from = {quoted(named)}", ""]
    if not text.endswith("\n"):
        lines.insert(0, "")
    data += end.join(lines).encode()
    if parse_toml(text + end.join(lines), str(recipe)) != {**table, "edits": {"from": named}}:
        return False
    atomic.write_atomic(at, data, mode=stat.S_IMODE(at.stat().st_mode))
    return True
