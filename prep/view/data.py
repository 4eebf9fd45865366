"""The data set that pages show: a manifest's, or that of a source that is not encoded yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from prep.batching.split import ROLES
from prep.formatting import format_bytes, shell_name
from prep.fs.place import Place
from prep.geometry import BucketShape
from prep.manifest.describe import Keys, describe
from prep.manifest.opened import OpenedManifest
from prep.manifest.select import Selector
from prep.pages.facts import manifest_facts
from prep.pages.parts import plural


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set for the pages; samples are numbered as in `selector.samples`."""

    kind: str  # above the title: Manifest, Source
    name: str
    selector: Selector
    shapes: Sequence[BucketShape]  # of the buckets
    sources: Sequence[Place | None]
    roles: Mapping[str, int]  # samples of each role
    crowds: Sequence[int]  # samples in each bucket
    rejected: int
    facts: Sequence[tuple[str, str]]
    describe: Callable[[int], dict[str, Any]]  # a sample as a document
    notes: Sequence[str] = ()  # above the list
    next: str = ""  # the command that comes next
    paired: bool = False  # whether the reference of each sample is the other picture of its pair


class Shows(Protocol):
    """Pictures of samples and their references by number: JPEG or PNG, `None` for what is missing or cannot be decoded.
    """

    def thumbnail(self, sample: int, reference: int | None = None) -> bytes | None: ...
    def whole(self, sample: int, reference: int | None = None) -> bytes | None: ...
    def view(self, sample: int, view: int) -> bytes | None: ...
    def mask(self, sample: int, view: int, *, shade: bool) -> bytes | None: ...
    def close(self) -> None: ...


def data_of(opened: OpenedManifest) -> Data:
    """The data of a manifest. Raises `CacheError` if a table is missing or damaged."""
    manifest, document = opened.manifest, opened.manifest.document
    selector = Selector(opened)
    selector.prepare()
    _ = selector.codes  # a damaged table of findings is an error before the first page
    return Data(kind="Manifest", name=manifest.path.name, selector=selector, shapes=manifest.shapes,
                sources=manifest.sources, roles=document["samples"], rejected=document["rejected"],
                crowds=[sum(bucket[role] for role in ROLES) for bucket in document["buckets"]],
                facts=[*manifest_facts(opened), *_fields(opened)],
                describe=lambda number: describe(opened, number, Keys(opened)), paired=manifest.paired,
                next=f"train run {shell_name(str(manifest.path.absolute()))}")


def _fields(opened: OpenedManifest) -> list[tuple[str, str]]:
    """The rows of each field."""
    return [(name, f"{plural(field.rows, 'row')} in {plural(field.shards, 'shard')}, {format_bytes(field.bytes)}: "
             + ", ".join(f"{array} {facts['dtype']}" for array, facts in field.arrays.items()))
            for name, field in opened.manifest.fields.items()]
