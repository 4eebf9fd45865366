"""Chooses names of a source by a recipe's include and exclude globs, written as in a `.gitignore`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from prep.parse import Unparsed, brief


def chosen_by(include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """A test of names: matched by `include` (or `include` is empty), and not matched by `exclude`.

    Names are POSIX paths below the source. A glob without a slash matches in any directory, other globs from the top;
    `*` and `?` match within a directory, `**` across; a matching directory includes all its contents; `!` reverses an
    earlier match. Raises `Unparsed` for an invalid glob.
    """
    included, excluded = _matcher(include), _matcher(exclude)
    return lambda name: (not include or included(name)) and not excluded(name)


def _matcher(globs: Sequence[str]) -> Callable[[str], bool]:
    if not globs:
        return lambda _: False
    from pathspec import GitIgnoreSpec  # here: few recipes need it, and --help does not

    patterns: list[Any] = []
    for glob in globs:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # Python's, of sets like [[:alpha:]]
                patterns += GitIgnoreSpec.from_lines([glob]).patterns
        except (ValueError, re.error) as error:
            raise Unparsed(f"{brief(glob)} is not a valid glob, expected one as in a .gitignore: {error}") from None
    return GitIgnoreSpec(patterns).match_file
