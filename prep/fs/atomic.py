"""Whole files or none: write, sync to disk, rename, protect. Every file a cache or a run keeps goes through here.

The primitives at the top (`PRIMITIVES`) are the only places where the disk changes, so that tests can stop the world
at each of them. Where a system lacks one of them (directories cannot be synced on Windows, hard links do not exist on
FAT), it falls back to the next best and the cache stays usable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from prep.fs.untrusted import is_link

PRIMITIVES = ("create", "write", "sync", "sync_dir", "rename", "link", "remove", "make_dir", "remove_dir", "protect")
Buffer = Any  # whatever has the buffer protocol: bytes, bytearray, memoryview, a contiguous numpy array

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
NO_STAGING = {errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS}
NO_DIRECTORY = {errno.ENOTDIR, errno.ELOOP, errno.EMLINK}  # what systems say of a link that is not to be followed
DIRECTORY = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"))
HAS_DIR_FD = {os.open, os.unlink, os.rmdir} <= os.supports_dir_fd and os.scandir in os.supports_fd
SHARED_DIR = 0o3077  # of a directory's permissions, what directories below it have, too
SHARED_FILE = 0o066
NO_DIRECTORY_SYNC = {errno.EINVAL, errno.EACCES, errno.EPERM, errno.EBADF, errno.ENOTSUP, errno.EISDIR}


def create(path: Path, *, mode: int | None = None) -> BinaryIO:
    """A new, empty file to write to, without a buffer, which would fail again when it is closed.

    With `mode` it has these permissions, whatever the umask. Raises `FileExistsError`.
    """
    handle = path.open("xb", buffering=0)
    if mode is not None:
        set_mode(handle.fileno(), mode)
    return handle


def write(handle: BinaryIO, data: Buffer) -> None:
    """Appends `data` to an open file."""
    left = memoryview(data).cast("B")
    with _naming(handle.name):
        while left:
            left = left[handle.write(left) :]


def sync(handle: BinaryIO) -> None:
    """The file's bytes are on the disk when this returns (on macOS too, where fsync stops short)."""
    with _naming(handle.name):
        handle.flush()
        _full_fsync(handle.fileno())


def sync_dir(path: Path) -> None:
    """The names in directory `path` are on the disk when this returns, where the system can promise that."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError as error:
        if error.errno in NO_DIRECTORY_SYNC:
            return  # Windows opens no directories
        raise
    try:
        with _naming(path):
            _full_fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC:  # some network file systems
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path) -> None:
    """Moves a file over `target`, or a directory to where nothing is, in one step."""
    source.replace(target)


def link(source: Path, target: Path) -> None:
    """A second name for a file. Raises `FileExistsError` when `target` exists; where links are lacking, renames."""
    try:
        target.hardlink_to(source)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        rename(source, target)


def remove(path: Path, *, dir_fd: int | None = None) -> None:
    """Removes a file, read-only or not, there or not; with `dir_fd`, the one called `path.name` in that directory."""
    name = path if dir_fd is None else path.name
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=dir_fd)  # pathlib has no dir_fd
        except PermissionError:
            if dir_fd is not None or path.is_symlink():
                raise
            path.chmod(stat.S_IRUSR | stat.S_IWUSR)  # Windows keeps read-only files
            path.unlink()


def make_dir(path: Path, *, mode: int | None = None) -> None:
    """Makes a directory; with `mode` it has these permissions, whatever the umask. Raises `FileExistsError`."""
    path.mkdir()
    if mode is not None and HAS_DIR_FD:
        with contextlib.suppress(OSError):  # on a disk without permissions, or moved already
            descriptor = os.open(path, DIRECTORY)
            try:
                set_mode(descriptor, mode)
            finally:
                os.close(descriptor)


def remove_dir(path: Path, *, dir_fd: int | None = None) -> None:
    """Removes an empty directory, there or not; with `dir_fd`, the one called `path.name` in that directory."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(path if dir_fd is None else path.name, dir_fd=dir_fd)


def protect(path: Path) -> None:
    """A file that nobody writes to by mistake. Directories stay writable, so that `rm -r` needs no chmod."""
    path.chmod(path.stat().st_mode & ~0o222)


def set_mode(descriptor: int, mode: int) -> None:
    """Gives an open file or directory these permissions, where the system and the disk have such."""
    if hasattr(os, "fchmod") and stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, mode)


def shared_dir_mode(root: Path) -> int:
    """Permissions for directories below `root`: its own, so that no user's umask shuts out others who may use it."""
    return root.stat().st_mode & SHARED_DIR | 0o700


def shared_file_mode(root: Path) -> int:
    """Permissions for files below `root`, as `shared_dir_mode`."""
    return root.stat().st_mode & SHARED_FILE | 0o600


def remove_tree(path: Path) -> None:
    """Removes a directory with all in it, or a file; nothing there is no error. Links are removed, never followed.

    Directories are opened one inside the other and never through a link, so that nobody who may write into them can
    lead the removal elsewhere. Any depth will do: two of them are open at a time.
    """
    try:
        status = path.lstat()
    except FileNotFoundError:
        return
    if is_link(status) or not stat.S_ISDIR(status.st_mode):
        remove(path)
        return
    (_empty_by_descriptor if HAS_DIR_FD else _empty_by_path)(path)
    remove_dir(path)


