"""Has anything changed since it was read? Answered by names, sizes, times and inodes, without opening a file.

A stamp is worth remembering only when everything in it was at rest for two seconds as it was read: a file system's
clock is that coarse at worst, and a file written twice within one tick would look unchanged.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prep.cache.store import SUFFIX, Cache
from prep.fs.untrusted import MOST_FILES, entries
from prep.parse import Unparsed, digest_of
from prep.rest import REST_NS

STAMP_BYTES = 32
Tree = tuple[str, ...]  # paths in a shard with a slash before them, and one behind those of directories
_ENTRY = struct.Struct("<4Q")


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a file, or the files of a shard, look like from outside."""

    digest: bytes  # of names, sizes, times, inodes
    bytes: int  # of all files
    newest: int  # of all times, ns

    def at_rest(self) -> bool:
        """Whether nothing in it changed just now."""
        return time.time_ns() - self.newest > REST_NS


def file_stamp(path: Path) -> Stamp:
    """The stamp of a plain file. Raises `OSError`."""
    return _of_file(path.lstat())


def list_tree(root: str) -> Tree | None:
    """What is in a shard's directory; None when that is more than plain files and directories, or than a shard has.

    Raises `OSError`.
    """
    if not stat.S_ISDIR(os.lstat(root).st_mode):
        return None
    found = ["/"]
    for folder in found:  # grows: first in, first out
        if folder.endswith("/"):
            with os.scandir(root + folder) as inner:
                for entry in sorted(inner, key=_name):
                    plain = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
                    if not plain or len(found) > MOST_FILES:
                        return None
                    found.append(f"{folder}{entry.name}{'/' if entry.is_dir(follow_symlinks=False) else ''}")
    return tuple(found)


def tree_stamp(root: str, tree: Tree) -> Stamp:
    """The stamp of what was listed in a shard's directory; one more file there shows in its directory's times.

    Raises `OSError` when one is missing or became something else. (23 µs for a shard of one array; listing it again
    would take 40.)
    """
    parts, total, newest = [], 0, 0
    for name in tree:
        status = os.lstat(root + name)
        size, mtime, ctime = status.st_size, status.st_mtime_ns, status.st_ctime_ns
        newest = max(newest, mtime, ctime)
        parts.append(f"{name}\0{status.st_mode} {status.st_ino} {size} {mtime} {ctime}\0")
        if not name.endswith("/"):
            total += size
    return Stamp(hashlib.sha256(os.fsencode("".join(parts))).digest(), total, newest)


def commit_stamps(cache: Cache) -> Iterator[tuple[str, Stamp | None]]:
    """The tasks that have a commit, sorted, each with its stamp; None when that is no plain file."""
    suffix = SUFFIX["commits"]
    for fan in entries(cache.root / "commits"):
        for entry in entries(Path(fan.path)) if fan.is_dir(follow_symlinks=False) else ():
            try:
                task = digest_of(entry.name.removesuffix(suffix), "commits")
                if entry.name.startswith(fan.name) and entry.name.endswith(suffix):
                    plain = entry.is_file(follow_symlinks=False)
                    yield task, _of_file(entry.stat(follow_symlinks=False)) if plain else None
            except (Unparsed, FileNotFoundError):  # not ours; or gone meanwhile
                continue


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _of_file(status: os.stat_result) -> Stamp:
    return Stamp(_packed(status), status.st_size, max(status.st_mtime_ns, status.st_ctime_ns))


def _packed(status: os.stat_result) -> bytes:
    word = (1 << 64) - 1  # times before 1970 are negative
    return _ENTRY.pack(status.st_ino & word, status.st_size, status.st_mtime_ns & word, status.st_ctime_ns & word)
