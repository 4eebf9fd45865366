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

from prep.cache.door import entries
from prep.cache.store import SUFFIX, Cache
from prep.parse import Unparsed, digest_of

REST_NS = 2_000_000_000
STAMP_BYTES = 32
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


def ctime_is_change() -> bool:
    """Whether ctime is the time of the last change here, and not that of creation: then a file could be replaced by
    one with the same stamp, and only what is named by its content may be trusted by stamp."""
    return os.name != "nt"


def file_stamp(path: Path) -> Stamp:
    """The stamp of a plain file. Raises `OSError`."""
    return _of_file(path.lstat())


def tree_stamp(root: str) -> Stamp | None:
    """The stamp of a shard's directory; None when there is anything but plain files and directories in it.

    Raises `OSError`. (40 µs for a shard of one array.)
    """
    if not stat.S_ISDIR(os.lstat(root).st_mode):
        return None
    parts, total, newest, folders = [], 0, 0, [root]
    for folder in folders:  # grows: first in, first out
        with os.scandir(folder) as found:
            for entry in sorted(found, key=_name):
                if entry.is_file(follow_symlinks=False):
                    status = entry.stat(follow_symlinks=False)
                    size, mtime, ctime = status.st_size, status.st_mtime_ns, status.st_ctime_ns
                    parts.append(f"{entry.name}\0{status.st_ino} {size} {mtime} {ctime}\0")
                    total += size
                    newest = max(newest, mtime, ctime)
                elif entry.is_dir(follow_symlinks=False):
                    parts.append(entry.name + "\0\0")
                    folders.append(entry.path)
                else:
                    return None
        parts.append("\0\0\0")
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
