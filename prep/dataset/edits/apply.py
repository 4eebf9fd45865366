"""Applies a directory of edited captions and masks: they replace those beside the pictures, which stay as they are.

A caption is `NAME.txt`, a mask `NAME-masklabel.png`, below the directory as the picture is below its source: those of
`cats/a.jpg` are `cats/a.txt` and `cats/a-masklabel.png`. Of several sources, each has a directory of its own there,
with its name: `img/cats/a.txt`. An edit outside of these counts, too, if a single source has such a picture.
`prep view --edit` writes them, and `prep caption` captions.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from prep.errors import ConfigError
from prep.findings import Finding
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.sources.item import Item
from prep.sources.tree import MASK, stem_of

CAPTION_END, MASK_END = ".txt", f"{MASK}.png"


def edited_name(name: str, end: str) -> str:
    """The path of a picture's edited caption or mask below their directory; `name` is an item's."""
    folder, slash, last = name.rpartition("/")
    return f"{folder}{slash}{stem_of(last)}{end}"


@dataclass(kw_only=True, slots=True)
class EditFolder:
    """A directory of edits, which need not exist; records which of them were used."""

    root: Path
    sources: tuple[str, ...]  # the directory of each source in it
    unused: tuple[str, ...] = ()  # those of sources that are not used now, of which no edit has a picture
    used: dict[str, Item] = field(default_factory=dict)  # by path: the first item that it replaced something of

    def apply(self, item: Item, *, masks: bool) -> Item:
        """The item with its edited caption and, if `masks`, its edited mask.

        Raises `ConfigError` for an edit that a picture of another source has, too: it was made for one of them.
        """
        caption, mask = self._found(item, CAPTION_END), self._found(item, MASK_END)
        if caption is not None:
            item = replace(item, caption_at=caption, caption_format="text", captions=())
        return item if mask is None or not masks else replace(item, mask=mask)

    def _found(self, item: Item, end: str) -> Blob | None:
        own = self.root / self.sources[item.source] / edited_name(item.name, end)
        if own.is_file():
            self.used.setdefault(str(own), item)
            return Blob(file=str(own))
        path = self.root / edited_name(item.name, end)
        if not path.is_file() or any(
                path.is_relative_to(self.root / source) for source in (*self.sources, *self.unused) if source):
            return None
        other = self.used.setdefault(str(path), item)
        if other.source != item.source:
            raise ConfigError(f"{other.label} and {item.label} share the edit {path.relative_to(self.root)}, which was "
                              "made for one of them", hint=f"move it to {self.sources[other.source]}/ or "
                              f"{self.sources[item.source]}/ in {self.root}")
        return Blob(file=str(path))

    def orphans(self) -> Iterator[Finding]:
        """A finding for each edit without a picture; its path begins with the directory's own name."""
        for folder, below, names in os.walk(self.root):
            below[:] = sorted(name for name in below if not name.startswith("."))
            for name in sorted(names):
                kind = "mask" if name.endswith(MASK_END) else "caption" if name.endswith(CAPTION_END) else None
                path = Path(folder, name)
                if kind is not None and str(path) not in self.used and not name.startswith(".") and not any(
                        path.is_relative_to(self.root / source) for source in self.unused):
                    place = path.relative_to(self.root.parent).as_posix()
                    yield Finding(path=printable_name(place), code=f"orphan-{kind}", severity="warning",
                                  detail=f"edited {kind} without a picture")
