"""Chooses names of a source by a recipe's include and exclude globs, written as in a `.gitignore`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_PARTS = re.compile(r"(\*\*/|\*\*|\*|\?|\[!?[^\]/!][^\]/]*\])")
_SPELLED = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


def chosen_by(include: Sequence[str], exclude: Sequence[str]) -> Callable[[str], bool]:
    """A test of names: matched by some glob of `include` (or `include` is empty), and by none of `exclude`."""
    taken, left = ([pattern_of(glob) for glob in globs] for globs in (include, exclude))

    def chosen(name: str) -> bool:
        return (not taken or any(one.fullmatch(name) for one in taken)) and not any(
            one.fullmatch(name) for one in left)

    return chosen


def pattern_of(glob: str) -> re.Pattern[str]:
    """Compiles a glob of POSIX names: `*` and `?` match within a directory, `**` across; `[ab]` is a set, `[!ab]` not.

    `cats` matches files of that name, and files in directories of that name, at any depth. A glob with a slash in it
    is anchored at the top.
    """
    bare = glob.strip("/")
    regex = "".join(_SPELLED.get(part) or _set_or_text(part) for part in _PARTS.split(bare) if part)
    anywhere = "" if "/" in glob.rstrip("/") else "(?:.*/)?"
    return re.compile(f"{anywhere}{regex}(?:/.*)?", re.DOTALL)


def _set_or_text(part: str) -> str:
    if not (len(part) > 2 and part.startswith("[") and part.endswith("]")):
        return re.escape(part)
    negated, members = part[1] == "!", part[1:-1].removeprefix("!")
    spelled = ("[^/" if negated else "[") + re.sub(r"[\\^\[\]&~|]", r"\\\g<0>", members) + "]"
    try:
        re.compile(spelled)
    except re.error:  # a reversed range, such as [z-a]: taken literally
        return re.escape(part)
    return spelled
