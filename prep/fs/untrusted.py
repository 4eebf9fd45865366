"""Opens files of an untrusted cache: regular files only, no links, never blocking on a pipe.

A cache may come from a stranger. A link in it could lead out of it, a pipe block forever, a device never end; each is
refused before it is opened. On systems without the flags that close the gap between checking and opening (Windows),
there is only the check. Hard links cannot be distinguished from files, and reach nothing that a link could not.
"""

from __future__ import annotations

import errno
import io
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, BinaryIO

from prep.errors import CacheError

# O_NONBLOCK: a pipe that replaces a file after the check does not block.
PLAIN = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))
APPENDED = PLAIN & ~getattr(os, "O_NONBLOCK", 0) | os.O_RDWR | os.O_APPEND | os.O_CREAT  # O_RDWR waits for no reader
OUT = "to store a cache elsewhere, name that directory, or a link to the whole cache"
NOTHING_NOW = "it has no data available now, expected a file that can be read without waiting"
_CHUNK = 1 << 16  # bytes per read when the size is not known
_PART = 1 << 20  # bytes per read of a stream
NAME_SURROGATE = 0x20000000  # a bit of Windows reparse tags, set for links and junctions


class NotRegularFile(OSError):
    """A path is not a regular file or directory, or is larger than it may be; an `OSError` like those of the system."""

    def __init__(self, path: Path | str, what: str) -> None:
        super().__init__(errno.EINVAL, what, str(path))

    def __str__(self) -> str:
        return f"{Path(self.filename).name} {self.strerror}"


def open_regular(path: Path | str, *, dir_fd: int | None = None) -> int:
    """Opens a regular file for reading; with `dir_fd`, the one of that last name in an open directory. Raises
    `OSError`, and `NotRegularFile` for anything else."""
    named = path if dir_fd is None else Path(path).name
    require_kind(path, os.lstat(path) if dir_fd is None else os.lstat(named, dir_fd=dir_fd), directory=False)
    descriptor = os.open(path, PLAIN) if dir_fd is None else os.open(named, PLAIN, dir_fd=dir_fd)
    try:
        require_kind(path, os.fstat(descriptor), directory=False)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def append_regular(path: Path | str) -> BinaryIO:
    """A regular file, made if it is missing, opened to append to it, unbuffered. As `open_regular`."""
    with suppress(FileNotFoundError):
        require_kind(path, os.lstat(path), directory=False)
    descriptor = os.open(path, APPENDED, 0o666)
    try:
        require_kind(path, os.fstat(descriptor), directory=False)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "ab", buffering=0)


def read_regular(path: Path | str, most: int, *, dir_fd: int | None = None) -> bytes:
    """The bytes of a regular file of at most `most` bytes. As `open_regular`."""
    descriptor = open_regular(path, dir_fd=dir_fd)
    try:
        size = os.fstat(descriptor).st_size
        if size > most:
            raise NotRegularFile(path, f"has {size} bytes, expected at most {most}")
        data = read_bytes(descriptor, size + 1, size, str(path))  # one more than its size, to notice a file that grew
    finally:
        os.close(descriptor)
    if len(data) > size:
        raise NotRegularFile(path, f"grew beyond {size} bytes while it was read")
    return data


def read_parts(path: Path | str) -> Iterator[bytes]:
    """The bytes of a regular file, in blocks of 1 MiB. As `open_regular`."""
    with stream_of(open_regular(path)) as handle:
        yield from iter(lambda: handle.read(_PART), b"")


def read_bytes(descriptor: int, most: int, size: int, path: str) -> bytes:
    """Reads a descriptor of about `size` bytes to its end, at most `most` bytes. Raises `OSError`, also if no data is
    available now: see `stream_of`."""
    parts: list[bytes] = []
    budget = most
    try:
        while budget > 0 and (part := os.read(descriptor, min(budget, max(size + 1, _CHUNK)))):
            parts.append(part)
            budget -= len(part)
            size -= len(part)
    except BlockingIOError:
        raise BlockingIOError(errno.EAGAIN, NOTHING_NOW, path) from None
    return parts[0] if len(parts) == 1 else b"".join(parts)


