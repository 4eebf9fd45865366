"""Makes known here what a cache in an object store has.

    COPIES/latentry.json  tables/  plans/  damaged/  tmp/    as in any cache
           shards/ab/ab12…/         copies of whole shards, fetched when they are read, removed to make room
           headers/ab/ab12…/        documents and keys of shards
           commits/ab/ab12….json    those of the store whose shards are whole there
           unsent/                  a cache of shards that were made here, until they are uploaded

So a ledger is loaded from it as from any other cache. What counts is what the store has: `refresh` lists commits and
shards there, and fetches commits and headers that are new. The store has no locks, and needs none: objects are only
added, and what no commit names is not seen.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import PurePosixPath

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.commits import MOST, Commit, parse_commit, read_commit
from prep.cache.publish import retire_shard
from prep.cache.remote.headers import drop_header, has_header, keep_header
from prep.cache.remote.shards import GROUP, TRIES, RemoteShard, lock_shard, url_in
from prep.cache.store import SUFFIX, Cache
from prep.fs import atomic
from prep.fs.remote.objects import delete_object, list_objects, read_object
from prep.fs.remote.retry import NEVER, side_by_side
from prep.parse import Unparsed, digest_of

JOBS = 32  # commits and keys fetched at a time: small requests, which mostly wait
Files = Mapping[str, int]  # names and sizes of a shard's objects


def refresh(cache: Cache) -> None:
    """Makes known here the commits in the store of a cache whose shards are whole there, and no others.

    Caches on this computer are what they are. Raises `CacheError` for a commit of another version, `StoreError`.
    """
    if cache.store is None:
        return
    for digest in list(cache.unsent.names("damaged")):  # the store has it, or it is encoded again
        with lock_shard(digest, NEVER):
            if cache.unsent.damaged(digest).exists():  # else another process has replaced it meanwhile
                retire_shard(cache.unsent, digest)
    before = set(cache.names("commits"))  # first: what is here now was in the store, so it is in the list, or gone
    commits = dict(_commits(cache))
    shards = _shards(cache)
    new = [task for task, size in commits.items() if task not in before or not _is_known(cache, task, size, shards)]
    stop = threading.Event()
    side_by_side(lambda task: _fetch(cache, task, shards, stop), new, JOBS, stop)
    for task in before - commits.keys():
        atomic.remove_tree(cache.commit(task))
    _drop_headers(cache, shards)


def _drop_headers(cache: Cache, shards: Mapping[str, Files]) -> None:
    """Removes the headers of shards that are gone from the store: `prep gc` ran there."""
    stop = threading.Event()

    def drop(digest: str) -> None:
        with lock_shard(digest, stop):
            # Asked now: another process may have uploaded or taken it since the shards were listed.
            if GROUP not in files_of(cache, digest, stop):
                drop_header(cache, digest)

    gone = [digest for digest in cache.shards(cache.headers) if GROUP not in shards.get(digest, {})]
    side_by_side(drop, gone, JOBS, stop)


def refresh_task(cache: Cache, task: str) -> None:
    """Makes known here whether the store of a cache has the commit of a task. Raises as `refresh` does."""
    if cache.store is None or read_commit(cache, task) is not None:
        return
    with suppress(FileNotFoundError):
        commit = _read(cache, task, NEVER)
        if commit is not None and commit[1].shard is not None:
            digest = commit[1].shard.digest
            _take(cache, task, *commit, {digest: files_of(cache, digest)}, NEVER)
        elif commit is not None:
            _take(cache, task, *commit, {}, NEVER)


def _commits(cache: Cache) -> Iterable[tuple[str, int]]:
    """The tasks of the commits in the store, and the sizes of these objects."""
    for name, listed in list_objects(f"{cache.store}/commits").items():
        with suppress(Unparsed):
            task = digest_of(PurePosixPath(name).name.removesuffix(SUFFIX["commits"]), "commits")
            if name == f"{task[:2]}/{task}{SUFFIX['commits']}":
                yield task, listed.size


def _shards(cache: Cache) -> dict[str, dict[str, int]]:
    """The objects of each shard in the store, but empty ones: they stand for directories, and no file is empty."""
    shards: dict[str, dict[str, int]] = defaultdict(dict)
    for name, listed in list_objects(f"{cache.store}/shards").items():
        fan, digest, file = [*name.split("/", 2), "", ""][:3]
        if digest.startswith(fan) and listed.size:
            shards[digest][file] = listed.size
    return shards


def files_of(cache: Cache, digest: str, stop: threading.Event = NEVER) -> dict[str, int]:
    """The objects of a shard in the store, as in `_shards`."""
    listed = list_objects(f"{cache.store}/shards/{digest[:2]}/{digest}", stop=stop)
    return {name: entry.size for name, entry in listed.items() if entry.size}


def _is_known(cache: Cache, task: str, size: int, shards: Mapping[str, Files]) -> bool:
    """Whether the copy of a commit is as long as the commit is, and its shard is here and whole in the store."""
    commit = read_commit(cache, task)
    if commit is None or cache.commit(task).stat().st_size != size:
        return False
    return commit.shard is None or (_is_whole(commit, shards) and has_header(cache, commit.shard.digest))


def _is_whole(commit: Commit, shards: Mapping[str, Files]) -> bool:
    assert commit.shard is not None
    files = shards.get(commit.shard.digest, {})
    return GROUP in files and sum(files.values()) == commit.shard.bytes


def _fetch(cache: Cache, task: str, shards: Mapping[str, Files], stop: threading.Event) -> None:
    """Fetches a commit, and what a ledger needs of its shard. Removes its copy if it does not count."""
    try:
        commit = _read(cache, task, stop)
    except FileNotFoundError:  # removed since it was listed
        commit = None
    if commit is None or not _take(cache, task, *commit, shards, stop):
        atomic.remove_tree(cache.commit(task))


def _read(cache: Cache, task: str, stop: threading.Event) -> tuple[bytes, Commit] | None:
    """A commit in the store; `None` if it is damaged there. Raises `FileNotFoundError`."""
    url = cache.object(cache.commit(task))
    for _ in range(TRIES):
        with suppress(Unparsed):
            data = read_object(url, MOST, stop=stop)
            return data, parse_commit(data, task, url)
    return None


def _take(cache: Cache, task: str, data: bytes, commit: Commit, shards: Mapping[str, Files],
          stop: threading.Event) -> bool:
    """Makes a commit known here, after the header of its shard, unless its shard is not whole in the store."""
    if commit.shard is not None and not (_is_whole(commit, shards) and
                                         _take_shard(cache, commit, shards[commit.shard.digest], stop)):
        return False
    path = cache.commit(task)
    cache.make_dirs(path.parent)
    atomic.remove_directory_in_way(path)
    cache.write(path, data)
    return True


def _take_shard(cache: Cache, commit: Commit, files: Files, stop: threading.Event) -> bool:
    """Makes sure that the header of a commit's shard is here; returns whether that was possible."""
    assert commit.shard is not None
    digest = commit.shard.digest
    with lock_shard(digest, stop):
        if has_header(cache, digest):
            return True
        for _ in range(TRIES):
            with suppress(Unparsed, FileNotFoundError):
                shard = _described(cache, commit, files, stop)
                keep_header(cache, shard, _keys(cache, shard, stop))
                return True
    return False


