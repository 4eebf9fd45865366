"""Matches a directory of masks with pictures by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from prep.findings import Finding
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.fs.mirror import shown
from prep.sources.folders import folders_of
from prep.sources.tree import stem_of


@dataclass(kw_only=True, slots=True)
class MaskFolder:
    """A directory of masks by stem; records which of them were used."""

    root: Path
    by_stem: dict[str, Blob]  # "cat/cat_00" → file; with and without -masklabel, the former first
    used: set[str] = field(default_factory=set)

    @classmethod
    def read(cls, root: Path) -> MaskFolder:
        """The masks below `root`. Raises `PathError` if it is not a directory."""
        by_stem: dict[str, Blob] = {}
        for folder in folders_of(root):
            for name in folder.pictures:
                by_stem.setdefault(printable_name(folder.prefix + stem_of(name)), folder.blob(name))
            by_stem.update({printable_name(folder.prefix + stem): folder.blob(name)
                            for stem, name in folder.masks.items()})
        return cls(root=root, by_stem=by_stem)

    def find(self, *stems: str) -> Blob | None:
        """The mask for a picture's name without extension: in the same subdirectory, else directly in the root.

        A picture may have several names; the first that matches a mask counts.
        """
        asked = [printable_name(stem) for stem in stems]  # as `prep mask` spells the names of its files
        found = next((self.by_stem[stem] for stem in (*asked, asked[-1].rpartition("/")[2]) if stem in self.by_stem),
                     None)
        if found is not None:
            self.used.add(found.file)
        return found

    def orphans(self) -> Iterator[Finding]:
        """A finding for each mask that no picture used; its path is the root's own name and the path below it."""
        name, root = printable_name(self.root.name or "masks"), Path(shown(self.root))
        for path in sorted(Path(file) for file in {blob.file for blob in self.by_stem.values()} - self.used):
            place = printable_name(path.relative_to(root).as_posix())
            yield Finding(path=f"{name}/{place}", code="orphan-mask", severity="warning",
                          detail="mask without a picture")