def read_up_to(stream: IO[bytes], most: int) -> bytes:
    """The bytes of a stream to its end, at most `most`. In parts: a reader makes a buffer of the size it is asked for,
    so a limit is no amount to ask for."""
    parts: list[bytes] = []
    budget = most
    while budget > 0 and (part := stream.read(min(budget, _PART))):
        parts.append(part)
        budget -= len(part)
    return b"".join(parts)


def stream_of(descriptor: int) -> BinaryIO:
    """A stream that reads from the descriptor. Its reads raise `BlockingIOError` if a file that was opened with
    O_NONBLOCK has no data available now (in /proc, /sys, on FUSE); other streams would take that for the end."""
    return io.BufferedReader(_Unwaiting(descriptor))


class _Unwaiting(io.FileIO):
    read = io.RawIOBase.read  # type: ignore[assignment]  # calls readinto, unlike that of FileIO
    readall = io.RawIOBase.readall

    def readinto(self, buffer: Any) -> int:
        count: int | None = super().readinto(buffer)
        if count is None:
            raise BlockingIOError(errno.EAGAIN, NOTHING_NOW)
        return count


def size_regular(path: Path | str) -> int:
    """The size of a regular file. Raises `OSError`, and `NotRegularFile` for anything else."""
    status = os.lstat(path)
    require_kind(path, status, directory=False)
    return status.st_size


def check_dir(path: Path | str) -> None:
    """Raises `NotRegularFile` if `path` exists and is not a directory."""
    try:
        status = os.lstat(path)
    except FileNotFoundError:
        return
    require_kind(path, status, directory=True)


def check_root(root: Path) -> None:
    """Raises `NotRegularFile` if anything in a directory is neither a regular file nor a directory, and `OSError`."""
    with os.scandir(root) as items:
        for entry in items:
            try:
                status = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile, for example by another encoder
                continue
            require_kind(root / entry.name, status, directory=stat.S_ISDIR(status.st_mode))


def check_cache_root(root: Path) -> None:
    """Raises `CacheError` if anything in a cache's root directory is neither a regular file nor a directory."""
    try:
        check_root(root)
    except NotRegularFile as error:
        raise CacheError(f"{root}: {error}", hint=OUT) from None


def check_directories(*paths: Path | str) -> None:
    """Raises `CacheError` if one of these paths, parents of a file in a cache, exists and is not a directory."""
    try:
        for path in paths:
            check_dir(path)
    except NotRegularFile as error:
        raise CacheError(f"{error.filename}: {error}", hint=OUT) from None


def entries(root: Path) -> list[os.DirEntry[str]]:
    """The entries of a directory, sorted by name; empty if it does not exist. Raises `OSError`, also for a link."""
    check_dir(root)
    try:
        with os.scandir(root) as items:
            return sorted(items, key=lambda entry: entry.name)
    except FileNotFoundError:
        return []


def walk(root: Path) -> Iterator[Path]:
    """The paths of all that is below a directory but directories, and links to them. Raises `OSError`."""
    for entry in entries(root):
        path = root / entry.name
        if entry.is_dir(follow_symlinks=False) and not is_link(path.lstat()):
            yield from walk(path)
        else:
            yield path


def entries_if_allowed(root: Path) -> list[os.DirEntry[str]]:
    """Like `entries`, but empty for a directory that this user may not list: another user's, in a shared cache."""
    try:
        return entries(root)
    except PermissionError:
        return []


def is_link(status: os.stat_result) -> bool:
    """Whether the status is that of a link, or on Windows of a junction."""
    return stat.S_ISLNK(status.st_mode) or bool(getattr(status, "st_reparse_tag", 0) & NAME_SURROGATE)


def require_kind(path: Path | str, status: os.stat_result, *, directory: bool) -> None:
    surrogate = getattr(status, "st_reparse_tag", 0) & NAME_SURROGATE
    if stat.S_IFMT(status.st_mode) == (stat.S_IFDIR if directory else stat.S_IFREG) and not surrogate:
        return  # told first: a start asks ten times a shard
    wanted = "a directory" if directory else "a plain file"
    if is_link(status):
        raise NotRegularFile(path, f"is a link, expected {wanted}: a cache must not contain links")
    raise NotRegularFile(path, f"is {_kind(status.st_mode)}, expected {wanted}")


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a directory", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket", stat.S_IFREG: "a file"}
    return kinds.get(stat.S_IFMT(mode), "a device")
