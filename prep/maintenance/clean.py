"""Removes what is remembered about the user's files: the files of all memories, and those of earlier versions."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.errors import PathError
from prep.formatting import format_bytes
from prep.fs.atomic import remove_tree
from prep.fs.memo import memory_files, memory_folder
from prep.fs.remote.copies import EARLIER, mirror
from prep.fs.user_cache import user_cache, why_not_private

KINDS = {"files": "digests, sizes and captions of files", "scan": "results of scans", "tars": "listings of tars",
         "captions": "what models said about pictures", "texts": "embeddings of captions",
         "earlier": "files of earlier versions"}
_EARLIER = re.compile(r"scan\.sqlite(-journal)?")  # in the user's cache directory; the next pattern is for tars/ there
_EARLIER_TAR = re.compile(r"[0-9a-f]{32}|\.[0-9a-f]{16}\.partial")


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanReport:
    """What `prep clean` found, and removed unless it was a dry run."""

    folder: Path
    files: dict[str, int]  # by kind
    sizes: dict[str, int]  # bytes, by kind
    dry_run: bool

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        removed = {kind: {"files": self.files[kind], "bytes": self.sizes[kind]} for kind in self.files}
        return {"format": "latentry/clean", "version": 1, "dry_run": self.dry_run, "folder": str(self.folder),
                "removed": removed, "bytes": sum(self.sizes.values())}

    def as_text(self) -> str:
        """The report as a few lines of text."""
        if not self.files:
            return f"nothing is remembered in {self.folder}"
        verb = "would remove" if self.dry_run else "removed"
        lines = [f"{verb} {KINDS.get(kind, kind)}: {_count(count)}, {format_bytes(self.sizes[kind])}"
                 for kind, count in sorted(self.files.items())]
        freed = f"{format_bytes(sum(self.sizes.values()))} {'would be ' * self.dry_run}freed in {self.folder}"
        return "\n".join([*lines, f"{freed}; no picture, cache or manifest is touched"])


def clean(*, dry_run: bool) -> CleanReport:
    """Removes everything that is remembered. Raises `PathError` without a home directory, or if a file stays."""
    root, folder = user_cache(), memory_folder()
    if root is None or folder is None:
        raise PathError("there is no home directory, so nothing is remembered",
                        hint="set LATENTRY_USER_CACHE to a directory")
    files: dict[str, int] = {}
    sizes: dict[str, int] = {}
    failed: list[OSError] = []
    for kind, path, size in [*_remembered(folder), *_earlier(root)]:
        try:
            if not dry_run:
                path.unlink()
        except OSError as error:
            failed.append(error)
            continue
        files[kind] = files.get(kind, 0) + 1
        sizes[kind] = sizes.get(kind, 0) + size
    for folder in () if dry_run or failed else _earlier_trees():
        remove_tree(folder)  # which has empty directories now
    if failed:
        first, others = failed[0], len(failed) - 1
        raise PathError(f"{first.filename} cannot be removed ({first.strerror}), nor can {others} others",
                        hint=f"check the permissions of {root}, and remove them by hand")
    return CleanReport(folder=root, files=files, sizes=sizes, dry_run=dry_run)


def _remembered(folder: Path) -> Iterator[tuple[str, Path, int]]:
    """(kind, path, bytes) of each memory. Raises `PathError` if the directory is not private, and so never used."""
    try:
        why = why_not_private(folder)
    except FileNotFoundError:
        return
    if why:
        raise PathError(f"{folder} is not used, so nothing is remembered: {why}",
                        hint="check its contents, then remove it; the next run makes it again with access for you only")
    yield from memory_files(folder)


def _earlier(root: Path) -> Iterator[tuple[str, Path, int]]:
    """(kind, path, bytes) of each file of earlier versions; only from directories that nobody else can write to."""
    for top in _earlier_trees():
        for inside, _, names in os.walk(top):
            for path in (Path(inside, name) for name in names):
                status = path.lstat()
                taken = getattr(status, "st_blocks", status.st_size) * 512  # less than its size: rows were holes
                yield "earlier", path, min(status.st_size, taken)
    for folder, pattern in ((root, _EARLIER), (root / "tars", _EARLIER_TAR)):
        with suppress(FileNotFoundError):
            if why_not_private(folder):
                return
            with os.scandir(folder) as entries:
                for entry in sorted(entries, key=lambda item: item.name):
                    status = entry.stat(follow_symlinks=False)
                    if pattern.fullmatch(entry.name) and stat.S_ISREG(status.st_mode):
                        yield "earlier", Path(entry.path), status.st_size


def _earlier_trees() -> list[Path]:
    """Directories of earlier versions beside the copies of what is in stores."""
    with suppress(FileNotFoundError):
        if not why_not_private(mirror()):
            return [folder for kind in EARLIER if (folder := mirror() / kind).is_dir()]
    return []


def _count(number: int) -> str:
    return "1 file" if number == 1 else f"{number} files"