def _described(cache: Cache, commit: Commit, files: Files, stop: threading.Event) -> RemoteShard:
    """What the documents of a shard's arrays say. Raises `Unparsed` unless commit and sizes agree, `FileNotFoundError`.
    """
    assert commit.shard is not None
    digest, rows, arrays = commit.shard.digest, commit.shard.rows, list[ArraySpec]()
    for name in files:
        array, _, rest = name.partition("/")
        if rest == GROUP and array != shard_format.KEY:
            shard_format.checked_name(array, name)
            document = read_object(url_in(cache, digest, name), shard_format.MAX_DOCUMENT, stop=stop)
            spec, count = shard_format.parse_array(document, array, name)
            if count != rows:
                raise Unparsed(f"{name} has {count} rows, expected {rows}")
            arrays.append(spec)
    shard = RemoteShard(digest=digest, field=commit.field, rows=rows, bytes=commit.shard.bytes, arrays=tuple(arrays))
    if not arrays or shard.files != files:
        raise Unparsed(f"shard {digest} has other files than its documents say")
    return shard


def _keys(cache: Cache, shard: RemoteShard, stop: threading.Event) -> bytes:
    """A shard's file of keys. Raises `Unparsed` if its checksum does not match, `FileNotFoundError`."""
    name = shard_format.KEY_PATH
    data = read_object(url_in(cache, shard.digest, name), shard.files[name], stop=stop)
    if shard_format.crc_bytes(data[:-shard_format.CRC_BYTES]) != data[-shard_format.CRC_BYTES:]:
        raise Unparsed(f"the keys of shard {shard.digest} do not match their checksum")
    return data


def forget_shard(cache: Cache, digest: str) -> None:
    """Makes a shard that is damaged in the store of a cache count as missing, so that it is encoded again."""
    for task in list(cache.names("commits")):
        commit = read_commit(cache, task)
        if commit is not None and commit.shard is not None and commit.shard.digest == digest:
            cache.discard(cache.commit(task))
    with lock_shard(digest, NEVER):
        delete_object(url_in(cache, digest, GROUP))
        drop_header(cache, digest)


def forget_commit(cache: Cache, commit: Commit) -> bool:
    """Removes what is known here of a commit in a store, whose header is damaged here: it is fetched again. Returns
    whether `cache` is in a store."""
    if cache.store is None:
        return False
    atomic.remove_tree(cache.commit(commit.task))
    if commit.shard is not None:
        with lock_shard(commit.shard.digest, NEVER):
            drop_header(cache, commit.shard.digest)
    return True
