"""Sources for tests, walked in this process: no worker is started for a table or a tar."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prep.findings import Finding
from prep.fs.blob import Blob, blob_at
from prep.sources import directory, tars
from prep.sources.item import Item
from prep.sources.readers import SERVICE
from prep.sources.tables import Tables
from prep.sources.tar_index import TarContents
from prep.sources.tars import Tar
from prep.workers.pool import WorkerPool

HERE = WorkerPool(SERVICE, processes=False)


def walk(root: Path, **options: Any) -> Iterator[Item | Finding]:
    """The items and findings of a directory."""
    return directory.walk(root, workers=HERE, **options)


def walk_tar(path: Path, *, label: str = "", source: int = 0, sidecar: bool = True,
             **options: Any) -> Iterator[Item | Finding]:
    """The items and findings of a tar, which is called `label` (default: its name)."""
    tar = Tar(whole=blob_at(path), label=label or path.name, source=source)
    return tars.walk_tar(tar, sidecar=sidecar, workers=HERE, **options)


def contents_of(path: Path) -> TarContents:
    """What a tar holds."""
    return tars.contents_of(blob_at(path), HERE)


def tables_of(root: Path) -> Tables:
    """No tables yet, of a source at `root`."""
    return Tables(root=root, workers=HERE)


def item_of(path: Path | str, **others: Any) -> Item:
    """The item of a picture, which is named and labelled like its file, with no caption and no mask."""
    given = {"name": Path(path).name, "source": 0, "caption_at": others.pop("caption", None), "mask": None, **others}
    return Item(**{"label": given["name"], "picture": Blob(file=str(path)), **given})
