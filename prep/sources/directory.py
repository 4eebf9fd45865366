"""Lists a directory of pictures as items, each with its caption, mask and references; findings name what
matches nothing.

Recursive, in the order of names, one directory in memory at a time. A caption is `NAME.txt`, else `NAME.caption`, else
`NAME.json`, else a row of a table (`prep.sources.tables`); a mask is `NAME-masklabel.png` beside its picture (as in
OneTrainer), or has the picture's stem in a directory of masks (as in kohya), or is named by the table. Its
references have its stem in directories of their own. Hidden files, side files of operating systems and latent caches
are skipped.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from prep.findings import Finding
from prep.formatting import counted, printable_name
from prep.fs.blob import Blob, blob_at
from prep.fs.place import Place
from prep.sources.companions import Companions, references_of
from prep.sources.folders import folders_of
from prep.sources.item import Item, MaskFrom
from prep.sources.tables import Tables
from prep.sources.tree import Directory, stem_of
from prep.workers.pool import WorkerPool

_SOURCE = ".source"  # at the end of a stem: of what the picture was edited from
_PROSE = ("readme", "license", "licence", "notice", "credits", "prompts", "sample_prompts")  # not captions


def walk(root: Place, *, source: int, mask_from: MaskFrom | Companions, workers: WorkerPool,
         references: Sequence[Companions] | None = None, table: Place | None = None, prefix: str = ""
         ) -> Iterator[Item | Finding]:
    """Yields the items below `root`, and findings. Labels of items begin with `prefix`.

    `workers` read the tables found there, and `table`. Raises `PathError` for a bad root.

    `mask_from`: `sidecar` looks beside the pictures, `none` and `alpha` look nowhere, a path looks in that directory;
    so does `Companions`, which several sources may share, as they do `references`: the caller yields their orphans
    after walking all of them. `references` of `None`: those that tables name, or that lie beside each picture of a
    directory as `NAME.source.jpg`.
    """
    folders = folders_of(root)
    own = Companions.read(mask_from, "mask") if not isinstance(mask_from, str | Companions) else None
    masks = mask_from if isinstance(mask_from, Companions) else own
    unused, tables = 0, Tables(root=root, workers=workers)
    if table is not None:
        tables.add(blob_at(table), "", table.name)
    for folder in folders:
        for name in folder.tables:
            tables.add(folder.blob(name), folder.prefix, printable_name(folder.prefix + name))
        yield from _pair(folder, source, prefix, masks, references, tables, sidecar=mask_from == "sidecar")
        unused += len(folder.masks) if mask_from == "none" else 0
    yield from tables.findings
    yield from tables.leftovers()
    if own is not None:
        yield from own.orphans()
    yield from unused_masks(unused)


def unused_masks(count: int) -> Iterator[Finding]:
    """Yields the finding on masks in a source that its recipe does not use, if there are any."""
    if count:
        yield Finding(path=".", code="masks-unused", severity="info",
                      detail=f"{counted(count, 'mask')} beside the pictures {'is' if count == 1 else 'are'} not used; "
                             f"--mask sidecar uses {'it' if count == 1 else 'them'}")


# ---- names to items --------------------------------------------------------------------------------------------------


def _pair(folder: Directory, source: int, prefix: str, masks: Companions | None,
          references: Sequence[Companions] | None, tables: Tables, *, sidecar: bool) -> Iterator[Item | Finding]:
    """Yields the items of one directory, then its findings, also on captions and masks without a picture."""
    stems: dict[str, list[str]] = {}
    pictures, beside = _samples(folder, tables)
    for name in pictures:
        stems.setdefault(stem_of(name), []).append(name)
    for name in pictures:
        stem = stem_of(name)
        mask = folder.blob(folder.masks[stem]) if sidecar and stem in folder.masks else None
        if masks is not None:
            mask = masks.find(folder.prefix + stem)
        captions = folder.captions.get(stem, [])
        first = stems[stem][0] == name  # JSON beside the caption is checked once per stem
        row = tables.find(folder.prefix + name, captioned=bool(captions))
        if row is not None and sidecar and mask is not None and row.mask not in (None, mask):
            folder.say(name, "second-mask", "warning", f"{printable_name(mask.name)} is used instead of the mask in "
                       f"{row.where} of {row.table}")
        elif row is not None and sidecar:
            mask = row.mask or mask
        own = (folder.blob(beside[stem]),) if stem in beside else row.references if row is not None else ()
        conditions, unreferenced = ((own, "") if references is None else
                                    references_of(references, folder.prefix + stem, others=stems))
        called = printable_name(folder.prefix + name)
        yield Item(name=called, label=prefix + called, source=source, picture=folder.blob(name),
                   caption_at=_beside(folder, name, captions[0]) if captions else None,
                   caption_format="json" if captions and captions[0].lower().endswith(".json") else "text",
                   captions=row.captions if row is not None and not captions else (),
                   uncaptioned="" if captions else tables.why_none(folder.prefix + name),
                   metadata=folder.blob(unused) if first and (unused := _json_of(captions[1:])) else None,
                   mask=mask, references=conditions, unreferenced=unreferenced)
        if len(stems[stem]) > 1:
            others = ", ".join(printable_name(other) for other in stems[stem] if other != name)
            folder.say(name, "stem-collision", "warning", f"shares its caption and mask with {others}")
    _leftovers(folder, set(stems), sidecar=sidecar)
    yield from folder.findings


def _samples(folder: Directory, tables: Tables) -> tuple[list[str], dict[str, str]]:
    """The pictures of a directory that are samples, and those called `NAME.source.jpg`, by stem of their picture.

    The latter are references only if each picture has one, since these may be the pictures' own names.
    """
    beside: dict[str, str] = {}
    if any(f"{_SOURCE}." in name for name in folder.pictures):
        stems = {stem_of(name): name for name in folder.pictures}
        found = {stem.removesuffix(_SOURCE): name for stem, name in stems.items() if stem.endswith(_SOURCE)}
        beside = found if found.keys() == {stem for stem in stems if not stem.endswith(_SOURCE)} else {}
    if not beside and not tables.referred:
        return folder.pictures, beside
    sources = set(beside.values())
    return [name for name in folder.pictures if name not in sources and (
        stem_of(name) in folder.captions or not tables.only_refers_to(folder.prefix + name))], beside


def _beside(folder: Directory, picture: str, caption: str) -> Blob | str:
    """Where the caption of a picture is, as short as an item may have it."""
    ending = caption.removeprefix(picture.rpartition(".")[0])
    return folder.blob(caption) if folder.versions or not ending.startswith(".") else sys.intern(ending)


def _json_of(names: list[str]) -> str | None:
    """The first of these names with the extension .json."""
    return next((name for name in names if name.lower().endswith(".json")), None) if names else None


def _leftovers(folder: Directory, stems: set[str], *, sidecar: bool) -> None:
    for stem, files in sorted(folder.captions.items()):
        names = [file for file in files if not file.lower().endswith(".json")]  # a .json file may be anything
        if not names:
            continue
        if stem in stems:
            for name in names[1:]:
                folder.say(name, "second-caption", "info", f"{printable_name(names[0])} is used instead")
        elif stem not in folder.foreign and not stem.casefold().startswith(_PROSE):
            folder.say(names[0], "orphan-caption", "warning", "caption without a picture")
    for name, first in folder.second_masks.items() if sidecar else ():
        folder.say(name, "second-mask", "warning", f"{printable_name(first)} is used instead")
    for stem, name in sorted(folder.masks.items()):
        if sidecar and stem not in stems and stem not in folder.foreign:
            folder.say(name, "orphan-mask", "warning", "mask without a picture")
