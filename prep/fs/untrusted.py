"""How the files of a cache are opened: plain files only, where they are said to lie, and never waited for.

A cache may come from a stranger. A link in it would lead elsewhere, a pipe would never answer, a device never end; each
is refused before it is opened. Where a system lacks the flags that close the moment between looking and opening
(Windows), looking is all there is. Hard links cannot be told from files, and lead nowhere that a link could not.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from prep.errors import CacheError

# O_NONBLOCK: a pipe that takes a file's place after we looked does not hold us up.
PLAIN = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))
OUT = "a cache has no links; where it is to lie elsewhere, name that directory, or a link to the whole cache"
NOTHING_NOW = "it has nothing to give now, expected a file that is read without waiting"
_CHUNK = 1 << 16  # bytes read at once where no more are known of
NAME_SURROGATE = 0x20000000  # a bit of Windows' reparse tags: links and junctions have it


class NotRegularFile(OSError):
    """Something is not a plain file or directory, or larger than it can be; said as other errors of the system are."""

    def __init__(self, path: Path, what: str) -> None:
        super().__init__(errno.EINVAL, what, str(path))

    def __str__(self) -> str:
        return f"{Path(self.filename).name} {self.strerror}"


def open_regular(path: Path) -> int:
    """A descriptor to read the file from. Raises `OSError`; `NotRegularFile` for anything but a plain file."""
    require_kind(path, path.lstat(), directory=False)
    descriptor = os.open(path, PLAIN)
    try:
        require_kind(path, os.fstat(descriptor), directory=False)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def read_regular(path: Path, most: int) -> bytes:
    """The bytes of a plain file of at most `most` bytes. Raises `OSError`; of its kind `NotRegularFile` for another."""
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise NotRegularFile(path, f"has {size} bytes, expected at most {most}")
        data = read_bytes(descriptor, size + 1, size, str(path))  # one more than there are: a file that grew is noticed
    finally:
        os.close(descriptor)
    if len(data) > size:
        raise NotRegularFile(path, f"grew beyond {size} bytes while it was read")
    return data


def read_bytes(descriptor: int, most: int, size: int, path: str) -> bytes:
    """What a descriptor has up to its end, at most `most` bytes of about `size`. Raises `OSError`, also where a file
    has nothing to give now: see `stream_of`."""
    parts: list[bytes] = []
    left = most
    try:
        while left > 0 and (part := os.read(descriptor, min(left, max(size + 1, _CHUNK)))):
            parts.append(part)
            left -= len(part)
            size -= len(part)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, NOTHING_NOW, path) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def stream_of(descriptor: int) -> BinaryIO:
    """The descriptor as a stream to read from. Its reads raise `BlockingIOError` where a file that was opened with
    O_NONBLOCK has nothing to give now (in /proc, /sys, on FUSE): other streams read None, and take it for the end."""
    return io.BufferedReader(_Unwaiting(descriptor))


class _Unwaiting(io.FileIO):
    read = io.RawIOBase.read  # type: ignore[assignment]  # by readinto, unlike FileIO's own
    readall = io.RawIOBase.readall

    def readinto(self, buffer: Any) -> int:
        count: int | None = super().readinto(buffer)
        if count is None:
            raise BlockingIOError(errno.EAGAIN, NOTHING_NOW)
        return count


def size_regular(path: Path) -> int:
    """The size of a plain file. Raises `OSError`; of its kind `NotRegularFile` for anything else."""
    status = path.lstat()
    require_kind(path, status, directory=False)
    return status.st_size


def check_dir(path: Path) -> None:
    """Raises `NotRegularFile` when `path` is something else than a directory; nothing, where there is nothing."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    require_kind(path, status, directory=True)


def check_cache_root(root: Path) -> None:
    """Raises `CacheError` when something in a cache's own directory is neither a plain file nor a directory."""
    try:
        with os.scandir(root) as found:
            for entry in found:
                try:
                    status = entry.stat(follow_symlinks=False)
                except FileNotFoundError:  # gone since, as another encoder's journal of what it knows of files
                    continue
                require_kind(root / entry.name, status, directory=stat.S_ISDIR(status.st_mode))
    except NotRegularFile as error:
        raise CacheError(f"{root}: {error}", hint=OUT) from None


def check_directories(*paths: Path) -> None:
    """Raises `CacheError` when one of the directories on the way to something in a cache is something else."""
    try:
        for path in paths:
            check_dir(path)
    except NotRegularFile as error:
        raise CacheError(f"{error.filename}: {error}", hint=OUT) from None


def entries(root: Path) -> list[os.DirEntry[str]]:
    """What is in a directory that is no link, sorted by name; empty where there is none. Raises `OSError`."""
    check_dir(root)
    try:
        with os.scandir(root) as found:
            return sorted(found, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def entries_if_allowed(root: Path) -> list[os.DirEntry[str]]:
    """The same; empty, too, where this user may not list the directory: another user's, in a shared cache."""
    try:
        return entries(root)
    except PermissionError:
        return []


def is_link(status: os.stat_result) -> bool:
    """Whether that is a link, or on Windows a junction."""
    return stat.S_ISLNK(status.st_mode) or bool(getattr(status, "st_reparse_tag", 0) & NAME_SURROGATE)


def require_kind(path: Path, status: os.stat_result, *, directory: bool) -> None:
    wanted = "a directory" if directory else "a plain file"
    if is_link(status):
        raise NotRegularFile(path, f"is a link, expected {wanted}: nothing in a cache leads out of it")
    if directory != stat.S_ISDIR(status.st_mode) or not (directory or stat.S_ISREG(status.st_mode)):
        raise NotRegularFile(path, f"is {_kind(status.st_mode)}, expected {wanted}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")
