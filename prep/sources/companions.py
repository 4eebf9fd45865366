"""Matches directories of masks, and of references, with pictures by name."""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, count, takewhile
from typing import Literal

from prep.findings import Finding, finding
from prep.formatting import join_names, printable_name
from prep.fs.blob import Blob
from prep.fs.place import Place
from prep.sources.folders import folders_of
from prep.sources.tree import stem_of

_NUMBERED = re.compile(r"(.+)_(\d{1,4})", re.DOTALL)


@dataclass(kw_only=True, slots=True)
class Companions:
    """A directory of masks, or of references, by stem; records which of them were used."""

    root: Place
    kind: Literal["mask", "reference"]
    by_stem: dict[str, Blob]  # "cat/cat_00" → file; of masks with and without -masklabel, the former first
    numbered: dict[str, dict[int, str]] = field(default_factory=dict)  # "cat/cat" → its stems cat_0, cat_0001 …
    flat: bool = True  # whether all files lie directly in it
    names: dict[str, str] = field(default_factory=dict)  # of each file, below the root
    used: set[str] = field(default_factory=set)
    second: dict[Blob, Blob] = field(default_factory=dict)  # files of a stem that has another, which is used

    @classmethod
    def read(cls, root: Place, kind: Literal["mask", "reference"]) -> Companions:
        """The masks, or the references, below `root`. Raises `PathError` if it is not a directory."""
        whole = cls(root=root, kind=kind, by_stem={})
        for folder in folders_of(root):
            whole.flat &= not folder.prefix or not folder.pictures
            masks = folder.masks if kind == "mask" else {}
            second = folder.second_masks if kind == "mask" else {}
            for stem, name in [*masks.items(), *((stem_of(name), name) for name in folder.pictures)]:
                spelled, blob = printable_name(folder.prefix + stem), folder.blob(name)
                first = whole.by_stem.setdefault(spelled, blob)
                if first is not blob:
                    whole.second[blob] = first
                elif match := _NUMBERED.fullmatch(spelled):
                    whole.numbered.setdefault(match[1], {}).setdefault(int(match[2]), spelled)
            whole.names |= {folder.base + name: folder.prefix + name
                            for name in (*masks.values(), *folder.pictures, *second)}
            whole.second |= {folder.blob(name): folder.blob(first) for name, first in second.items()}
        return whole

    @property
    def name(self) -> str:
        """The directory's own name."""
        return printable_name(self.root.name or f"{self.kind}s")

    def find(self, *stems: str) -> Blob | None:
        """The file for a picture's name without extension: in the same subdirectory, else directly in the root; of
        references, only if none lie in subdirectories.

        A picture may have several names; the first that matches a file counts.
        """
        return next((self._use(stem) for stem in self._spelled(stems) if stem in self.by_stem), None)

    def find_all(self, *stems: str, others: Container[str] = ()) -> tuple[Blob, ...]:
        """The files for a picture's name, found as by `find`, in order: NAME, then NAME_0 (or NAME_0000), NAME_1 and so
        on, as far as these are not the stems of `others`, which are pictures, too."""
        found = next(filter(None, (self._numbered(stem, others) for stem in self._spelled(stems))), [])
        return tuple(map(self._use, found))

    def orphans(self) -> Iterator[Finding]:
        """A finding for each file that no picture used; its path is the root's own name and the path below it."""
        for file in sorted({blob.file for blob in self.by_stem.values()} - self.used):
            yield finding(self._label(file), f"orphan-{self.kind}", f"{self.kind} without a picture")
        for blob, first in self.second.items():
            if first.file in self.used:
                yield finding(self._label(blob.file), f"second-{self.kind}",
                              f"{printable_name(first.name)} is used instead")

    def _spelled(self, stems: Sequence[str]) -> list[str]:
        """The stems under which a picture's file may be, the nearest first."""
        names = [printable_name(stem) for stem in stems]  # as `prep mask` spells the names of its files
        return [*names, names[-1].rpartition("/")[2]] if self.kind == "mask" or self.flat else names

    def _numbered(self, stem: str, others: Container[str]) -> list[str]:
        """The stems of the files for a picture."""
        numbered = self.numbered.get(stem, {})
        names = takewhile(lambda name: name and name.rpartition("/")[2] not in others,
                          (numbered.get(number, "") for number in count(0 if 0 in numbered else 1)))
        return [*([stem] if stem in self.by_stem else []), *names]

    def _use(self, stem: str) -> Blob:
        self.used.add(self.by_stem[stem].file)
        return self.by_stem[stem]

    def _label(self, file: str) -> str:
        return f"{self.name}/{printable_name(self.names[file])}"


def references_of(folders: Sequence[Companions], *stems: str, others: Container[str]) -> tuple[tuple[Blob, ...], str]:
    """(the references of a picture from each of several directories, in order; which of them have none, or "")."""
    if not folders:
        return (), ""
    found = [folder.find_all(*stems, others=others) for folder in folders]
    bare = [folder.name for folder, inside in zip(folders, found, strict=True) if not inside]
    return tuple(chain.from_iterable(found)), f"no reference of its name in {join_names(bare, 8)}" if bare else ""
