"""Sample roles, and which pictures are held out for validation: those whose salted digests rank lowest."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

from prep.digest import HOLE, digest_spelled, json_template, string
from prep.errors import ConfigError

Role = Literal["train", "validation", "prior"]
ROLES: tuple[Role, ...] = ("train", "validation", "prior")
MEANING = 1  # raise it when the same digest would get another rank


def choose_validation(
    pictures: Iterable[str], fraction: Fraction | float | str, salt: str = "latentry"
) -> tuple[frozenset[str], str | None]:
    """Digests of the pictures held out for validation, and a notice if the fraction alone would have chosen none."""
    ranks, share = _ranks(set(pictures), salt), _share(fraction)
    below = share.numerator * 2**256
    chosen = frozenset(picture for picture, rank in ranks.items() if rank * share.denominator < below)
    if chosen or not share or len(ranks) < 2:
        return chosen, None
    notice = f"validation.fraction {fraction} of {len(ranks)} pictures chose none, so one was taken"
    return frozenset([min(ranks, key=lambda picture: ranks[picture])]), notice


def _ranks(pictures: Iterable[str], salt: str) -> dict[str, int]:
    """A uniformly distributed number below 2²⁵⁶ for each picture."""
    first, last = json_template({"kind": "validation", "meaning": MEANING, "salt": salt, "picture": HOLE})
    return {picture: int(digest_spelled(f"{first}{string(picture)}{last}"), 16) for picture in pictures}


def _share(fraction: Fraction | float | str) -> Fraction:
    """The fraction exactly as written: 0.05 is 1/20, not the nearest binary number. Raises `ConfigError`."""
    try:
        share = Fraction(str(fraction))
    except (ValueError, ZeroDivisionError):
        share = Fraction(-1)
    if not 0 <= share < 1:
        raise ConfigError(f"validation.fraction is {fraction}, expected a number from 0 up to, but not including, 1")
    return share