def remove_directory_in_way(path: Path) -> None:
    """No directory is where a file is to be when this returns. Only for what is ours: all in it goes."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)


def temporary_name(path: Path, staging: Path | None = None) -> Path:
    """A fresh hidden name in the directory of `path`, or in `staging`; the umask decides its mode, unlike mkstemp's.

    The file's own name is not in it: that may be as long as names can be.
    """
    return (staging or path.parent) / f".{secrets.token_hex(8)}.partial"


def write_synced(path: Path, data: Buffer, *, mode: int | None = None) -> None:
    """Creates `path` with `data`, on the disk. Raises `FileExistsError`."""
    with create(path, mode=mode) as handle:
        write(handle, data)
        sync(handle)


def write_atomic(path: Path, data: Buffer, *, read_only: bool = False, staging: Path | None = None,
                 mode: int | None = None) -> None:
    """`path` has `data`, on the disk. Whoever looks meanwhile, or after a crash, sees all of the old or the new.

    What a crash leaves lies in `staging`, where that is on the same file system and can be written; else, and without
    it, beside `path`. `mode` as for `create`.
    """
    try:
        _write_whole(path, data, read_only, temporary_name(path, staging), mode)
    except OSError as error:
        if staging is None or error.errno not in NO_STAGING:
            raise
        _write_whole(path, data, read_only, temporary_name(path), mode)
    sync_dir(path.parent)


def _write_whole(path: Path, data: Buffer, read_only: bool, staged: Path, mode: int | None) -> None:
    try:
        write_synced(staged, data, mode=mode)
        if read_only:
            protect(staged)
        rename(staged, path)
    finally:
        _forget(staged)


def create_exclusive(path: Path, data: Buffer, *, staging: Path | None = None, mode: int | None = None) -> bool:
    """True when this call created `path` with `data`; False, and nothing written, when it was there already."""
    if path.exists():
        return False
    staged = temporary_name(path, staging)
    try:
        write_synced(staged, data, mode=mode)
        link(staged, path)
    except FileExistsError:
        return False
    finally:
        _forget(staged)
    sync_dir(path.parent)
    return True


def make_dirs(path: Path, *, mode: int | None = None) -> None:
    """The directory and its parents exist, and their names are on the disk. `mode` as for `make_dir`."""
    if path.is_dir():
        return
    make_dirs(path.parent, mode=mode)
    with contextlib.suppress(FileExistsError):  # another process was quicker
        make_dir(path, mode=mode)
    sync_dir(path.parent)


@dataclass(slots=True)
class _Level:
    """A directory on the way down into a tree that is being removed."""

    name: str
    mark: tuple[int, int]  # device and inode
    left: list[str]  # directories in it that are still to be removed


def _empty_by_descriptor(root: Path) -> None:
    """Removes all that is in `root`. Raises `OSError`, also when a directory on the way is moved meanwhile."""
    while not _emptied(root):
        pass  # another process removed the directory that we were in: look again


def _emptied(root: Path) -> bool:
    descriptor = _open_dir(root, None)
    if descriptor is None:
        return True
    try:
        levels = [_level(root, "", descriptor)]
        while levels[-1].left or len(levels) > 1:
            if levels[-1].left:
                name = levels[-1].left.pop()
                below = _open_dir(root / name, descriptor)
                if below is not None:
                    os.close(descriptor)
                    descriptor = below
                    levels.append(_level(root, name, descriptor))
                continue
            done = levels.pop()
            above = os.open("..", DIRECTORY, dir_fd=descriptor)
            os.close(descriptor)
            descriptor = above
            if _mark(descriptor) != levels[-1].mark:
                raise OSError(errno.ESTALE, "a directory was moved while it was being removed", str(root))
            remove_dir(root / done.name, dir_fd=descriptor)
    except FileNotFoundError:
        return False
    finally:
        os.close(descriptor)
    return True


def _level(root: Path, name: str, descriptor: int) -> _Level:
    """An open directory whose files are removed now. (`root` only names things in errors: paths may be too long.)"""
    left = []
    with os.scandir(descriptor) as found:
        for entry in sorted(found, key=lambda one: one.name):
            if entry.is_dir(follow_symlinks=False):
                left.append(entry.name)
            else:
                remove(root / entry.name, dir_fd=descriptor)
    return _Level(name, _mark(descriptor), left)


def _open_dir(path: Path, dir_fd: int | None) -> int | None:
    """A descriptor of a directory that its owner may now empty; `None` when it is gone, or was replaced by a file."""
    name = path if dir_fd is None else path.name
    try:
        try:
            descriptor = os.open(name, DIRECTORY, dir_fd=dir_fd)
        except PermissionError:
            with contextlib.suppress(OSError, NotImplementedError, ValueError):
                os.chmod(name, stat.S_IRWXU, dir_fd=dir_fd, follow_symlinks=False)
            descriptor = os.open(name, DIRECTORY, dir_fd=dir_fd)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in NO_DIRECTORY:
            raise
        remove(path, dir_fd=dir_fd)
        return None
    mode = os.fstat(descriptor).st_mode
    set_mode(descriptor, stat.S_IMODE(mode) | stat.S_IRWXU)
    return descriptor


def _empty_by_path(root: Path) -> None:
    """The same where directories cannot be opened (Windows): looking for links is all that can be done."""
    found = [root]
    for folder in found:  # grows
        if not os.access(folder, os.W_OK):
            folder.chmod(folder.stat().st_mode | stat.S_IRWXU)
        with contextlib.suppress(FileNotFoundError):  # another process removes it, too
            for inner in sorted(folder.iterdir()):
                status = inner.lstat()
                if stat.S_ISDIR(status.st_mode) and not is_link(status):
                    found.append(inner)
                else:
                    remove(inner)
    for folder in reversed(found[1:]):
        remove_dir(folder)


def _mark(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _naming(path: Path | str) -> Iterator[None]:
    """What the system says of a descriptor names its file, too."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _forget(staged: Path) -> None:
    with contextlib.suppress(OSError):  # what failed before matters more; a leftover is rubbish
        remove(staged)


def _full_fsync(descriptor: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)
