"""Uploads files of caches. Each is read back and compared; a shard's group document comes last of its files.

So a shard that has it in the store is whole, and need not be sent again.
"""

from __future__ import annotations

import errno
import hashlib
import threading
from collections.abc import Container, Mapping
from pathlib import Path

from prep.cache.remote.shards import GROUP, RemoteShard
from prep.cache.store import Cache
from prep.digest import digest_bytes
from prep.errors import CacheError
from prep.formatting import counted
from prep.fs.remote.objects import read_object, size_of, stream, upload_file
from prep.fs.remote.retry import NEVER, side_by_side
from prep.fs.tree import file_digest, listing_digest
from prep.progress import Tick

FILES = 4  # uploaded at a time, of a shard: most are small, and wait
TRIES = 3  # uploads of an object that reads back as something else
AT_ONCE = 1 << 20  # bytes of an object that is read back by one request


class Uploader:
    """Uploads files of one cache, and counts the bytes. Threads share it. `repair` says how to mend damage here."""

    def __init__(self, cache: Cache, url: str, *, repair: str, stop: threading.Event = NEVER) -> None:
        self._cache, self._url, self._repair, self._stop = cache, url, repair, stop
        self._lock = threading.Lock()
        self.sent = 0

    def shard(self, shard: RemoteShard, lacking: Container[str] = (), tick: Tick = lambda _: None) -> int:
        """Uploads what the store lacks of a shard, and returns the bytes sent; `lacking` are files known to be missing.

        Raises `CacheError`, also if the shard is damaged here, and `Stopped`.
        """
        root = self._cache.shard(shard.digest)
        digests = self._digests(root, shard)

        def send(name: str) -> int:
            sent = self.file(root / name, digests[name], missing=name in lacking)
            tick(shard.files[name])
            return sent

        others = sorted(shard.files.keys() - {GROUP})
        return sum(side_by_side(send, others, FILES, threading.Event())) + send(GROUP)

    def table(self, digest: str) -> None:
        """Uploads a table, unless it is there. Raises `CacheError`, `Stopped`."""
        path = self._cache.table(digest)
        if file_digest(path) != digest:
            raise CacheError(f"table {digest} is damaged: its bytes do not match its name", hint=self._repair)
        self.file(path, digest)

    def file(self, path: Path, digest: str, *, missing: bool = False) -> int:
        """Uploads a file of the cache unless it is there, reads it back, and returns the bytes sent.

        Raises `CacheError`, `Stopped`.
        """
        url = f"{self._url}/{path.relative_to(self._cache.root).as_posix()}"
        sent, size = 0, path.stat().st_size
        for _ in range(TRIES + 1):
            if (sent or not missing) and self._stored_digest(url, size) == digest:
                return sent
            upload_file(url, path, stop=self._stop)
            sent += size
            with self._lock:
                self.sent += size
        raise CacheError(f"{url} does not read back as it was written, after {counted(TRIES, 'upload')}",
                         hint="check the network and the store, then run the same command again")

    def _digests(self, root: Path, shard: RemoteShard) -> Mapping[str, str]:
        try:
            digests = {name: file_digest(root / name) for name in shard.files}
            sizes = {name: (root / name).stat().st_size for name in shard.files}
        except FileNotFoundError:
            raise self._spoiled(shard) from None
        listing = [{"path": name, "size": sizes[name], "sha256": digests[name]} for name in digests]
        if listing_digest(listing) != shard.digest:
            raise self._spoiled(shard)
        return digests

    def _spoiled(self, shard: RemoteShard) -> CacheError:
        return CacheError(f"shard {shard.digest} is damaged or missing here, so it is not uploaded", hint=self._repair)

    def _stored_digest(self, url: str, size: int) -> str | None:
        """The digest of an object's bytes; `None` if it is missing or has another size."""
        try:
            if size <= AT_ONCE:
                return digest_bytes(read_object(url, size, stop=self._stop))
            if size_of(url, stop=self._stop) != size:
                return None
            running = hashlib.sha256()
            for part in stream(url, size, stop=self._stop):
                running.update(part)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno == errno.EFBIG:
                return None
            raise
        return running.hexdigest()
