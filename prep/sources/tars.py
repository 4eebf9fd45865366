"""Lists WebDataset tars as items: members that share a key are one sample, read in place and never unpacked.

A key is a member's path up to the first dot of its name; the rest determines its kind: a picture's extension, `txt`,
`caption` or `json`, `mask.png` or (key`-masklabel`) `png`, and for references `ref0.png`, `ref1.jpg` … or `source.jpg`.
A worker lists the members (`prep.sources.tar_members`); `webdataset` only groups that list and opens nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prep.errors import PathError
from prep.findings import Finding, Severity
from prep.formatting import printable_name
from prep.fs.blob import Blob
from prep.fs.remote.bucket import is_object
from prep.runtime import defer_interrupts
from prep.sources.item import Item
from prep.sources.readers import lost_detail, read_tar
from prep.sources.tar_index import Listings, Said, TarContents, TarMember
from prep.sources.tree import MASK, PICTURES
from prep.workers.pool import WorkerLost, WorkerPool

CAPTIONS = ("txt", "caption", "json")  # the first found counts
MASKS = ("mask.png", "masklabel.png")
_REFERENCE = re.compile(r"(?:ref(?:erence)?_?(\d{1,3})|source)\.(\w+)")  # NAME.ref0.png, NAME.source.jpg
_PICTURES = tuple(extension[1:] for extension in PICTURES)
_NOT_READ = f"not a picture: after the first dot of its name, expected one of {' '.join(_PICTURES)}"
_SAID = {"duplicate-key": "warning", "special-file": "warning", "unsupported-format": "info",
         "empty-archive": "warning", "archive-unended": "warning"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Tar:
    """A tar of a source, and how to name its items."""

    whole: Blob  # of one in a store, with its version
    label: str  # prefix of the names of its members
    source: int  # index into the recipe's sources
    prefix: str = ""  # prefix of the labels of its items


def walk_tar(tar: Tar, *, sidecar: bool, workers: WorkerPool,
             listings: Listings | None = None) -> Iterator[Item | Finding]:
    """The items of a tar, named `label`/member, and its findings; `sidecar`: use masks beside pictures.

    A tar that `listings` knows is not opened. Raises `PathError` if the tar is not a file.
    """
    contents = (contents_of(tar.whole, workers) if listings is None else
                listings.of(tar.whole, lambda: contents_of(tar.whole, workers)))
    for finding in contents.said:
        severity: Severity = _SAID.get(finding.code, "error")  # type: ignore[assignment]
        where = f"{tar.label}/{printable_name(finding.name)}" if finding.name else tar.label
        yield Finding(path=where, code=finding.code, severity=severity, detail=finding.detail or _NOT_READ)
    groups = contents.groups
    for key, parts in groups.items():
        masks = groups.get(f"{key}{MASK}", {})
        yield from _sample(tar, key, parts, masks if sidecar else {}, groups)


def contents_of(tar: Blob, workers: WorkerPool) -> TarContents:
    """The contents of a tar; looks at headers only. Raises `PathError`, `StoreError`."""
    path = tar.path
    if not is_object(tar.file) and not path.is_file():
        raise PathError(f"source {path} is not a file" if path.exists() else f"source {path} does not exist")
    try:
        entries = read_tar(workers, tar)
    except WorkerLost as lost:
        return TarContents(groups={}, said=(Said(name="", code="bad-archive", detail=lost_detail(lost)),))
    said = [entry for entry in entries if isinstance(entry, Said)]
    groups: dict[str, dict[str, TarMember]] = {}
    for key, parts in _groups([entry for entry in entries if isinstance(entry, TarMember)]):
        if key in groups:
            names = ", ".join(printable_name(member.name) for member in parts.values())
            says = f"this key is repeated later in the tar, with {names}; the first is used"
            said.append(Said(name=key, code="duplicate-key", detail=says))
        else:
            groups[key] = parts
    return TarContents(groups=groups, said=tuple(said))


def _groups(members: Iterable[TarMember]) -> Iterator[tuple[str, dict[str, TarMember]]]:
    """Consecutive members of one key, by lower-case suffix; a repeated suffix begins another group."""
    if not members:
        return
    with defer_interrupts():
        from webdataset.tariterators import base_plus_ext, group_by_keys  # here: it loads torch

    def spaced() -> Iterator[dict[str, Any]]:
        current, taken = None, set[str]()
        for member in members:
            key, suffix = base_plus_ext(member.name)
            if key != current:
                current, taken = key, set()
            elif suffix.lower() in taken:
                taken = set()
                yield {}  # ends the group
            taken.add((suffix or "").lower())
            yield {"fname": member.name, "data": member, "__url__": ""}

    for sample in group_by_keys(spaced()):
        parts = {suffix: value for suffix, value in sample.items() if isinstance(value, TarMember)}
        yield str(sample["__key__"]), parts


def _sample(tar: Tar, key: str, parts: Mapping[str, TarMember], masks: Mapping[str, TarMember],
            groups: Mapping[str, Mapping[str, TarMember]]) -> Iterator[Item | Finding]:
    """The items of one key, one for each picture in it, and findings on the key."""
    pictures = [suffix for suffix in parts if suffix in _PICTURES]
    if key.endswith(MASK) and key.removesuffix(MASK) in groups:
        return
    caption = next((suffix for suffix in CAPTIONS if suffix in parts), None)
    beside = [parts[suffix] for suffix in MASKS if suffix in parts] + ([masks["png"]] if "png" in masks else [])
    mask = beside[0] if beside else None
    metadata = parts["json"] if caption != "json" and "json" in parts else None
    references = tuple(_blob(tar, parts[suffix]) for suffix in sorted(filter(_is_reference, parts), key=_order))
    for suffix in pictures:
        name = _name(tar, parts[suffix])
        yield Item(name=name, label=tar.prefix + name, source=tar.source, picture=_blob(tar, parts[suffix]),
                   caption_at=None if caption is None else _blob(tar, parts[caption]),
                   caption_format="json" if caption == "json" else "text",
                   mask=None if mask is None else _blob(tar, mask), references=references,
                   metadata=None if metadata is None or suffix != pictures[0] else _blob(tar, metadata))
    if pictures and "txt" in parts and "caption" in parts:
        yield Finding(path=_name(tar, parts["caption"]), code="second-caption", severity="info",
                      detail=f"{printable_name(parts['txt'].name)} is used instead")
    for other in beside[1:] if pictures else ():
        yield Finding(path=_name(tar, other), code="second-mask", severity="warning",
                      detail=f"{printable_name(beside[0].name)} is used instead")
    first = _name(tar, next(iter(parts.values())))
    if len(pictures) > 1:
        yield Finding(path=first, code="stem-collision", severity="warning",
                      detail=f"{len(pictures)} pictures of this key share its caption and mask")
    elif not pictures and caption is not None:
        yield Finding(path=first, code="orphan-caption", severity="warning", detail="caption without a picture")
    elif not pictures:
        yield Finding(path=first, code="unsupported-format", severity="info", detail=_NOT_READ)


def _is_reference(suffix: str) -> bool:
    found = _REFERENCE.fullmatch(suffix)
    return found is not None and found[2] in _PICTURES


def _order(suffix: str) -> int:
    """The number in the suffix of a reference; -1 of one without."""
    found = _REFERENCE.fullmatch(suffix)
    return -1 if found is None or found[1] is None else int(found[1])


def _name(tar: Tar, member: TarMember) -> str:
    return f"{tar.label}/{printable_name(member.name)}"


def _blob(tar: Tar, member: TarMember) -> Blob:
    return Blob(file=tar.whole.file, offset=member.offset, length=member.size, member=printable_name(member.name),
                version=tar.whole.version)
