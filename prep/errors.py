"""Defines every error that users can meet, as one tree of classes with exit codes.

    Problem                    an expected failure: one message, perhaps a hint, an exit code
    ├── UsageError         2   the command line is invalid
    ├── ConfigError        3   recipe or training config: unknown key, bad value
    ├── ManifestError      4   manifest unreadable, damaged, or of another version
    ├── PathError          5   paths overlap, leave their root, or are of the wrong kind
    ├── ModelError         6   model missing, of another family, or not the model that made the cache
    ├── CacheError         7   the cache or a checkpoint is incomplete or damaged
    ├── EmptyPlanError     8   nothing to train
    ├── OutOfMemoryError   9   the device or the computer has too little memory
    └── StoppedError      75   a signal asked the run to stop before all its work was done

Other exit codes: 0 done, 1 done with findings, 70 a bug in Latentry (any exception not in this tree), 130 interrupted.
A bad picture is not an error but a `findings.Finding`.
"""

from __future__ import annotations

import errno

OUT_OF_FILES = {errno.EMFILE, errno.ENFILE}
MORE_FILES = "let the process open more files: ulimit -n 1024, then run the same command again"
EXIT_FINDINGS = 1
EXIT_USAGE = 2
EXIT_BUG = 70
EXIT_INTERRUPTED = 130


class Problem(Exception):
    """An expected failure: `message` has what was seen and expected, `hint` what to do; `kind` names it in JSON."""

    exit_code = 2
    kind = "problem"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(Problem):
    """The command line is invalid."""

    exit_code = 2
    kind = "usage"


class ConfigError(Problem):
    """A recipe or training config has an unknown key or a bad value."""

    exit_code = 3
    kind = "config"


class ManifestError(Problem):
    """A manifest cannot be read, is damaged, or is of another version."""

    exit_code = 4
    kind = "manifest"


class PathError(Problem):
    """Paths overlap, leave their root, or are of the wrong kind."""

    exit_code = 5
    kind = "path"


class ModelError(Problem):
    """A model is missing, of another family, or not the model that made the cache."""

    exit_code = 6
    kind = "model"


class CacheError(Problem):
    """The cache or a checkpoint is incomplete or damaged."""

    exit_code = 7
    kind = "cache"


class EmptyPlanError(Problem):
    """The step plan has no steps."""

    exit_code = 8
    kind = "empty-plan"


class OutOfMemoryError(Problem):
    """The device or the computer has too little memory for the requested work."""

    exit_code = 9
    kind = "memory"


class StoppedError(Problem):
    """SIGTERM or SIGUSR1 asked the run to stop; finished work is kept, and the same command continues."""

    exit_code = 75  # as EX_TEMPFAIL of sysexits.h: try again
    kind = "stopped"


def from_system(error: OSError, *, in_cache: bool = False, or_else: str = "") -> Problem:
    """Converts an error of the operating system: to `CacheError` for a full disk or an error in a cache.

    Anything else becomes a `PathError`. `or_else`: what helps besides freeing space.
    """
    where = f"{error.filename}: " if error.filename else ""
    what = f"{where}{error.strerror or first_line(error)}"
    if error.errno in (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC)):
        free = f"free some space, {or_else}," if or_else else "free some space"
        return CacheError(what, hint=f"{free} and run the same command again; finished work is kept")
    if error.errno in OUT_OF_FILES:
        return PathError(what, hint=MORE_FILES)
    if in_cache:
        return CacheError(what, hint="check the disk and the permissions of the cache, and run the same command again; "
                          "finished work is kept")
    return PathError(what, hint="check the path, its permissions and the disk")


def is_panic(error: BaseException) -> bool:
    """Whether the error is a panic of a library in Rust, which derives from `BaseException` alone."""
    return type(error).__module__ == "pyo3_runtime"


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class."""
    return str(error).strip().partition("\n")[0] or type(error).__name__
