"""Locates the user's cache directory, and makes private directories in it that nobody else can write to.

    Linux    $XDG_CACHE_HOME/latentry, or ~/.cache/latentry
    macOS    ~/Library/Caches/latentry
    Windows  %LOCALAPPDATA%\\latentry\\Cache

The environment variable LATENTRY_USER_CACHE names another directory.
"""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

import platformdirs

from prep.fs.atomic import make_dirs

VARIABLE = "LATENTRY_USER_CACHE"
OTHERS_ENTER = 0o077  # permission bits of everyone but the owner
OTHERS_WRITE = 0o022


def user_cache() -> Path | None:
    """Latentry's directory among the user's caches, which may not exist; `None` for a user without a home directory."""
    path = Path(os.environ.get(VARIABLE) or platformdirs.user_cache_dir("latentry", appauthor=False))
    return path if path.is_absolute() or os.environ.get(VARIABLE) else None  # "~/.cache" without a home directory


def why_not_private(path: Path) -> str | None:
    """Why the directory at `path` cannot be trusted; `None` if this user owns it and nobody else can write to it.

    On systems without owners (Windows), every directory is trusted: there, a user's own are closed to others. Raises
    `OSError`.
    """
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory"
    if not hasattr(os, "geteuid"):
        return None
    if status.st_uid != os.geteuid():
        return f"it belongs to user {status.st_uid}, not to user {os.geteuid()}"
    mode = stat.S_IMODE(status.st_mode)
    return f"others can write to it (mode {mode:04o})" if mode & OTHERS_WRITE else None


def make_private(path: Path) -> None:
    """Makes the directory at `path` if it is missing, with mode 0700; removes others' access if it exists.

    Raises `OSError`, and its subclass `PermissionError` for a directory that cannot be trusted.
    """
    make_dirs(path.parent)
    with contextlib.suppress(FileExistsError):
        path.mkdir(mode=0o700)
    if why := why_not_private(path):
        raise PermissionError(f"{path} is not used: {why}")
    if hasattr(os, "geteuid") and path.lstat().st_mode & OTHERS_ENTER:
        path.chmod(0o700)
