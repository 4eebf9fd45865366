"""Files below a directory in which others may write: reached by descriptors, never through a link.

A path that was checked may lead elsewhere a moment later: another user exchanges a directory for a link. Here each
directory is opened in the one above it, never through a link, and files are read, written, removed and locked in the
directory that is open. Systems that cannot do so (Windows) check each path before it is used: `by_descriptor`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from prep.fs import atomic
from prep.fs.lock import try_exclusive
from prep.fs.untrusted import NotRegularFile, check_dir, read_regular, require_kind

LOCK = ".lock"  # where a directory cannot be locked itself
_BETWEEN = 0.01  # seconds until a lock is asked for again


def by_descriptor() -> bool:
    """Whether the system opens, writes and removes files in open directories."""
    return atomic.HAS_DIR_FD and {os.link, os.mkdir, os.rename, os.stat} <= os.supports_dir_fd


@dataclass(frozen=True, slots=True)
class Folder:
    """An open directory, whose files are called by their last names."""

    path: Path
    descriptor: int | None  # None: the system has no such thing

    def status(self, name: str = ".") -> os.stat_result:
        """The status of a file, or of the directory itself; of a link, its own. Raises `OSError`."""
        if self.descriptor is None:
            return (self.path / name).lstat()
        return os.lstat(name, dir_fd=self.descriptor) if name != "." else os.fstat(self.descriptor)

    def names(self) -> list[str]:
        """All names in it. Raises `OSError`."""
        return os.listdir(self.path if self.descriptor is None else self.descriptor)  # noqa: PTH208

    def read(self, name: str, most: int) -> bytes:
        """The bytes of a regular file of at most `most` bytes. Raises `OSError`, and `NotRegularFile` for others."""
        return read_regular(self.path / name, most, dir_fd=self.descriptor)

    def write(self, name: str, data: bytes) -> None:
        """Writes a file whole, with the permissions of the regular file that it replaces. Raises `OSError`."""
        mode = None
        with contextlib.suppress(FileNotFoundError):
            status = self.status(name)
            require_kind(self.path / name, status, directory=False)
            mode = stat.S_IMODE(status.st_mode)
        with self._staged(data, mode) as staged:
            atomic.rename(staged, self.path / name, dir_fd=self.descriptor)

    def create(self, name: str, data: bytes) -> bool:
        """Writes a file that is not there yet, whole; returns False if it is. Raises `OSError`."""
        try:
            with self._staged(data, None) as staged:
                atomic.link(staged, self.path / name, dir_fd=self.descriptor)
        except FileExistsError:
            return False
        return True

    @contextmanager
    def _staged(self, data: bytes, mode: int | None) -> Iterator[Path]:
        """A file with `data` under a hidden name, until it has its own."""
        staged = atomic.temporary_name(self.path / LOCK)
        try:
            with atomic.create(staged, mode=mode, dir_fd=self.descriptor) as handle:
                atomic.write(handle, data)
                atomic.sync(handle)
            yield staged
        finally:
            with contextlib.suppress(OSError):  # keep the original error
                atomic.remove(staged, dir_fd=self.descriptor)
        atomic.sync_dir(self.path, dir_fd=self.descriptor)

    def remove(self, name: str) -> None:
        """Removes a file, if it is there. Raises `OSError`."""
        atomic.remove(self.path / name, dir_fd=self.descriptor)
        atomic.sync_dir(self.path, dir_fd=self.descriptor)

    @contextmanager
    def locked(self, patience: float) -> Iterator[None]:
        """Holds the directory's lock. Raises `TimeoutError` if another process does for `patience` seconds; on a disk
        without locks, all get it."""
        flags = atomic.DIRECTORY if self.descriptor is not None else os.O_RDWR | os.O_CREAT
        own = os.open("." if self.descriptor is not None else self.path / LOCK, flags, 0o666, dir_fd=self.descriptor)
        try:
            deadline = time.monotonic() + patience
            while (release := try_exclusive(_Locked(own))) is None:
                if time.monotonic() > deadline:
                    raise TimeoutError(errno.ETIMEDOUT, "another program is saving there", str(self.path))
                time.sleep(_BETWEEN)
            try:
                yield
            finally:
                release()
        finally:
            os.close(own)


@dataclass(frozen=True, slots=True)
class _Locked:
    descriptor: int

    def fileno(self) -> int:
        return self.descriptor


@dataclass(frozen=True, slots=True)
class Below:
    """A directory below another, by the names on the way. It need not exist."""

    root: Path  # may be a link; its parents are not others' to change
    parts: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return self.root.joinpath(*self.parts)

    @contextmanager
    def opened(self, *, make: bool = False) -> Iterator[Folder]:
        """The open directory; with `make`, what is missing of it is made. Raises `OSError`, and `NotRegularFile` for a
        link, or a file, on the way."""
        if make:
            atomic.make_dirs(self.root)
        if not by_descriptor():
            yield self._checked(make)
            return
        at = os.open(self.root, atomic.DIRECTORY & ~getattr(os, "O_NOFOLLOW", 0))
        try:
            for depth, part in enumerate(self.parts, 1):
                below = _entered(self.root.joinpath(*self.parts[:depth]), part, at, make)
                os.close(at)
                at = below
            yield Folder(self.path, at)
        finally:
            os.close(at)

    def _checked(self, make: bool) -> Folder:
        folder = self.root
        for part in self.parts:
            folder /= part
            check_dir(folder)
            if make:
                atomic.make_dirs(folder)
        folder.stat()  # raises `FileNotFoundError`
        return Folder(folder, None)


def _entered(path: Path, name: str, above: int, make: bool) -> int:
    """Opens the directory `name` in an open one."""
    try:
        return os.open(name, atomic.DIRECTORY, dir_fd=above)
    except FileNotFoundError:
        if not make:
            raise
    except OSError as error:
        if error.errno not in atomic.NO_DIRECTORY:
            raise
        raise NotRegularFile(path, "is a link or a file, expected a directory") from None
    with contextlib.suppress(FileExistsError):  # another process was quicker
        atomic.make_dir(path, dir_fd=above)
        atomic.sync_dir(path.parent, dir_fd=above)
    return _entered(path, name, above, False)
