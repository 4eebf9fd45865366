"""Writes files atomically: stage, sync to disk, rename, protect. Every file of a cache or a run is written here.

Only the primitives at the top (`PRIMITIVES`) change the disk, so that tests can inject a crash at each of them. If a
system lacks one (Windows cannot sync directories, FAT has no hard links), the primitive falls back to the next best
operation and the cache stays usable.

With `dir_fd`, the descriptor of an open directory, only the name of a path counts: see `prep/fs/below.py`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from prep.fs.untrusted import is_link

PRIMITIVES = ("create", "write", "sync", "sync_dir", "rename", "link", "remove", "make_dir", "remove_dir", "protect")
Buffer = Any  # anything with the buffer protocol: bytes, bytearray, memoryview, a contiguous NumPy array

NO_LINKS = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}
NO_STAGING = {errno.EXDEV, errno.EACCES, errno.EPERM, errno.EROFS}
NO_DIRECTORY = {errno.ENOTDIR, errno.ELOOP, errno.EMLINK}  # errors of O_NOFOLLOW for a link, which differ by system
DIRECTORY = os.O_RDONLY | sum(getattr(os, name, 0) for name in ("O_DIRECTORY", "O_NOFOLLOW", "O_CLOEXEC"))
HAS_DIR_FD = {os.open, os.unlink, os.rmdir} <= os.supports_dir_fd and os.scandir in os.supports_fd
SHARED_DIR = 0o3077  # permission bits that directories inherit from the cache's root
SHARED_FILE = 0o066
_PARTIAL = re.compile(r"\.[0-9a-f]{16}\.partial")
NO_DIRECTORY_SYNC = {errno.EINVAL, errno.EACCES, errno.EPERM, errno.EBADF, errno.ENOTSUP, errno.EISDIR}


def create(path: Path, *, mode: int | None = None, dir_fd: int | None = None) -> BinaryIO:
    """Creates an empty file and opens it for writing, unbuffered: a buffer would fail a second time on close.

    `mode` sets its permissions regardless of the umask. Raises `FileExistsError`.
    """
    handle = path.open("xb", buffering=0) if dir_fd is None else open(  # noqa: SIM115  # pathlib has no opener
        path.name, "xb", buffering=0, opener=lambda name, flags: os.open(name, flags, 0o666, dir_fd=dir_fd))
    if mode is not None:
        set_mode(handle.fileno(), mode)
    return handle


def write(handle: BinaryIO, data: Buffer) -> None:
    """Appends `data` to an open file."""
    rest = memoryview(data).cast("B")
    with _naming(handle.name):
        while rest:
            rest = rest[handle.write(rest) :]


def sync(handle: BinaryIO) -> None:
    """Flushes the file's bytes to the disk (also on macOS, where plain fsync is not enough)."""
    with _naming(handle.name):
        handle.flush()
        _full_fsync(handle.fileno())


def sync_dir(path: Path, *, dir_fd: int | None = None) -> None:
    """Flushes the names in directory `path` to the disk, on systems that can; with `dir_fd`, that directory's."""
    try:
        descriptor = os.open(path, os.O_RDONLY) if dir_fd is None else os.dup(dir_fd)
    except OSError as error:
        if error.errno in NO_DIRECTORY_SYNC:
            return  # Windows cannot open directories
        raise
    try:
        with _naming(path):
            _full_fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_DIRECTORY_SYNC:  # some network file systems
            raise
    finally:
        os.close(descriptor)


def rename(source: Path, target: Path, *, dir_fd: int | None = None) -> None:
    """Atomically moves a file, replacing `target`, or a directory to an unused name."""
    if dir_fd is None:
        source.replace(target)
    else:
        os.rename(source.name, target.name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)


def link(source: Path, target: Path, *, dir_fd: int | None = None) -> None:
    """Hard-links `source` as `target`; renames it if the disk has no hard links. Raises `FileExistsError`."""
    try:
        if dir_fd is None:
            target.hardlink_to(source)
        else:
            os.link(source.name, target.name, src_dir_fd=dir_fd, dst_dir_fd=dir_fd)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        if _exists(target, dir_fd):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        rename(source, target, dir_fd=dir_fd)


def remove(path: Path, *, dir_fd: int | None = None) -> None:
    """Removes a file, even if read-only or already gone."""
    name = _named(path, dir_fd)
    with contextlib.suppress(FileNotFoundError):
        try:
            os.unlink(name, dir_fd=dir_fd)  # pathlib has no dir_fd
        except PermissionError:
            if dir_fd is not None or path.is_symlink():
                raise
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IWUSR)  # Windows refuses to remove read-only files
            try:
                path.unlink()
            except OSError:  # elsewhere its directory is what is read-only
                path.chmod(mode)
                raise


def make_dir(path: Path, *, mode: int | None = None, dir_fd: int | None = None) -> None:
    """Makes a directory; `mode` sets its permissions regardless of the umask. Raises `FileExistsError`."""
    if dir_fd is None:
        path.mkdir()
    else:
        os.mkdir(path.name, dir_fd=dir_fd)
    if mode is not None and HAS_DIR_FD:
        with contextlib.suppress(OSError):  # the disk has no permissions, or another process moved it
            descriptor = os.open(_named(path, dir_fd), DIRECTORY, dir_fd=dir_fd)
            try:
                set_mode(descriptor, mode)
            finally:
                os.close(descriptor)


