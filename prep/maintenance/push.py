"""Implements `prep push`: uploads a manifest and its cache to an object store, so that training can read them there.

A shard's commits follow it, so that `prep encode` can go on in the store.

Objects have the names that the files have: what `aws s3 sync` or `rclone copy` would upload is the same. Each object is
read back and compared. A shard's group document comes last of its files, after that, so a shard that has it is whole
and need not be sent again. The manifest comes last of all: whoever sees it, sees all that it needs.
"""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.cache.commits import MOST, parse_commit, tasks_by_shard
from prep.cache.ledger.ledger import commit_document
from prep.cache.remote.documents import check_alone
from prep.cache.remote.shards import GROUP, RemoteShard
from prep.cache.remote.upload import Uploader
from prep.cache.store import MARKER_BYTES, Cache
from prep.errors import CacheError, PathError
from prep.formatting import shards_moved
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.paths import MARKER
from prep.fs.place import Place, require_local, require_stored
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.objects import create_checked, read_object, size_of
from prep.fs.remote.retry import side_by_side
from prep.fs.remote.storage import put
from prep.fs.text import read_small
from prep.fs.untrusted import read_regular
from prep.maintenance.repair import salvaged_tasks
from prep.manifest.commands import repair_command
from prep.manifest.consistency import read_shards
from prep.manifest.document import Manifest, check_manifest_place, read_manifest
from prep.manifest.opened import open_manifest
from prep.parse import Unparsed
from prep.progress import Progress, Tick, silent


@dataclass(frozen=True, kw_only=True, slots=True)
class PushReport:
    """What was uploaded."""

    url: Bucket  # of the manifest
    shards: int
    sent: int  # shards of which something was sent
    bytes: int  # sent

    def as_json(self) -> dict[str, Any]:
        """The document of `prep push --json`."""
        return {"format": "latentry/push", "version": 1, "url": str(self.url), "shards": self.shards, "sent": self.sent,
                "bytes": self.bytes}

    def as_text(self) -> str:
        """The output of `prep push`."""
        return f"{self.url}: {shards_moved(self.shards, self.sent, self.bytes, 'sent', 'there')}"


def push(path: Place, url: Place, *, recheck: bool = False, jobs: int = 8, progress: Progress = silent) -> PushReport:
    """Uploads the manifest at `path` and what it needs; `url` names the manifest, or a prefix that it goes below.

    What is there with the right bytes is not sent again; `recheck` reads it all to be sure. Raises `PathError`,
    `ManifestError`, `CacheError`.
    """
    here = require_local(path, "manifest")
    manifest = read_manifest(path, fetch=False)
    require_local(manifest.cache, "cache")
    opened = open_manifest(manifest)
    target, root = _places(opened.manifest, url)
    shards = read_shards(opened.cache, opened.manifest)
    check_manifest_place(target)
    upload = _Upload(opened.cache, opened.manifest, root, recheck)
    with (lock_directory(opened.cache.root, exclusive=False, patience=PATIENCE),
          progress("uploading", sum(shard.bytes for shard in shards), "bytes") as tick):
        upload.marker()
        for table in opened.manifest.document["tables"].values():
            upload.files.table(table)
        side_by_side(lambda shard: upload.shard(shard.remote, tick), shards, jobs, upload.stop)
    put(target, read_small(here, regular=True))
    return PushReport(url=target, shards=len(shards), sent=upload.shards_sent, bytes=upload.files.sent)


def _places(manifest: Manifest, url: Place) -> tuple[Bucket, Bucket]:
    """The places of the manifest and of its cache, which lie to each other as they do here. Raises `PathError`."""
    url = require_stored(url, "s3://bucket/dataset", "name a bucket and a prefix with s3://, gs:// or az://")
    if not url.name.endswith(".json") or not url.key:
        url = url / manifest.path.name
    cache = manifest.document["cache"]
    root = url.parent.follow(cache)
    if root is None:
        raise PathError(f"the manifest names the cache {cache}, which would lie outside the bucket of {url}",
                        hint="name a URL with more parts, like s3://bucket/team/dataset/manifest.json")
    return url, root


class _Upload:
    """The upload of one cache. Threads share it."""

    def __init__(self, cache: Cache, manifest: Manifest, target: Bucket, recheck: bool) -> None:
        self._cache, self._target, self._recheck = cache, target, recheck
        self._lock = threading.Lock()
        self.stop = threading.Event()
        self.files = Uploader(cache, str(target), repair=repair_command(manifest, recorded=False), stop=self.stop)
        self._tasks = tasks_by_shard(cache)
        self.shards_sent = 0

    def marker(self) -> None:
        """Uploads the marker of the cache. Raises `CacheError` if there is another file of that name, `PathError` in
        another cache."""
        url, data = (self._target / MARKER).url, read_regular(self._cache.root / MARKER, MARKER_BYTES)
        try:
            marker = read_object(url, MARKER_BYTES)
        except FileNotFoundError:
            check_alone(self._target)
            marker = create_checked(url, data, MARKER_BYTES)
        if marker != data:
            raise CacheError(f"{url} is not the marker of a cache of this version", hint="choose another URL")

    def shard(self, shard: RemoteShard, tick: Tick) -> None:
        """Uploads a shard, unless it is there. Raises `CacheError` if it is damaged here."""
        root = self._cache.shard(shard.digest)
        prefix = f"{self._target}/{root.relative_to(self._cache.root).as_posix()}"
        if not self._recheck and self._is_there(prefix, root, shard):
            tick(shard.bytes)
            sent = 0
        else:
            sent = self.files.shard(shard, tick=tick)
        self._commits(shard.digest)
        with self._lock:
            self.shards_sent += bool(sent)

    def _commits(self, digest: str) -> None:
        """Uploads the commits that name a shard: also of one that was there, whose upload may have been killed before.

        If none names it, it gets one as `adopt_orphans` writes them: in the store, rows without a commit do not count.
        Raises `CacheError`.
        """
        own = self._tasks.get(digest, ())
        named = [self._commit(task, self._cache.read(self._cache.commit(task), MOST), digest) for task in own]
        if any(named):
            return
        shard, tasks = salvaged_tasks(self._cache, digest)
        for task in tasks:
            data = commit_document(task.key, task.field, shard, [], {"salvaged": digest})
            if self._commit(task.key, data, digest):
                return

    def _commit(self, task: str, data: bytes, digest: str) -> bool:
        """Uploads a commit, unless there is one; returns whether the one that is there then names the shard."""
        url = f"{self._target}/{self._cache.commit(task).relative_to(self._cache.root).as_posix()}"
        with suppress(FileNotFoundError):
            return _names(url, read_object(url, MOST, stop=self.stop), task, digest)
        return _names(url, create_checked(url, data, MOST, stop=self.stop), task, digest)

    def _is_there(self, prefix: str, root: Path, shard: RemoteShard) -> bool:
        """Whether a shard was uploaded before: its group document is there, and each file has its size."""
        group = read_regular(root / GROUP, 1 << 20)
        try:
            return read_object(f"{prefix}/{GROUP}", 1 << 20, stop=self.stop) == group and all(
                size_of(f"{prefix}/{name}", stop=self.stop) == size for name, size in shard.files.items())
        except FileNotFoundError:
            return False


def _names(url: str, data: bytes, task: str, digest: str) -> bool:
    """Whether a commit in the store is intact and names the shard."""
    with suppress(Unparsed):
        shard = parse_commit(data, task, url).shard
        return shard is not None and shard.digest == digest
    return False
