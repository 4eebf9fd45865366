"""Working copies of caches in object stores, into which `prep encode` encodes as into any cache.

A working copy has the commits of the store, and of the shards that they name all but rows, which are holes: so a ledger
is loaded from it as from any other cache. What counts is what the store has. `refresh` lists commits and shards there,
and fetches commits and keys that are new. A shard that was encoded here is uploaded, read back, and only then named by
a commit, which is created on the condition that there is none (`prep.cache.ledger.ledger.write_commit`). The store
has no locks, and needs none: objects are only added, and what no commit names is not seen.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath

from prep.arrays import ArraySpec
from prep.cache import shard_format
from prep.cache.commits import MOST, Commit, parse_commit, read_commit
from prep.cache.remote.documents import check_alone
from prep.cache.remote.quota import QUOTA, make_dirs
from prep.cache.remote.shards import GROUP, TRIES, RemoteShard, lock_shard, move_in, register
from prep.cache.remote.upload import Uploader
from prep.cache.shard_header import read_header
from prep.cache.store import (
    MARKER_BYTES,
    SUFFIX,
    Cache,
    cache_at,
    check_can_create,
    new_marker,
    open_cache,
    publish_dir,
    retire_shard,
)
from prep.errors import CacheError, PathError
from prep.fs import atomic
from prep.fs.paths import MARKER
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import copy_of, work_root
from prep.fs.remote.objects import create_checked, delete_object, list_objects, read_object
from prep.fs.remote.retry import NEVER, side_by_side
from prep.fs.tree import file_digest, tree
from prep.parse import Unparsed, digest_of

JOBS = 32  # commits and keys fetched at a time: small requests, which mostly wait
AGAIN = "run the same command again; finished work is kept"
Files = Mapping[str, int]  # names and sizes of a shard's objects


# ---- opening ---------------------------------------------------------------------------------------------------------


def open_to_encode(path: Place, *, create: bool) -> Cache:
    """Opens the cache at `path` for encoding: a directory, or the working copy of what is at a URL.

    Raises as `open_cache` does, and `StoreError`.
    """
    if not isinstance(path, Bucket):
        return open_cache(path, create=create)
    url = str(path)
    marker = _marker(path)
    if marker is None:
        if not create:
            raise CacheError(f"there is no cache in {url}: it has no {MARKER}",
                             hint="prep encode SOURCE --cache URL creates one")
        marker = create_checked(f"{url}/{MARKER}", new_marker(), MARKER_BYTES)
    for root in (work_root(path), copy_of(path)):  # the other is for whole shards
        make_dirs(root)
        if not (root / MARKER).is_file() or (root / MARKER).read_bytes() != marker:
            atomic.write_atomic(root / MARKER, marker)
        open_cache(root, create=False)  # checks the marker
    return Cache(root=work_root(path), store=path)


def check_can_encode_to(path: Place) -> None:
    """Raises `PathError` unless `path` is a cache or can become one: missing, empty, or an unused prefix of a store, in
    no other cache."""
    if isinstance(path, Bucket):
        if _marker(path) is None:
            check_alone(path)
    else:
        check_can_create(path)


def is_cache(path: Place) -> bool:
    """Whether there is a cache at `path`, a directory or a URL. Raises `PathError`, `StoreError`."""
    return _marker(path) is not None if isinstance(path, Bucket) else (path / MARKER).exists()


def _marker(path: Bucket) -> bytes | None:
    """The marker of the cache at a URL; `None` if nothing is there. Raises `PathError` if something else is."""
    url = str(path)
    if not path.key:
        raise PathError(f"{url} is a whole bucket, expected a place in it for the cache",
                        hint=f"name one, like {url}/cache")
    try:
        return read_object(f"{url}/{MARKER}", MARKER_BYTES)
    except FileNotFoundError:
        found = list_objects(url)
    if MARKER in found:  # another machine was quicker
        return read_object(f"{url}/{MARKER}", MARKER_BYTES)
    if found:
        raise PathError(f"{url} is not empty and not a cache: it has no {MARKER}",
                        hint="name a prefix without objects with --cache")
    return None


# ---- what the store has ----------------------------------------------------------------------------------------------


def refresh(cache: Cache) -> None:
    """Makes a working copy know the commits in its store whose shards are whole there, and no others.

    Other caches are what they are. Raises `CacheError` for a commit of another version, `StoreError`.
    """
    if cache.store is None:
        return
    for digest in list(cache.names("damaged")):  # of what is here: the store has it, or it is encoded again
        with lock_shard(digest, NEVER):
            if cache.damaged(digest).exists():  # else another process has replaced it meanwhile
                retire_shard(cache, digest)
    before = set(cache.names("commits"))  # first: what is here now was in the store, so it is in the list, or gone
    commits = dict(_commits(cache))
    shards = _shards(cache)
    new = [task for task, size in commits.items() if task not in before or not _is_known(cache, task, size, shards)]
    stop = threading.Event()
    side_by_side(lambda task: _fetch(cache, task, shards, stop), new, JOBS, stop)
    for task in before - commits.keys():
        atomic.remove_tree(cache.commit(task))
    _retire_hollow(cache, shards)


def _retire_hollow(cache: Cache, shards: Mapping[str, Files]) -> None:
    """Removes shards without rows that are gone from the store: `prep gc` ran there.

    A shard that was encoded here and not uploaded yet has its rows, and stays.
    """
    stop = threading.Event()

    def retire(digest: str) -> None:
        with lock_shard(digest, stop):
            # Asked now: another process may have uploaded or taken it since the shards were listed.
            if _is_hollow(cache, digest) and GROUP not in _files(cache, digest, stop):
                retire_shard(cache, digest)

    hollow = [digest for digest in cache.shards() if GROUP not in shards.get(digest, {}) and _is_hollow(cache, digest)]
    side_by_side(retire, hollow, JOBS, stop)


def refresh_task(cache: Cache, task: str) -> None:
    """Makes a working copy know whether its store has the commit of a task. Raises as `refresh` does."""
    if cache.store is None or read_commit(cache, task) is not None:
        return
    with suppress(FileNotFoundError):
        found = _read(cache, task, NEVER)
        if found is not None and found[1].shard is not None:
            digest = found[1].shard.digest
            _take(cache, task, *found, {digest: _files(cache, digest)}, NEVER)
        elif found is not None:
            _take(cache, task, *found, {}, NEVER)


def _commits(cache: Cache) -> Iterable[tuple[str, int]]:
    """The tasks of the commits in the store, and the sizes of these objects."""
    for name, listed in list_objects(f"{cache.store}/commits").items():
        with suppress(Unparsed):
            task = digest_of(PurePosixPath(name).name.removesuffix(SUFFIX["commits"]), "commits")
            if name == f"{task[:2]}/{task}{SUFFIX['commits']}":
                yield task, listed.size


def _shards(cache: Cache) -> dict[str, dict[str, int]]:
    """The objects of each shard in the store, but empty ones: they stand for directories, and no file is empty."""
    found: dict[str, dict[str, int]] = defaultdict(dict)
    for name, listed in list_objects(f"{cache.store}/shards").items():
        fan, digest, file = [*name.split("/", 2), "", ""][:3]
        if digest.startswith(fan) and listed.size:
            found[digest][file] = listed.size
    return found


def _files(cache: Cache, digest: str, stop: threading.Event = NEVER) -> dict[str, int]:
    """The objects of a shard in the store, as in `_shards`."""
    listed = list_objects(_url_of_shard(cache, digest), stop=stop)
    return {name: one.size for name, one in listed.items() if one.size}


def _url_of_shard(cache: Cache, digest: str) -> str:
    return f"{cache.store}/shards/{digest[:2]}/{digest}"


def _is_known(cache: Cache, task: str, size: int, shards: Mapping[str, Files]) -> bool:
    """Whether the copy of a commit is as long as the commit is, and its shard is here and whole in the store."""
    commit = read_commit(cache, task)
    if commit is None or cache.commit(task).stat().st_size != size:
        return False
    return commit.shard is None or (_is_whole(commit, shards) and cache.shard(commit.shard.digest).is_dir())


def _is_whole(commit: Commit, shards: Mapping[str, Files]) -> bool:
    assert commit.shard is not None
    files = shards.get(commit.shard.digest, {})
    return GROUP in files and sum(files.values()) == commit.shard.bytes


def _fetch(cache: Cache, task: str, shards: Mapping[str, Files], stop: threading.Event) -> None:
    """Fetches a commit, and what a ledger needs of its shard. Removes its copy if it does not count."""
    try:
        found = _read(cache, task, stop)
    except FileNotFoundError:  # removed since it was listed
        found = None
    if found is None or not _take(cache, task, *found, shards, stop):
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
    """Adds a commit to the working copy, after the keys of its shard, unless its shard is not whole in the store."""
    if commit.shard is not None and not (_is_whole(commit, shards) and
                                         _take_shard(cache, commit, shards[commit.shard.digest], stop)):
        return False
    path = cache.commit(task)
    cache.make_dirs(path.parent)
    atomic.remove_directory_in_way(path)
    cache.write(path, data)
    return True


def _take_shard(cache: Cache, commit: Commit, files: Files, stop: threading.Event) -> bool:
    """Makes the working copy have a shard without rows; returns whether that was possible."""
    assert commit.shard is not None
    digest = commit.shard.digest
    with lock_shard(digest, stop):
        if cache.shard(digest).is_dir():
            return True
        for _ in range(TRIES):
            with suppress(Unparsed, FileNotFoundError):
                shard = _described(cache, commit, files, stop)
                keys = _keys(cache, shard, stop)
                write_hollow(cache, shard, keys)
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
            document = read_object(f"{_url_of_shard(cache, digest)}/{name}", shard_format.MAX_DOCUMENT, stop=stop)
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
    data = read_object(f"{_url_of_shard(cache, shard.digest)}/{shard_format.KEY_PATH}",
                       shard.files[shard_format.KEY_PATH], stop=stop)
    if shard_format.crc_bytes(data[:-shard_format.CRC_BYTES]) != data[-shard_format.CRC_BYTES:]:
        raise Unparsed(f"the keys of shard {shard.digest} do not match their checksum")
    return data


# ---- shards without rows ---------------------------------------------------------------------------------------------


def write_hollow(cache: Cache, shard: RemoteShard, keys: bytes) -> None:
    """Adds a shard to the working copy with documents, keys and shard indexes; rows are holes."""
    staged = cache.stage()
    try:
        for name, data in {**shard.documents, shard_format.KEY_PATH: keys}.items():
            _make(staged / name, data, cache)
        for spec in shard.arrays:
            _write_hole(staged / shard_format.data_path(spec), spec, shard.rows, cache)
        move_in(cache, staged, shard.digest)
    finally:
        atomic.remove_tree(staged)


def _make(path: Path, data: bytes, cache: Cache) -> None:
    if not path.parent.is_dir():
        atomic.make_dir(path.parent, mode=cache.dir_mode)
    with atomic.create(path, mode=cache.file_mode) as handle:
        atomic.write(handle, data)


def _write_hole(path: Path, spec: ArraySpec, rows: int, cache: Cache) -> None:
    with atomic.create(path, mode=cache.file_mode) as handle:
        handle.seek(rows * shard_format.row_stride(spec))
        for part in shard_format.index_parts(spec, rows):
            atomic.write(handle, part)


def _is_hollow(cache: Cache, digest: str) -> bool:
    """Whether the first row of a shard is a hole: not even a row of zeros is, since its checksum is not zero."""
    try:
        for spec in read_header(cache, digest).arrays:
            with (cache.shard(digest) / shard_format.data_path(spec)).open("rb") as data:
                return not any(data.read(shard_format.row_stride(spec)))
    except (CacheError, OSError):
        pass
    return False


def evict_rows(cache: Cache, digest: str) -> None:
    """Frees the space of an uploaded shard's rows in a working copy; all else of it stays. Other caches keep them."""
    if cache.store is None:
        return
    with lock_shard(digest, NEVER), suppress(CacheError):  # another process has removed it: then it is fetched again
        header = read_header(cache, digest)
        for spec in header.arrays:
            hollow = atomic.temporary_name(cache.root, cache.staging())
            _write_hole(hollow, spec, header.rows, cache)
            atomic.rename(hollow, cache.shard(digest) / shard_format.data_path(spec))


