"""Has each reference of a scan examined once, and reports what is found under the pictures that have it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from prep.findings import Finding, finding
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.scan.duplicates.copies import ScannedPicture
from prep.sources.item import Item

_Place = tuple[str, int]  # the file of a reference, and its offset there


@dataclass(kw_only=True, slots=True)
class ReferencePairs:
    """The references of a scan's pictures, and what was found in them."""

    pictures: dict[_Place, list[tuple[str, str]]] = field(default_factory=dict)  # (label, reference's name)
    found: dict[_Place, tuple[Finding, ...]] = field(default_factory=dict)
    lacking: list[Finding] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)  # of the pictures that have, or lack, a reference

    def apart(self, items: Iterable[Item | Finding]) -> Iterator[Item | Finding]:
        """The items without their references, and after the first item that has it, each reference as an item."""
        for item in items:
            if isinstance(item, Finding) or not (item.references or item.unreferenced):
                yield item
                continue
            self.labels.add(item.label)
            if item.unreferenced:
                self.lacking.append(finding(item.label, "missing-reference", item.unreferenced))
            yield replace(item, references=(), unreferenced="")
            for blob in item.references:
                known = _place(blob) in self.pictures
                self.pictures.setdefault(_place(blob), []).append((item.label, item.name_of(blob)))
                if not known:
                    name = printable_name(f"{blob.file}/{blob.member}" if blob.member else blob.file)
                    yield Item(name=name, label=name, source=0, picture=blob, caption_at=None, mask=None,
                               is_reference=True)

    def note(self, reference: Item, findings: tuple[Finding, ...]) -> None:
        """Keeps what was found in a reference that `apart` made an item of."""
        if findings:
            self.found[_place(reference.picture)] = findings

    def findings(self) -> Iterator[Finding]:
        """What was found in references, and which are missing, under the names of the pictures that have them."""
        yield from self.lacking
        for place, findings in self.found.items():
            for label, name in self.pictures[place]:
                for said in findings:
                    yield replace(said, path=label, detail=f"its reference {name}: {said.detail}")

    def joins(self, first: ScannedPicture, second: ScannedPicture) -> bool:
        """Whether one of two pictures is a reference of the other: they may be alike."""
        return any(label == picture.name for other, picture in ((first, second), (second, first))
                   for label, _ in self.pictures.get(_place(other.picture), ()))


def _place(blob: Blob) -> _Place:
    return blob.file, blob.offset


def count_items(items: Iterable[Item | Finding]) -> int:
    """The number of items and of their references."""
    return sum(isinstance(item, Item) for item in ReferencePairs().apart(items))
