"""Implements `prep push`: uploads a manifest and its cache to an object store, so that training can read them there.

Objects have the names that the files have: what `aws s3 sync` or `rclone copy` would upload is the same. Each object is
read back and compared. A shard's group document comes last of its files, after that, so a shard that has it is whole
and need not be sent again. The manifest comes last of all: whoever sees it, sees all that it needs.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.cache.remote.shards import RemoteShard
from prep.cache.store import MARKER_BYTES, Cache
from prep.digest import digest_bytes
from prep.errors import CacheError, PathError
from prep.formatting import counted, format_bytes, shell_name
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.mirror import beside, is_url, local_path, shown, split_url
from prep.fs.paths import MARKER
from prep.fs.remote import create_object, read_object, replace_object, side_by_side, size_of, stream, upload_file
from prep.fs.tree import file_digest, listing_digest
from prep.fs.untrusted import read_regular
from prep.manifest.commands import repair_command
from prep.manifest.consistency import read_shards
from prep.manifest.document import LIMIT, Manifest, looks_like_manifest, read_manifest, require_local
from prep.manifest.opened import open_manifest
from prep.progress import Progress, Tick, silent

TRIES = 3  # uploads of an object that reads back as something else
GROUP = "zarr.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """What was uploaded."""

    url: str  # of the manifest
    shards: int
    sent: int  # shards of which something was sent
    bytes: int  # sent

    def as_json(self) -> dict[str, Any]:
        """The document of `prep push --json`."""
        return {"format": "latentry/push", "version": 1, "url": self.url, "shards": self.shards, "sent": self.sent,
                "bytes": self.bytes}

    def as_text(self) -> str:
        """The output of `prep push`."""
        return (f"{self.url}: {counted(self.shards, 'shard')}, {counted(self.sent, 'shard')} "
                f"({format_bytes(self.bytes)}) sent, the rest was there")


def push(path: Path, url: Path, *, recheck: bool = False, jobs: int = 8, progress: Progress = silent) -> PushReport:
    """Uploads the manifest at `path` and what it needs; `url` names the manifest, or a prefix that it goes below.

    What is there with the right bytes is not sent again; `recheck` reads it all to be sure. Raises `PathError`,
    `ManifestError`, `CacheError`.
    """
    require_local(path, "a manifest is uploaded from a directory")
    opened = open_manifest(read_manifest(path))
    target, root = _places(opened.manifest, url)
    shards = read_shards(opened.cache, opened.manifest)
    _check_target(target)
    upload = _Upload(opened.cache, opened.manifest, root, recheck)
    with (lock_directory(opened.cache.root, exclusive=False, patience=PATIENCE),
          progress("uploading", sum(shard.bytes for shard in shards), "bytes") as tick):
        upload.marker()
        for table in opened.manifest.document["tables"].values():
            upload.table(table)
        side_by_side(lambda shard: upload.shard(shard.remote, tick), shards, jobs, upload.stop)
    data = path.read_bytes()
    replace_object(target, data)
    if read_object(target, LIMIT) != data:
        raise CacheError(f"{target} does not read back as it was written", hint="run the same command again")
    return PushReport(url=target, shards=len(shards), sent=upload.shards_sent, bytes=upload.sent)


def _places(manifest: Manifest, url: Path) -> tuple[str, str]:
    """The URLs of the manifest and of its cache, which lie to each other as they do here. Raises `PathError`."""
    if not is_url(url):
        raise PathError(f"{url} is not in an object store, expected a URL like s3://bucket/dataset",
                        hint="name a bucket and a prefix with s3://, gs:// or az://")
    if not url.name.endswith(".json") or not split_url(url)[2]:
        url = url / manifest.path.name
    copy, cache = local_path(url), manifest.document["cache"]
    root = beside(copy, cache)
    if root is None:
        raise PathError(f"the manifest names the cache {cache}, which would lie outside the bucket of {shown(copy)}",
                        hint="name a URL with more parts, like s3://bucket/team/dataset/manifest.json")
    return shown(copy), shown(root)


def _check_target(url: str) -> None:
    """Raises `PathError` if there is an object that is no manifest."""
    try:
        data = read_object(url, LIMIT)
    except FileNotFoundError:
        return
    except OSError:
        data = b"larger than any manifest"
    if not looks_like_manifest(data[:1024]):
        raise PathError(f"{url} exists and is no manifest, so it is not replaced", hint="choose another URL")


class _Upload:
    """The upload of one cache. Threads share it."""

    def __init__(self, cache: Cache, manifest: Manifest, url: str, recheck: bool) -> None:
        self._cache, self._manifest, self._url, self._recheck = cache, manifest, url, recheck
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.sent = self.shards_sent = 0

    def marker(self) -> None:
        """Uploads the marker of the cache. Raises `CacheError` if there is another file of that name."""
        url, data = f"{self._url}/{MARKER}", read_regular(self._cache.root / MARKER, MARKER_BYTES)
        if not create_object(url, data) and read_object(url, MARKER_BYTES) != data:
            raise CacheError(f"{url} is not the marker of a cache of this version", hint="choose another URL")

    def table(self, digest: str) -> None:
        """Uploads a table, unless it is there."""
        path = self._cache.table(digest)
        name = path.relative_to(self._cache.root).as_posix()
        if file_digest(path) != digest:
            raise CacheError(f"table {digest} is damaged: its bytes do not match its name",
                             hint=repair_command(self._manifest))
        self._file(f"{self._url}/{name}", path, digest)

    def shard(self, shard: RemoteShard, tick: Tick) -> None:
        """Uploads a shard, unless it is there. Raises `CacheError` if it is damaged here."""
        root = self._cache.shard(shard.digest)
        prefix = f"{self._url}/{root.relative_to(self._cache.root).as_posix()}"
        if not self._recheck and self._is_there(prefix, root, shard):
            tick(shard.bytes)
            return
        digests = self._digests(root, shard)
        names = sorted(shard.files, key=lambda name: (name == GROUP, name))
        moved = 0
        for name in names:
            moved += self._file(f"{prefix}/{name}", root / name, digests[name])
            tick((root / name).stat().st_size)
        with self._lock:
            self.shards_sent += bool(moved)

    def _is_there(self, prefix: str, root: Path, shard: RemoteShard) -> bool:
        """Whether a shard was uploaded before: its group document is there, and each file has its size."""
        group = read_regular(root / GROUP, 1 << 20)
        try:
            return read_object(f"{prefix}/{GROUP}", 1 << 20, stop=self.stop) == group and all(
                size_of(f"{prefix}/{name}", stop=self.stop) == size for name, size in shard.files.items())
        except FileNotFoundError:
            return False

    def _digests(self, root: Path, shard: RemoteShard) -> Mapping[str, str]:
        try:
            digests = {name: file_digest(root / name) for name in shard.files}
            sizes = {name: (root / name).stat().st_size for name in shard.files}
        except FileNotFoundError:
            raise self._spoiled(shard) from None
        found = [{"path": name, "size": sizes[name], "sha256": digests[name]} for name in digests]
        if listing_digest(found) != shard.digest:
            raise self._spoiled(shard)
        return digests

    def _spoiled(self, shard: RemoteShard) -> CacheError:
        return CacheError(f"shard {shard.digest} is damaged or missing here, so it is not uploaded",
                          hint=repair_command(self._manifest, recorded=False))

    def _file(self, url: str, path: Path, digest: str) -> int:
        """Uploads a file unless it is there, reads it back, and returns the bytes sent. Raises `CacheError`."""
        sent, size = 0, path.stat().st_size
        for _ in range(TRIES + 1):
            if self._stored_digest(url, size) == digest:
                return sent
            upload_file(url, path, stop=self.stop)
            sent += size
            with self._lock:
                self.sent += size
        raise CacheError(f"{url} does not read back as it was written, after {counted(TRIES, 'upload')}",
                         hint=f"check the network and the store, then run the same command again for "
                         f"{shell_name(str(self._manifest.path))}")

    def _stored_digest(self, url: str, size: int) -> str | None:
        """The digest of an object's bytes; `None` if it is missing or has another size."""
        running = hashlib.sha256()
        try:
            if size_of(url, stop=self.stop) != size:
                return None
            for part in stream(url, size, stop=self.stop):
                running.update(part)
        except FileNotFoundError:
            return None
        return running.hexdigest() if size else digest_bytes(b"")
