"""Matches a directory of masks with pictures by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prep.findings import Finding
from prep.formatting import printable_name
from prep.fs.paths import check_source
from prep.sources.tree import beginning, folders_below, stem_of


@dataclass(kw_only=True, slots=True)
class MaskFolder:
    """A directory of masks by stem; records which of them were used."""

    root: Path
    by_stem: dict[str, str]  # "cat/cat_00" → file; with and without -masklabel, the former first
    used: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, root: Path) -> MaskFolder:
        """The masks below `root`. Raises `PathError` if it is not a directory."""
        check_source(root)
        by_stem: dict[str, str] = {}
        for folder in folders_below(root):
            place = beginning(folder)
            for name in folder.pictures:
                by_stem.setdefault(printable_name(folder.prefix + stem_of(name)), place + name)
            by_stem.update({printable_name(folder.prefix + stem): place + name for stem, name in folder.masks.items()})
        return cls(root=root, by_stem=by_stem)

    def find(self, *stems: str) -> str | None:
        """The mask for a picture's name without extension: in the same subdirectory, else directly in the root.

        A picture may have several names; the first that matches a mask counts.
        """
        asked = [printable_name(stem) for stem in stems]  # as `prep mask` spells the names of its files
        found = next((self.by_stem[stem] for stem in (*asked, asked[-1].rpartition("/")[2]) if stem in self.by_stem),
                     None)
        if found is not None:
            self.used.add(found)
        return found

    def orphans(self) -> Iterator[Finding]:
        """A finding for each mask that no picture used; its path is the root's own name and the path below it."""
        name = printable_name(self.root.name or "masks")
        for path in sorted(Path(file) for file in set(self.by_stem.values()) - self.used):
            place = printable_name(path.relative_to(self.root).as_posix())
            yield Finding(path=f"{name}/{place}", code="orphan-mask", severity="warning",
                          detail="mask without a picture")
