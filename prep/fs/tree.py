"""Lists and digests small directory trees: the name of a shard is the digest of its sorted listing."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from prep.digest import digest_json, digest_parts
from prep.fs.untrusted import NotRegularFile, is_link, read_parts, require_kind

LEVELS = 2  # nested directories of a shard: its own, and that of an array
MOST_FILES = 1024  # of a shard; Latentry writes two per array, and one more


def listing_digest(listing: list[dict[str, Any]]) -> str:
    """The digest of a tree: SHA-256 of the canonical JSON of its files (path, size, sha256), sorted by path."""
    return digest_json(sorted(listing, key=lambda entry: str(entry["path"])))


def tree_digest(root: Path) -> str:
    """The digest of a directory on disk; reads every byte (1.3 to 1.8 GB/s if the CPU has SHA-NI).

    Raises `OSError`, and its subclass `NotRegularFile` for links, pipes and the like.
    """
    return listing_digest([{"path": name, "size": size, "sha256": file_digest(root / name)}
                           for name, size in tree(root)])


def file_digest(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    return digest_parts(read_parts(path))


def tree(root: Path) -> Iterator[tuple[str, int]]:
    """POSIX path and size of every file of a shard, unsorted.

    Raises `OSError`, and its subclass `NotRegularFile` for links and the like, and for more files or levels than a
    shard has.
    """
    require_kind(root, root.lstat(), directory=True)
    for number, file in enumerate(_below(str(root), "", LEVELS)):
        if number == MOST_FILES:
            raise NotRegularFile(root, f"has more than {MOST_FILES} files, expected a shard")
        yield file


def tree_bytes(root: Path) -> int:
    """The bytes of all files of a shard. Raises as `tree` does."""
    return sum(size for _, size in tree(root))


def _below(root: str, prefix: str, levels: int) -> Iterator[tuple[str, int]]:
    """Without a `Path` for every file: a start with a thousand shards takes half the time."""
    with os.scandir(root) as entries:
        for entry in entries:
            status = entry.stat(follow_symlinks=False)
            if stat.S_ISREG(status.st_mode) and not is_link(status):
                yield prefix + entry.name, status.st_size
                continue
            require_kind(Path(entry.path), status, directory=stat.S_ISDIR(status.st_mode))
            if levels == 1:
                raise NotRegularFile(Path(entry.path), "is a directory nested deeper than any in a shard")
            yield from _below(entry.path, f"{prefix}{entry.name}/", levels - 1)
