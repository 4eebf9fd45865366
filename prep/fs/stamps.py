"""Stamps of files and shards: names, sizes, times and inodes show whether anything changed, without opening a file.

A stamp is worth remembering only if nothing in it changed for two seconds before it was taken: file systems have clocks
as coarse as that, and a file written twice within one tick would look unchanged.
"""

from __future__ import annotations

import hashlib
import os
import stat
import struct
import time
from dataclasses import dataclass, replace
from pathlib import Path

from prep.fs.blob import Blob
from prep.fs.remote.bucket import identity_of, is_object
from prep.fs.remote.objects import size_in, version_of
from prep.fs.tree import MOST_FILES

STAMP = struct.Struct("<QQqqq")  # device, inode, size, mtime, ctime in ns
SETTLE_NS = 2_000_000_000

Tree = tuple[str, ...]  # paths in a shard, with a leading slash, and for directories a trailing one
_ENTRY = struct.Struct("<4Q")


@dataclass(frozen=True, slots=True)
class Stamp:
    """The metadata of a file, or of the files of a shard."""

    digest: bytes  # of names, sizes, times, inodes
    bytes: int  # of all files
    newest: int  # the latest of all times, ns

    def at_rest(self) -> bool:
        """Whether nothing changed in the last two seconds."""
        return time.time_ns() - self.newest > SETTLE_NS


def path_stamp(path: Path) -> Stamp:
    """The stamp of a plain file. Raises `OSError`."""
    return _of_file(path.lstat())


def list_tree(root: str) -> Tree | None:
    """The contents of a shard's directory; None if it holds anything but regular files and directories, or too many.

    Raises `OSError`.
    """
    if not stat.S_ISDIR(os.lstat(root).st_mode):
        return None
    names = ["/"]
    for folder in names:  # grows: first in, first out
        if folder.endswith("/"):
            with os.scandir(root + folder) as inner:
                for entry in sorted(inner, key=_name):
                    plain = entry.is_file(follow_symlinks=False) or entry.is_dir(follow_symlinks=False)
                    if not plain or len(names) > MOST_FILES:
                        return None
                    names.append(f"{folder}{entry.name}{'/' if entry.is_dir(follow_symlinks=False) else ''}")
    return tuple(names)


def tree_stamp(root: str, tree: Tree) -> Stamp:
    """The stamp of what was listed in a shard's directory; an added file changes the times of its directory.

    Raises `OSError` if an entry is missing. (23 µs for a shard of one array; listing it again would take 40.)
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


def _name(entry: os.DirEntry[str]) -> str:
    return entry.name


def _of_file(status: os.stat_result) -> Stamp:
    return Stamp(_packed(status), status.st_size, max(status.st_mtime_ns, status.st_ctime_ns))


def _packed(status: os.stat_result) -> bytes:
    word = (1 << 64) - 1  # times before 1970 are negative
    return _ENTRY.pack(status.st_ino & word, status.st_size, status.st_mtime_ns & word, status.st_ctime_ns & word)


def blob_stamp(blob: Blob) -> tuple[bytes, int]:
    """The stamp of the blob's file and range, and the time of the file's last change (ns).

    An object has no such time (0) if its store names its contents by an ETag: any other bytes have another one.
    """
    if is_object(blob.file):
        return _object_stamp(blob)
    stat = os.stat(blob.file)  # noqa: PTH116  (a Path of each file would take twice the time)
    whole = stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
    try:
        stamp = STAMP.pack(*whole)
    except struct.error:  # inodes of 128 bits, times after 2262
        stamp = hashlib.sha256(repr(whole).encode()).digest()
    return stamp + _range_of(blob), max(stat.st_mtime_ns, stat.st_ctime_ns)


def sized_stamp(blob: Blob) -> tuple[bytes, int, int]:
    """As `blob_stamp`, and the size of the whole file or object. Raises `OSError`, `StoreError`."""
    if is_object(blob.file):
        blob = replace(blob, version=blob.version or version_of(blob.file))
        return *blob_stamp(blob), size_in(blob.version)
    return *blob_stamp(blob), blob.path.stat().st_size


def _object_stamp(blob: Blob) -> tuple[bytes, int]:
    version = blob.version or version_of(blob.file)
    named = f"{identity_of(blob.file)}\0{version}".encode("utf-8", "surrogatepass")
    changed = int(version[1:].partition(" ")[0]) * 1_000_000_000 if version.startswith("@") else 0
    return hashlib.sha256(named).digest() + _range_of(blob), changed


def _range_of(blob: Blob) -> bytes:
    if not blob.offset and blob.length is None:
        return b""
    return b"%d:%d" % (blob.offset, -1 if blob.length is None else blob.length)


def ctime_is_reliable() -> bool:
    """Whether ctime is the time of the last change on this system. Where it is the time of creation, a file can be
    replaced by one with the same stamp, and only files named by their content may be trusted by stamp."""
    return os.name != "nt"
