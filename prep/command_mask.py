"""What `prep mask` does: checks where it writes, makes the masks, says what came of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from prep.errors import PathError, UsageError
from prep.mask import METHODS, Made, make_masks
from prep.parse import suggest
from prep.paths import Place, check_apart, check_not_cache
from prep.recipe import Recipe
from prep.records import Item
from prep.report.words import rejected_line, safe
from prep.sources.walk import places_of
from prep.survey import walk_all


def mask_all(recipe: Recipe, *, method: str, output: Path, colour: str, tolerance: int, force: bool,
             tick: Callable[[int], object]) -> Made:
    """Masks of every picture of `recipe`, below `output`. Raises `UsageError`, `PathError`."""
    known = next((name for name in METHODS if name == method), None)
    if known is None:
        raise UsageError(f"--with is '{method}', expected one of: {', '.join(METHODS)}{suggest(method, METHODS)}")
    if len(recipe.sources) != 1:
        raise UsageError(f"the recipe has {len(recipe.sources)} sources, expected 1, since masks are named by pictures",
                         hint="run prep mask once for each source directory")
    check_apart([*(Place(role="pictures", path=path) for path in places_of(recipe.sources[0].path)),
                 Place(role="output", path=output)])
    check_not_cache(output)
    if output.exists() and not output.is_dir():
        raise PathError(f"{output} is a file, expected a directory for masks")
    items = (one for one in walk_all(recipe) if isinstance(one, Item))
    return make_masks(items, method=known, out=output, colour=colour, tolerance=tolerance, force=force, tick=tick)


def as_json(made: Made, output: Path) -> dict[str, Any]:
    """The document of `prep mask --json`."""
    return {"directory": str(output), "written": made.written, "kept": made.kept, "skipped": made.skipped,
            "findings": [one.as_json() for one in made.findings]}


def as_text(made: Made, output: Path) -> str:
    """A few lines for people."""
    lines = [f"{safe(str(output))}: {made.written} masks written, {made.kept} there already, "
             f"{made.skipped} pictures need none (all white)"]
    return "\n".join([*lines, *(rejected_line(one) for one in made.findings)])