@contextmanager
def rows_kept(cache: Cache, digest: str) -> Iterator[bool]:
    """Whether a shard has its rows here, which no process drops until the block ends; outside working copies, it has.
    """
    if cache.store is None:
        yield True
        return
    with lock_shard(digest, NEVER):
        yield not _is_hollow(cache, digest)


def ensure_rows(cache: Cache, digests: Iterable[str]) -> Cache:
    """A cache that has the rows of these shards: `cache` itself, or the copy that fetches whole shards when read."""
    if cache.store is None:
        return cache
    copy = cache_at(cache.store)
    register(copy, [shard_of(cache, digest) for digest in digests])
    return copy


def shard_of(cache: Cache, digest: str) -> RemoteShard:
    """What the header of a shard in a working copy says. Raises `CacheError`."""
    header = read_header(cache, digest)
    shard = RemoteShard(digest=digest, field=header.field, rows=header.rows, bytes=0, arrays=header.arrays)
    return RemoteShard(digest=digest, field=header.field, rows=header.rows, bytes=sum(shard.files.values()),
                       arrays=header.arrays)


# ---- what is encoded here --------------------------------------------------------------------------------------------


def publish_shard(cache: Cache, staged: Path, digest: str, *, stop: threading.Event = NEVER) -> None:
    """Moves a staged and synced shard to its name, as `publish_dir` does. Raises `Stopped`.

    Two processes may encode the same task. In a working copy, who is first has uploaded the shard and dropped its rows
    when the second publishes it: then it gets its rows file by file, because others, for whom it is finished, must find
    it at every moment.
    """
    if cache.store is None:
        publish_dir(cache, staged, digest)
        return
    with lock_shard(digest, stop):
        target, names = cache.shard(digest), _names_in(staged)
        if names and names == _names_in(target):
            for name in sorted(names, reverse=True):  # the first array last: by it `_is_hollow` judges
                if file_digest(staged / name) != file_digest(target / name):
                    atomic.rename(staged / name, target / name)
                    atomic.sync_dir((target / name).parent)
        publish_dir(cache, staged, digest)


