"""Matches a directory of masks with pictures by name."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from prep.findings import Finding, finding
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.fs.place import Place
from prep.sources.folders import folders_of
from prep.sources.tree import stem_of


@dataclass(kw_only=True, slots=True)
class MaskFolder:
    """A directory of masks by stem; records which of them were used."""

    root: Place
    by_stem: dict[str, Blob]  # "cat/cat_00" → file; with and without -masklabel, the former first
    names: dict[str, str] = field(default_factory=dict)  # of each file, below the root
    used: set[str] = field(default_factory=set)
    second: dict[Blob, Blob] = field(default_factory=dict)  # masks of a stem that has another, which is used

    @classmethod
    def read(cls, root: Place) -> MaskFolder:
        """The masks below `root`. Raises `PathError` if it is not a directory."""
        masks = cls(root=root, by_stem={})
        for folder in folders_of(root):
            for stem, name in [*folder.masks.items(), *((stem_of(name), name) for name in folder.pictures)]:
                first = masks.by_stem.setdefault(printable_name(folder.prefix + stem), blob := folder.blob(name))
                if first is not blob:
                    masks.second[blob] = first
            masks.names |= {folder.base + name: folder.prefix + name
                            for name in (*folder.masks.values(), *folder.pictures, *folder.second_masks)}
            masks.second |= {folder.blob(name): folder.blob(first) for name, first in folder.second_masks.items()}
        return masks

    def find(self, *stems: str) -> Blob | None:
        """The mask for a picture's name without extension: in the same subdirectory, else directly in the root.

        A picture may have several names; the first that matches a mask counts.
        """
        names = [printable_name(stem) for stem in stems]  # as `prep mask` spells the names of its files
        mask = next((self.by_stem[stem] for stem in (*names, names[-1].rpartition("/")[2]) if stem in self.by_stem),
                    None)
        if mask is not None:
            self.used.add(mask.file)
        return mask

    def orphans(self) -> Iterator[Finding]:
        """A finding for each mask that no picture used; its path is the root's own name and the path below it."""
        for file in sorted({blob.file for blob in self.by_stem.values()} - self.used):
            yield finding(self._label(file), "orphan-mask", "mask without a picture")
        for blob, first in self.second.items():
            if first.file in self.used:
                yield finding(self._label(blob.file), "second-mask", f"{printable_name(first.name)} is used instead")

    def _label(self, file: str) -> str:
        place = self.names[file]
        return f"{printable_name(self.root.name or 'masks')}/{printable_name(place)}"
