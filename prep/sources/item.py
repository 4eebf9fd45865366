"""The record that every source yields: a picture with its caption, mask and references."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Literal

from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.fs.place import Place

MaskFrom = Literal["auto", "none", "sidecar", "alpha"] | Place  # auto: sidecars, if there are any


@dataclass(frozen=True, kw_only=True, slots=True)
class Item:
    """One picture with its caption, mask and references, as a source yields it; nothing is decoded yet."""

    name: str  # POSIX path below the source's root; unique within its source
    label: str  # its name in findings, unique in its recipe: begins with its source's if that has several
    source: int  # index into the recipe's sources
    picture: Blob
    caption_at: Blob | str | None  # str: a file like the picture's with this extension; a million take 190 MB less
    mask: Blob | None
    caption_format: Literal["text", "json"] = "text"
    captions: tuple[str, ...] = ()  # from a table, if there is no caption file
    uncaptioned: str = ""  # why tables have no caption of it; "" if none was read
    metadata: Blob | None = None  # a JSON file beside its caption: a scan checks it, nothing uses it
    references: tuple[Blob, ...] = ()  # pictures that are conditions of this one, in order
    unreferenced: str = ""  # which reference is missing, of those that its recipe asks for; "" if none is
    is_reference: bool = False  # whether it is a reference of others, which a scan examines on its own

    @property
    def caption(self) -> Blob | None:
        """The file of its caption."""
        if isinstance(self.caption_at, str):
            return Blob(file=self.picture.file.rpartition(".")[0] + self.caption_at)
        return self.caption_at

    @property
    def blobs(self) -> tuple[Blob, ...]:
        """The item's files."""
        return tuple(blob for blob in (self.picture, self.caption, self.mask, self.metadata, *self.references)
                     if blob is not None)

    def name_of(self, reference: Blob) -> str:
        """The name of a reference in messages: its path, without the directories that the picture is in, too."""
        parts = reference.file.split("/")
        shared = [mine for mine, _ in takewhile(lambda pair: pair[0] == pair[1],
                                                zip(self.picture.file.split("/")[:-1], parts[:-1], strict=False))]
        return printable_name(reference.member or "/".join(parts[len(shared):] if any(shared) else parts))

    def with_blobs(self, replacements: Mapping[Blob, Blob]) -> Item:
        """The item with other blobs in place of some of its own."""
        caption, mask, metadata = (None if blob is None else replacements.get(blob, blob)
                                   for blob in (self.caption, self.mask, self.metadata))
        return replace(self, picture=replacements.get(self.picture, self.picture), caption_at=caption, mask=mask,
                       metadata=metadata,
                       references=tuple(replacements.get(blob, blob) for blob in self.references))
