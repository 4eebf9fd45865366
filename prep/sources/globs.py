"""Chooses names of a source by a recipe's include and exclude globs, written as in a `.gitignore`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from prep.parse import Unparsed, brief


def chosen_by(include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """Whether a name is among those that `include` takes (none: all are), and not among those of `exclude`.

    Names are POSIX paths below the source. A glob without a slash fits names in any directory, others count from the
    top; `*` and `?` stay within a directory, `**` does not; a directory that fits brings all that is in it; `!` takes
    back what an earlier glob took. Raises `Unparsed` for an invalid glob.
    """
    taken, left = _matcher(include), _matcher(exclude)
    return lambda name: (not include or taken(name)) and not left(name)


def _matcher(globs: Sequence[str]) -> Callable[[str], bool]:
    if not globs:
        return lambda _: False
    from pathspec import GitIgnoreSpec  # here: few recipes need it, and --help none

    patterns: list[Any] = []
    for glob in globs:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # Python's, of sets like [[:alpha:]]
                patterns += GitIgnoreSpec.from_lines([glob]).patterns
        except (ValueError, re.error) as error:
            raise Unparsed(f"{brief(glob)} is not a valid glob, expected one as in a .gitignore: {error}") from None
    return GitIgnoreSpec(patterns).match_file
