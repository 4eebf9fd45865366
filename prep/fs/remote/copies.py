"""Where this computer keeps copies of what is in stores.

    DIR/whole/s3/BUCKET/KEY…  copies: manifests, and of caches whole shards, tables, commits, documents and keys
                              (`prep.cache.remote.stored`)
    DIR/runs/s3/BUCKET/KEY…   runs that train run trains and uploads
    DIR/coming/               how much room there is, and downloads under way: an empty, locked file each, whose name
                              says how many bytes it will take
    DIR/locks/000…fff         locks, each for all shards whose digest begins so, and other copies whose path's does

Pictures, captions and masks have no copies: they are read when they are needed (`prep.fs.blob`).

DIR is LATENTRY_REMOTE_DIR, or `remote` in the user's cache directory. A copy lies where its URL says, so relative names
in a manifest lead from copy to copy as they lead from object to object. All of it may be deleted at any time.
"""

from __future__ import annotations

import os
from pathlib import Path, PurePosixPath

from prep.errors import PathError
from prep.fs.remote.bucket import SCHEMES, Bucket, store_name

DIRECTORY = "LATENTRY_REMOTE_DIR"
LIMIT = "LATENTRY_REMOTE_LIMIT"
WHOLE, RUNS, LOCKS, COMING = "whole", "runs", "locks", "coming"
EARLIER = ("headers", "work")  # of earlier versions, which kept keys and what they encoded beside the copies


def mirror() -> Path:
    """The directory of local copies, which may not exist. Raises `PathError` for a user without a home directory."""
    named = os.environ.get(DIRECTORY)
    if named:
        return _plain(Path(named))
    from prep.fs.user_cache import user_cache  # here: --help needs no platformdirs

    home = user_cache()
    if home is None:
        raise PathError("there is no directory for local copies of what is in an object store: this user has no home",
                        hint=f"name one: export {DIRECTORY}=DIR")
    return _plain(home / "remote")


def more_room(path: str | bytes | int | None) -> str:
    """What helps if there is no space left for a file among the local copies; "" for a file elsewhere, or for none."""
    try:
        if not path or isinstance(path, int) or mirror() not in _plain(Path(os.fsdecode(path))).parents:
            return ""
    except (PathError, ValueError):
        return ""
    return f"or name a directory on another disk with {DIRECTORY}=DIR, or let copies take less with {LIMIT}=20GB"


def _plain(path: Path) -> Path:
    """An absolute path without `..`, which does not follow links."""
    return Path(os.path.normpath(path.absolute()))


def directory_of(place: Path | Bucket) -> Path:
    """A directory on this computer; of a cache in a store, that of its copies. Raises `PathError`."""
    return copy_of(place) if isinstance(place, Bucket) else place


def copy_of(place: Bucket) -> Path:
    """Where the local copy of an object lies. Raises `PathError`."""
    return _root(WHOLE, place)


def run_root(place: Bucket) -> Path:
    """The directory in which this computer works on a run in a store. Raises `PathError`."""
    return _root(RUNS, place)


def _root(kind: str, place: Bucket) -> Path:
    return _tree(kind, place.scheme).joinpath(place.bucket, *PurePosixPath(place.key).parts)


def original_of(path: Path) -> Path | Bucket:
    """The place whose copy a path is, or would be, as runs of earlier versions name it; any other path as it is."""
    return copied(path) or path


def copied(path: Path) -> Bucket | None:
    """The object whose local copy `path` is, or would be; `None` for any other path."""
    try:
        parts = _plain(path).relative_to(mirror() / WHOLE).parts
    except (PathError, ValueError):
        return None
    return next((Bucket(scheme, parts[1], "/".join(parts[2:])) for scheme in SCHEMES
                 if len(parts) > 1 and parts[0] == _tree(WHOLE, scheme).name), None)


def _tree(kind: str, scheme: str) -> Path:
    return mirror() / kind / store_name(scheme)
