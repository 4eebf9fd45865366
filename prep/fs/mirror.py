"""Names of objects in stores: URLs like s3://bucket/key, and the local directory where each has its copy.

    DIR/whole/s3/BUCKET/KEY…    copies: manifests, tables, whole shards
    DIR/headers/s3/BUCKET/KEY…  caches whose shards have documents, keys and shard indexes, but no rows
    DIR/work/s3/BUCKET/KEY…     caches like those, into which prep encode encodes
    DIR/runs/s3/BUCKET/KEY…     runs that train run trains and uploads
    DIR/coming/                 how much room there is, and downloads under way: an empty, locked file each, whose name
                                says how many bytes it will take
    DIR/locks/000…fff           locks, each for all shards whose digest begins so, and other copies whose path's does

Pictures, captions and masks have no copies: they are read when they are needed (`prep.fs.blob`).

DIR is LATENTRY_REMOTE_DIR, or `remote` in the user's cache directory. A copy lies where its URL says, so relative names
in a manifest lead from copy to copy as they lead from object to object. All of it may be deleted at any time.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath
from urllib.parse import urlsplit

from prep.errors import PathError
from prep.formatting import without_secrets

DIRECTORY = "LATENTRY_REMOTE_DIR"
LIMIT = "LATENTRY_REMOTE_LIMIT"
SCHEMES = ("s3", "gs", "az")
# What besides scheme and bucket decides which store it is: another one must not share its copies.
ENDPOINTS = {"s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"), "gs": ("GOOGLE_BASE_URL",),
             "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME")}
WHOLE, HEADERS, WORK, RUNS, LOCKS, COMING = "whole", "headers", "work", "runs", "locks", "coming"
_BEGINNINGS = tuple(f"{scheme}://" for scheme in SCHEMES)


class ListedUrl(str):
    """The URL of an object as a listing named it: all that follows the bucket is its key, also `?`, `#` and `\\`."""

    __slots__ = ()


def is_object(file: str) -> bool:
    """Whether the name of a blob's file is the URL of an object. No path has two slashes there."""
    return file.startswith(_BEGINNINGS)


def identity_of(url: str) -> str:
    """A name of an object that is another in another store."""
    scheme, bucket, key = split_url(ListedUrl(url))
    return "/".join((_store_name(scheme), bucket, key))


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


def is_url(path: Path | str) -> bool:
    """Whether `path` names an object, as a URL or as what `Path` makes of one (s3:/bucket/key)."""
    return PurePosixPath(path).parts[:1] in {(f"{scheme}:",) for scheme in SCHEMES}


def local_path(path: Path) -> Path:
    """Where the local copy of an object lies; any other path as it is. Raises `PathError`."""
    if not is_url(path):
        return path
    scheme, bucket, key = split_url(path)
    return _tree(WHOLE, scheme).joinpath(bucket, *PurePosixPath(key).parts)


def refuse_url(path: Path) -> None:
    """Raises `PathError` if `path` names an object: for what works on this computer's disks only."""
    if is_url(path):
        scheme, bucket, key = split_url(path)
        raise PathError(f"{scheme}://{bucket}/{key} is in an object store, where this command does not work",
                        hint="name a place on this computer; of a manifest, prep pull MANIFEST DIR downloads what it "
                        "needs, and prep push MANIFEST URL uploads it again, to a new place without what no manifest "
                        "needs")


def check_here(path: Path, role: str) -> None:
    """Raises `PathError` if `path` names an object; `role` is what it should be, on this computer: "prompt file"."""
    if is_url(path):
        raise PathError(f"{role} {shown(path)} is in an object store, expected a path on this computer",
                        hint="name one; what is to be read can be downloaded first, and what is written uploaded later")


def url_of(path: Path) -> str | None:
    """The URL of the object whose local copy `path` is, or would be; `None` for any other path."""
    return _url_below(path, WHOLE)


def run_url(path: Path) -> str | None:
    """The URL of what `path` is in a directory where this computer works on a run; `None` for any other path."""
    return _url_below(path, RUNS)


def _url_below(path: Path, kind: str) -> str | None:
    try:
        root = mirror() / kind
        parts = _plain(path).relative_to(root).parts
    except (PathError, ValueError):
        return None
    for scheme in SCHEMES:
        if len(parts) > 1 and parts[0] == _tree(kind, scheme).name:
            return f"{scheme}://{'/'.join(parts[1:])}"
    return None


def shown(path: Path) -> str:
    """A path for messages: the URL if it names an object, or is the copy of one or of a run."""
    if is_url(path):
        scheme, bucket, key = split_url(path)
        return f"{scheme}://{bucket}/{key}".rstrip("/")
    return url_of(path) or run_url(path) or str(path)


def beside(path: Path, relative: str) -> Path | None:
    """The copy that a copy's relative name leads to; `None` if that leaves the bucket, or names the bucket itself."""
    found = Path(os.path.normpath(path.parent / relative))
    here, there = url_of(path), url_of(found)
    if here is None or there is None or split_url(here)[:2] != split_url(there)[:2] or not split_url(there)[2]:
        return None
    return found


def headers_root(root: Path) -> Path:
    """The cache of headers that belongs to `root`, the local copy of a cache."""
    return mirror() / HEADERS / root.relative_to(mirror() / WHOLE)


def work_root(url: Path | str) -> Path:
    """The directory in which this computer works on the cache at a URL. Raises `PathError`."""
    return mirror() / WORK / local_path(Path(url)).relative_to(mirror() / WHOLE)


def run_root(url: Path | str) -> Path:
    """The directory in which this computer works on the run at a URL. Raises `PathError`."""
    return mirror() / RUNS / local_path(Path(url)).relative_to(mirror() / WHOLE)


def split_url(url: Path | str) -> tuple[str, str, str]:
    """Scheme, bucket and key of an object. Raises `PathError` for a URL with more, or that leaves its bucket."""
    if isinstance(url, ListedUrl):
        scheme, _, rest = url.partition("://")
        bucket, _, key = rest.partition("/")
        return scheme, bucket, key
    scheme, *parts = PurePosixPath(str(url).replace("\\", "/")).parts
    given = f"{scheme}//{'/'.join(parts)}"
    named = without_secrets(given)
    if not parts:
        raise PathError(f"{named} names no bucket", hint="name an object, like s3://bucket/dataset/manifest.json")
    if named != given and "?" in given and given.endswith(".tar"):
        raise PathError(f"{named}… has a question mark, with which a query begins in a URL, expected a name or a glob "
                        "without one", hint="a glob of tars in a store has * or a range like [0-9] in its place")
    if named != given:
        raise PathError(f"{named} was given with a user, a query or a fragment, expected only bucket and key",
                        hint="credentials come from the environment, like AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY")
    place: list[str] = []
    for part in parts:
        if part == ".." and len(place) < 2:
            raise PathError(f"{named} leaves its bucket", hint="name an object without .. in its key")
        place = place[:-1] if part == ".." else [*place, part]
    return scheme.removesuffix(":"), place[0], "/".join(place[1:])


def _tree(kind: str, scheme: str) -> Path:
    return mirror() / kind / _store_name(scheme)


def _store_name(scheme: str) -> str:
    given = [os.environ[name] for name in ENDPOINTS[scheme] if os.environ.get(name)]
    hosts = [re.sub(r"[^\w.-]", "_", (urlsplit(one).netloc or one).rpartition("@")[2]) for one in given[:1]]
    return "@".join([scheme, *hosts])
