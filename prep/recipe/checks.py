"""Checks for settings of a recipe that are not a plain number, switch or word. Each raises `Unparsed`."""

from __future__ import annotations

import re
from typing import Any

from prep.buckets.sizes import MOST_RESOLUTION
from prep.buckets.views import CROPS
from prep.fs.place import Place
from prep.parse import Unparsed, alpha_of, brief, expect, list_of, one_of, parse_size, suggest, within
from prep.setting import number_of, texts_check
from prep.sources.globs import chosen_by

TILE_STEP = 128  # pixels: tiles advance by three quarters of their side, in latent cells of up to 32 pixels
MOST_TILE = 1 << 14  # pixels
UPSCALES = ("never", "allow", "reject")
ENLARGED = (1, 100)  # the factor that a picture may be enlarged by at most


def tile_check(value: Any, where: str) -> int:
    """A multiple of `TILE_STEP` pixels, or 0."""
    side: int = number_of(value, int, 0, MOST_TILE, where)
    if side % TILE_STEP:
        raise Unparsed(f"{where} is {side}, expected 0 or a multiple of {TILE_STEP} pixels")
    return side


def resolution_check(value: Any, where: str) -> int | tuple[int, ...]:
    """A side in pixels, or several, ascending and without duplicates."""
    if not isinstance(value, list | tuple):
        return int(_side(value, where))
    sides = sorted(set(list_of(list(value), _side, where)))
    if not sides:
        raise Unparsed(f"{where} is [], expected a whole number of pixels, or several")
    return sides[0] if len(sides) == 1 else tuple(sides)


def _side(value: Any, where: str) -> int:
    within(expect(value, int, where), 8, MOST_RESOLUTION, re.sub(r"\[\d+\]$", "", where))
    return int(value)


def sizes_check(value: Any, where: str) -> tuple[str, ...]:
    """Bucket sizes: `1024x768`."""
    sizes = texts_check(value, where)
    for size in sizes:
        parse_size(size, where)
    return sizes


def upscale_check(value: Any, where: str) -> str | float:
    """A policy, or a number; true means "allow", false "never"."""
    if isinstance(value, bool):
        return "allow" if value else "never"
    if isinstance(value, str) and value in UPSCALES:
        return value
    if isinstance(value, int | float):
        within(value, *ENLARGED, where)
        return value
    near = suggest(value, UPSCALES) if isinstance(value, str) else ""
    raise Unparsed(f"{where} is {brief(value)}, expected one of: {', '.join(UPSCALES)}, or a number from 1 to 100"
                   f"{near}")


def crop_check(value: Any, where: str) -> str:
    """The place of crops; "center" is "centre", as keys and documents spell it."""
    return "centre" if value == "center" else one_of(value, CROPS, where)


def alpha_check(value: Any, where: str) -> str:
    """A color, "keep" or "reject"."""
    alpha_of(text := expect(value, str, where), where)
    return text


def path_check(value: Any, where: str) -> str | Place:
    """The text of a path or URL, which its reader resolves; or a place."""
    if isinstance(value, Place):
        return value
    text = expect(value, str, where)
    if "\0" in text:
        raise Unparsed(f"{where} is {brief(text)}, expected a path without NUL")
    return text


def mask_check(value: Any, where: str) -> str | Place:
    """One of the places of masks, or a directory's path."""
    return value if isinstance(value, Place) else expect(value, str, where)


def references_check(value: Any, where: str) -> tuple[str | Place, ...]:
    """The directories of references, each once, in their order."""
    if not isinstance(value, list | tuple):
        raise Unparsed(f"{where} is {brief(value)}, expected a list of directories, like [\"control\"]")
    folders = tuple(list_of(list(value), path_check, where))
    if twice := [folder for number, folder in enumerate(folders) if folder in folders[:number]]:
        raise Unparsed(f"{where} has {brief(str(twice[0]))} twice, expected each directory once")
    if "" in folders:
        raise Unparsed(f"{where} has '', expected directories")
    return folders


def globs_check(value: Any, where: str) -> tuple[str, ...]:
    """Globs of names below a source."""
    globs = texts_check(value, where)
    if bad := [glob for glob in globs if not glob or glob.startswith("/") or ".." in glob.split("/")]:
        raise Unparsed(f"{where} has {bad[0]!r}, expected a glob of names below the source, like 'cats/**'")
    try:
        chosen_by(globs, ())
    except Unparsed as error:
        raise Unparsed(f"{where}: {error}") from None
    return globs


def table_check(value: Any, where: str) -> dict[str, Any]:
    """A table, whose keys its reader checks."""
    table: dict[str, Any] = expect(value, dict, where)
    return table