def remove_dir(path: Path, *, dir_fd: int | None = None) -> None:
    """Removes an empty directory, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        os.rmdir(_named(path, dir_fd), dir_fd=dir_fd)


def protect(path: Path) -> None:
    """Makes a file read-only, against accidental writes. Directories stay writable, so that `rm -r` needs no chmod."""
    path.chmod(path.stat().st_mode & ~0o222)


def set_mode(descriptor: int, mode: int) -> None:
    """Sets the permissions of an open file or directory, if the system and the disk support them."""
    if hasattr(os, "fchmod") and stat.S_IMODE(os.fstat(descriptor).st_mode) != mode:
        with contextlib.suppress(OSError):
            os.fchmod(descriptor, mode)


def shared_dir_mode(root: Path) -> int:
    """Permissions for directories below `root`: those of `root`, so that one user's umask locks no other user out."""
    return root.stat().st_mode & SHARED_DIR | 0o700


def shared_file_mode(root: Path) -> int:
    """Permissions for files below `root`, by the rule of `shared_dir_mode`."""
    return root.stat().st_mode & SHARED_FILE | 0o600


def remove_tree(path: Path) -> None:
    """Removes a directory with its contents, or a file, if it exists. Links are removed, never followed.

    Each directory is opened relative to its parent and never through a link, so that a user who can write there cannot
    redirect the removal. Any depth works: at most two directories are open at a time.
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
    """Removes a directory, with its contents, from the path of a file to be written. Only for paths inside a cache."""
    if path.is_dir() and not path.is_symlink():
        remove_tree(path)


def temporary_name(path: Path, staging: Path | None = None, *, end: str = ".partial") -> Path:
    """A new hidden name in the directory of `path`, or in `staging`; unlike with mkstemp, the umask sets the mode.

    It does not contain the file's own name, which may already have the maximum length.
    """
    return (staging or path.parent) / f".{secrets.token_hex(8)}{end}"


def write_synced(path: Path, data: Buffer, *, mode: int | None = None) -> None:
    """Creates `path` with `data` and syncs it to the disk. Raises `FileExistsError`."""
    with create(path, mode=mode) as handle:
        write(handle, data)
        sync(handle)


def is_partial(path: Path) -> bool:
    """Whether a file or directory has the name of one that was left unfinished."""
    return _PARTIAL.fullmatch(path.name) is not None


@contextlib.contextmanager
def staged(path: Path, staging: Path | None = None, *, end: str = ".partial") -> Iterator[Path]:
    """A name beside `path`, or in `staging`, for what is to become it; what has that name after the block is removed.
    """
    name = temporary_name(path, staging, end=end)
    try:
        yield name
    finally:
        forget(name)


@contextlib.contextmanager
def new_file(path: Path, *, read_only: bool = False, staging: Path | None = None, mode: int | None = None,
             undo: bool = True) -> Iterator[BinaryIO]:
    """A file to be written, which is `path` after the block, synced; an error in the block leaves nothing.

    A crash leaves its partial file in `staging`, or beside `path`. `mode` as for `create`, `undo` as for `publish`.
    """
    with staged(path.absolute(), staging) as name:
        with create(name, mode=mode) as handle:
            yield handle
            sync(handle)
        if read_only:
            protect(name)
        publish(name, path, undo=undo)


@contextlib.contextmanager
def new_directory(path: Path, *, replace: bool = False) -> Iterator[Path]:
    """A directory to be filled with synced files, which is `path` after the block; an error in it leaves nothing.

    `replace`: one that is there is removed, with its contents.
    """
    make_dirs(path.absolute().parent)
    with staged(path.absolute()) as folder:
        make_dir(folder)
        yield folder
        publish_directory(folder, path, replace=replace)


def publish_directory(folder: Path, target: Path, *, replace: bool) -> None:
    """Moves a directory whose files are synced to `target`, as `new_directory` does."""
    for inner in sorted(each for each in folder.rglob("*") if each.is_dir()):
        sync_dir(inner)
    sync_dir(folder)
    if not (replace and os.path.lexists(target)):
        publish(folder, target)
        return
    with staged(target.absolute()) as old:  # renamed first: to remove it takes long, and a kill would leave neither
        rename(target, old)
        try:
            publish(folder, target, undo=False)
        except OSError:
            if not os.path.lexists(target):
                rename(old, target)
            raise


def publish(staged: Path, target: Path, *, undo: bool = True) -> None:
    """Moves a complete file or directory to `target`, and syncs its name to the disk.

    If that fails, `undo` removes a target that was not there before, so that the same command can be repeated; not
    where others may rely on it by now.
    """
    fresh = undo and not os.path.lexists(target)
    rename(staged, target)
    try:
        sync_dir(target.absolute().parent)
    except OSError:
        if fresh:
            with contextlib.suppress(OSError):  # keep the original error
                remove_tree(target)
        raise


def write_atomic(path: Path, data: Buffer, *, read_only: bool = False, staging: Path | None = None,
                 mode: int | None = None) -> None:
    """Replaces `path` by `data` atomically, synced: readers, also after a crash, see the complete old or new file.

    A crash leaves its partial file in `staging`, if that is writable and on the same file system; otherwise beside
    `path`. `mode` as for `create`.
    """
    for place in (staging, None):
        try:
            with new_file(path, read_only=read_only, staging=place, mode=mode, undo=False) as handle:
                write(handle, data)
            return
        except OSError as error:
            if place is None or error.errno not in NO_STAGING:
                raise


def write_passing(path: Path, data: Buffer) -> None:
    """Replaces `path` by `data` atomically, and leaves it to the system when that reaches the disk: for what tells of
    this moment, and is worth nothing after a crash. It is no change of the disk that matters, so no primitive makes it.
    """
    name = temporary_name(path)
    try:
        with name.open("xb") as handle:
            handle.write(data)
        name.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            name.unlink(missing_ok=True)
        raise


def create_exclusive(path: Path, data: Buffer, *, staging: Path | None = None, mode: int | None = None) -> bool:
    """Creates `path` with `data`, atomically; returns False, and writes nothing, if `path` exists. `staging` as for
    `write_atomic`."""
    if path.exists():
        return False
    for place in (staging, None):
        try:
            with staged(path, place) as name:
                write_synced(name, data, mode=mode)
                link(name, path)
        except FileExistsError:
            return False
        except OSError as error:
            if place is None or error.errno not in NO_STAGING:
                raise
        else:
            break
    sync_dir(path.parent)
    return True


def make_dirs(path: Path, *, mode: int | None = None) -> None:
    """Makes a directory and its missing parents, and syncs their names to the disk. `mode` as for `make_dir`. Raises
    `NotADirectoryError` for a file of such a name."""
    missing = []
    while not path.is_dir() and path.parent != path:
        missing.append(path)
        path = path.parent
    for directory in reversed(missing):
        try:
            make_dir(directory, mode=mode)
        except FileExistsError:  # another process was quicker
            if not directory.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(directory)) from None
        sync_dir(directory.parent)


@dataclass(slots=True)
class _Level:
    """A directory on the current path through a tree that is being removed."""

    name: str
    mark: tuple[int, int]  # device and inode
    subdirectories: list[str]  # those that are still to be removed


def _empty_by_descriptor(root: Path) -> None:
    """Removes the contents of `root`. Raises `OSError`, also if another process moves a directory meanwhile."""
    while not _emptied(root):
        pass  # another process removed the current directory: start again


def _emptied(root: Path) -> bool:
    descriptor = _open_dir(root, None)
    if descriptor is None:
        return True
    try:
        levels = [_level(root, "", descriptor)]
        while levels[-1].subdirectories or len(levels) > 1:
            if levels[-1].subdirectories:
                name = levels[-1].subdirectories.pop()
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
    """Removes the files of an open directory and lists its subdirectories. `root` is only for errors: full paths may be
    too long."""
    subdirectories = []
    with os.scandir(descriptor) as entries:
        for entry in sorted(entries, key=lambda entry: entry.name):
            if entry.is_dir(follow_symlinks=False):
                subdirectories.append(entry.name)
            else:
                remove(root / entry.name, dir_fd=descriptor)
    return _Level(name, _mark(descriptor), subdirectories)


def _open_dir(path: Path, dir_fd: int | None) -> int | None:
    """Opens a directory and makes it writable; `None` if it is gone, or was replaced by a file, which is removed."""
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
    """Like `_empty_by_descriptor`, on systems that cannot open directories (Windows): checks for links by path."""
    directories = [root]
    for folder in directories:  # grows
        if not os.access(folder, os.W_OK):
            folder.chmod(folder.stat().st_mode | stat.S_IRWXU)
        with contextlib.suppress(FileNotFoundError):  # another process is removing it, too
            for inner in sorted(folder.iterdir()):
                status = inner.lstat()
                if stat.S_ISDIR(status.st_mode) and not is_link(status):
                    directories.append(inner)
                else:
                    remove(inner)
    for folder in reversed(directories[1:]):
        remove_dir(folder)


def _mark(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


@contextlib.contextmanager
def _naming(path: Path | str) -> Iterator[None]:
    """Adds the file's name to errors that are raised for its descriptor."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def _named(path: Path, dir_fd: int | None) -> Path | str:
    return path if dir_fd is None else path.name


def _exists(path: Path, dir_fd: int | None) -> bool:
    if dir_fd is None:
        return path.exists()
    try:
        os.stat(path.name, dir_fd=dir_fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def forget(staged: Path) -> None:
    """Removes what was staged, if it is still there. Raises nothing: what ended the work is the error to report."""
    with contextlib.suppress(OSError):
        if staged.is_dir():
            remove_tree(staged)
        else:
            remove(staged)


def _full_fsync(descriptor: int) -> None:
    if sys.platform == "darwin":
        import fcntl

        fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
    else:
        os.fsync(descriptor)
