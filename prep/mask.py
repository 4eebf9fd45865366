"""Mask pictures for people to look at and edit, made from transparency or from a background colour.

Written as `NAME-masklabel.png` into a directory of its own, in the pictures' own subdirectories; white trains. Each
file is whole or absent; one that exists is left alone, since somebody may have edited it. So a run goes on where it
stopped.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import numpy as np

from prep import images
from prep.cache.files import write_whole
from prep.errors import PathError, UsageError
from prep.paths import is_inside, resolve, same_place
from prep.records import Finding, Item, Size
from prep.report.words import safe
from prep.sources.blob import read_blob
from prep.sources.folders import MASK

Method = Literal["alpha", "color"]
Outcome = Literal["written", "kept", "skipped"]
METHODS: dict[Method, str] = {"alpha": "opaque parts train", "color": "what differs from the background colour trains"}
ASPECT = 0.01  # relative: how far a mask's aspect may be off before it is another picture's mask


@dataclass(frozen=True, kw_only=True, slots=True)
class Made:
    """What `make_masks` did."""

    written: int
    kept: int  # were there already
    skipped: int  # would be white everywhere: the picture has no transparency, or nothing of the colour
    findings: tuple[Finding, ...]  # pictures that cannot be used


def fits(mask: Size, picture: Size) -> bool:
    """Whether a mask of one size can be scaled to a picture of another: same aspect, to 1 % or a pixel of the mask."""
    wanted = mask[1] * picture[0] / picture[1]  # the mask's width, had it the picture's aspect
    return abs(mask[0] - wanted) <= max(ASPECT * wanted, 1.0, picture[0] / picture[1])


def fits_scaled(mask: Size, scaled: Size) -> bool:
    """The same, where only the picture's scaled size is known: whole pixels there may hide a little of its shape."""
    (width, height), (wide, high) = mask, scaled
    return fits(mask, scaled) or abs(width * high - wide * height) <= max(width, height)


def make_masks(items: Iterable[Item], *, method: Method, out: Path, colour: str = "white", tolerance: int = 16,
               force: bool = False, tick: Callable[[int], object] = lambda _: None) -> Made:
    """Writes the masks of `items` below `out`, the only place it writes to; an item's own mask is taken over.

    `color`: a pixel trains when one of its channels is further than `tolerance` (0-255) from `colour`. `force` writes
    masks anew that are there. Raises `UsageError` for a colour or tolerance that is none, `PathError` where `out`
    cannot be written, or where a link in it leads elsewhere.
    """
    _check(method, colour, tolerance)
    counts: dict[Outcome, int] = {"written": 0, "kept": 0, "skipped": 0}
    findings: list[Finding] = []
    done: set[Path] = set()
    checked: set[Path] = set()
    for item in items:
        target = out / mask_path(item.name)
        if target.parent not in checked:
            _check_below(target.parent, out)
            checked.add(target.parent)
        if target in done:  # two pictures of one stem share the first one's mask
            outcome: Outcome | Finding = "kept"
        else:
            outcome = _make_one(item, method, colour, tolerance, target, force)
        if isinstance(outcome, Finding):
            findings.append(outcome)
        else:
            counts[outcome] += 1
            done.update([target] if outcome == "written" else [])
        tick(1)
    return Made(**counts, findings=tuple(findings))


def mask_path(name: str) -> PurePosixPath:
    """Where the mask of the picture `name` goes below the masks' directory: the same place, `NAME-masklabel.png`."""
    path = PurePosixPath(name)
    assert not path.is_absolute() and ".." not in path.parts, f"item name {name!r} leads out of its source"
    return path.with_name(f"{path.stem}{MASK}.png")


def alpha_mask(data: bytes) -> images.Pixels:
    """uint8 [H, W]: the picture's opacity. Raises `BadPicture`."""
    return np.asarray(images.alpha_of(data))


def colour_mask(data: bytes, *, colour: str, tolerance: int) -> images.Pixels:
    """uint8 [H, W]: 0 where every channel is within `tolerance` of `colour`, else 255. Raises `BadPicture`."""
    pixels_HW3 = np.asarray(images.decode(data, alpha=colour)).astype(np.int16)
    away_HW = np.abs(pixels_HW3 - np.array(images.colour_of(colour), dtype=np.int16)).max(axis=-1)
    return np.where(away_HW > tolerance, np.uint8(255), np.uint8(0))


def _check(method: str, colour: str, tolerance: int) -> None:
    if method not in METHODS:
        raise UsageError(f"mask method is '{method}', expected one of: {', '.join(METHODS)}")
    if not 0 <= tolerance <= 254:
        raise UsageError(f"tolerance is {tolerance}, expected a number from 0 to 254")
    try:
        images.colour_of(colour)
    except ValueError as error:
        raise UsageError(str(error), hint="prep mask SOURCE --with color --color '#00ff00' -o DIR") from None


def _check_below(folder: Path, out: Path) -> None:
    """Raises `PathError` when a link in `out` makes `folder` lie elsewhere, beside the pictures perhaps."""
    at, top = resolve(folder), resolve(out)
    if not same_place(at, top) and not is_inside(at, top):
        raise PathError(f"{safe(str(folder))} leads to {safe(str(at))}, expected a directory below {safe(str(top))}",
                        hint="remove the link, or choose another directory: -o DIR")


def _make_one(item: Item, method: Method, colour: str, tolerance: int, target: Path, force: bool) -> Outcome | Finding:
    """Writes one mask, unless it is there or would be white everywhere."""
    try:
        if target.exists() and not force:
            return "kept"
    except OSError as error:
        return _no_room(item, target, error)
    try:
        mask = _pixels(item, method, colour, tolerance)
    except OSError as error:
        return Finding(path=item.name, code="unreadable-file", severity="error",
                       detail=f"cannot be read: {error.strerror or error}")
    except images.BadPicture as error:
        return Finding(path=item.name, code=error.code, severity="error", detail=error.detail)
    if mask.min() == 255:
        return "skipped"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, images.encode_png(mask))
    except OSError as error:
        return _no_room(item, target, error)
    return "written"


def _no_room(item: Item, target: Path, error: OSError) -> Finding:
    """The finding for a name that the file system of `target` does not take. Raises `PathError` for another error."""
    if error.errno != errno.ENAMETOOLONG:
        raise PathError(f"cannot write mask {safe(str(target))}: {error.strerror or error}",
                        hint="choose another directory: -o DIR") from None
    return Finding(path=item.name, code="name-too-long", severity="error",
                   detail="the name or path of its mask would be longer than the file system allows")


def _pixels(item: Item, method: Method, colour: str, tolerance: int) -> images.Pixels:
    """The mask that the item has, or else the one that `method` makes. Raises `OSError`, `BadPicture`."""
    if item.mask is not None:
        return np.asarray(images.decode_mask(read_blob(item.mask)))
    data = read_blob(item.picture)
    return alpha_mask(data) if method == "alpha" else colour_mask(data, colour=colour, tolerance=tolerance)