def _names_in(root: Path) -> set[str]:
    """The names of a shard's files; none of what is missing, or is no shard."""
    try:
        return {name for name, _ in tree(root)}
    except OSError:
        return set()


def upload_shard(cache: Cache, digest: str, *, stop: threading.Event = NEVER) -> None:
    """Makes sure that the store of a working copy has a shard that was encoded here; keeps a copy if there is room.

    Raises `CacheError`, `Stopped`.
    """
    if cache.store is None:
        return
    with lock_shard(digest, stop):
        shard, there = shard_of(cache, digest), _files(cache, digest, stop)
        if there == shard.files:  # its group document comes last
            return
        Uploader(cache, str(cache.store), repair=AGAIN, stop=stop).shard(shard, shard.files.keys() - there.keys())
        _keep(cache, shard)


def _keep(cache: Cache, shard: RemoteShard) -> None:
    """Adds an uploaded shard to the whole shards that this computer has, unless there is no room."""
    assert cache.store is not None
    copy = cache_at(cache.store)
    if copy.shard(shard.digest).is_dir():
        return
    try:
        QUOTA.make(shard.bytes)
    except CacheError:
        return
    root, staged = cache.shard(shard.digest), copy.stage()
    try:
        data = {shard_format.data_path(spec) for spec in shard.arrays}
        for name in shard.files.keys() - data:
            _make(staged / name, (root / name).read_bytes(), copy)
        for name in data:
            atomic.link(root / name, staged / name)
        move_in(copy, staged, shard.digest)
    finally:
        atomic.remove_tree(staged)


def upload_table(cache: Cache, digest: str) -> None:
    """Makes sure that the store of a working copy has a table that was made here. Raises `CacheError`."""
    if cache.store is not None:
        Uploader(cache, str(cache.store), repair=AGAIN).table(digest)


def forget_shard(cache: Cache, digest: str) -> None:
    """Makes a shard that is damaged in the store of a working copy count as missing, so that it is encoded again."""
    for task in list(cache.names("commits")):
        commit = read_commit(cache, task)
        if commit is not None and commit.shard is not None and commit.shard.digest == digest:
            cache.discard(cache.commit(task))
    with lock_shard(digest, NEVER):
        delete_object(f"{_url_of_shard(cache, digest)}/{GROUP}")
        if _is_hollow(cache, digest):  # else another process has just encoded it, and uploads it next
            retire_shard(cache, digest)
