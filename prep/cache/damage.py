"""Records damage, one file per shard under damaged/: a hint that `encode` acts on, removed with the shard."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from prep.cache.shard_format import MAX_ROWS
from prep.cache.store import Cache
from prep.digest import canonical, with_checksum
from prep.errors import CacheError
from prep.fs import atomic
from prep.fs.lock import Release, is_current, try_lock
from prep.fs.untrusted import NotRegularFile, check_dir, read_regular
from prep.parse import Unparsed, count, digest_of, expect, list_of, sealed_json

MOST = 1 << 28  # bytes of a record: room for every row of the largest shard
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
PATIENCE = 2.0  # seconds; holders keep the lock for some milliseconds
# Errors of a disk that has lost bytes; any other error (permissions, a server that does not answer) may pass.
LOST = {getattr(errno, name, errno.EIO) for name in ("EIO", "EBADMSG", "EUCLEAN", "ENODATA", "EREMOTEIO")}


RECHECK = ("the cache cannot be written, so the damage is not recorded in it: "
           "to find and repair it, run prep encode again as it was first run, with --recheck")


class UnrecordedDamage(CacheError):
    """Damage that could not be recorded in the cache: only `prep encode --recheck` finds it again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Damage:
    """One damaged row, or a whole shard, or an array's shard index."""

    shard: str
    field: str | None  # None: the shard is too damaged to say
    array: str | None  # None: the whole shard
    row: int | None  # None: the whole shard; with an array: its shard index, which loses no row
    what: str
    transient: bool = False  # not readable now, perhaps for lack of permission: not recorded


def record(cache: Cache, damages: Iterable[Damage]) -> None:
    """Adds damages to the cache's records."""
    by_shard: dict[str, set[Damage]] = {}
    for damage in damages:
        by_shard.setdefault(damage.shard, set()).add(damage)
    check_dir(cache.root / "damaged")
    for shard, added in by_shard.items():
        if added <= set(recorded(cache, shard)):  # a reader finds the same row again and again
            continue
        with _in_turn(cache):
            _write(cache, shard, added.union(recorded(cache, shard)))


def replace(cache: Cache, shard: str, damages: Iterable[Damage]) -> None:
    """Replaces a shard's damage record by `damages`; removes the record if there are none."""
    distinct = set(damages)
    if not distinct and not cache.damaged(shard).exists():
        return
    with _in_turn(cache):
        if distinct:
            _write(cache, shard, distinct)
        else:
            forget(cache, shard)


def record_if_writable(cache: Cache, damages: Iterable[Damage]) -> bool:
    """Like `record`, but returns `False` if the cache cannot be written, which is not an error for a reader."""
    try:
        record(cache, damages)
    except OSError:
        return False
    return True


def as_recorded(cache: Cache, error: CacheError, damage: Damage) -> CacheError:
    """Records damage and returns `error`, or an `UnrecordedDamage` instead if the cache cannot be written."""
    if record_if_writable(cache, [damage]) or not cache.records_damage:
        return error
    return UnrecordedDamage(error.message, hint=RECHECK)


def recorded(cache: Cache, shard: str) -> tuple[Damage, ...]:
    """The recorded damage of a shard. A record that is itself damaged counts as damage of the whole shard."""
    try:
        return _parse(read_regular(cache.damaged(shard), MOST), shard)
    except FileNotFoundError:
        return ()
    except (Unparsed, NotRegularFile) as error:
        return (Damage(shard=shard, field=None, array=None, row=None, what=str(error)),)


def record_fault(cache: Cache, shard: str) -> str:
    """What is wrong with a shard's damage record itself; empty if the record is intact or missing."""
    try:
        _parse(read_regular(cache.damaged(shard), MOST), shard)
    except FileNotFoundError:
        return ""
    except (Unparsed, OSError) as error:
        return str(error)
    return ""


def is_lost(error: OSError) -> bool:
    """Whether the error means that the disk has lost the data, which must then be encoded again."""
    return error.errno in LOST


def forget(cache: Cache, shard: str) -> None:
    """Removes a shard's record, if there is one."""
    atomic.remove_tree(cache.damaged(shard))


def _write(cache: Cache, shard: str, damages: Iterable[Damage]) -> None:
    rows = sorted((_as_json(damage) for damage in damages), key=canonical)
    document = {"format": "latentry/damage", "version": 1, "shard": shard, "damages": rows}
    atomic.remove_directory_in_way(cache.damaged(shard))
    cache.write(cache.damaged(shard), canonical(with_checksum(document)))


@contextlib.contextmanager
def _in_turn(cache: Cache) -> Iterator[None]:
    """Lets one process at a time change records, so that none overwrites what another has just added.

    The kernel releases the lock when its holder ends. After `PATIENCE` seconds this continues without the lock: a
    record may then be lost, and the next reader of that row records it again.
    """
    folder = cache.root / "damaged"
    cache.make_dirs(folder)
    check_dir(folder)
    deadline = time.monotonic() + PATIENCE
    while True:
        with os.fdopen(os.open(folder / "lock", LOCK_FLAGS, 0o666), "r+b", buffering=0) as handle:
            atomic.set_mode(handle.fileno(), cache.file_mode)
            release = _take(handle, deadline)
            try:
                if is_current(handle, folder / "lock") or time.monotonic() >= deadline:
                    yield
                    return
            finally:
                release()


def _take(handle: Any, deadline: float) -> Release:
    while True:
        with contextlib.suppress(OSError):  # held by another process, or a disk without locks
            release = try_lock(handle, True)
            if release is not None:
                return release
        if time.monotonic() >= deadline:
            return lambda: None
        time.sleep(0.002)


def _as_json(damage: Damage) -> dict[str, Any]:
    return {"field": damage.field, "array": damage.array, "row": damage.row, "what": damage.what}


def _parse(data: bytes, shard: str) -> tuple[Damage, ...]:
    document = sealed_json(data, "damage record")
    digest_of(document.get("shard"), "shard of damage record")
    if (document["shard"], document.get("format"), document.get("version")) != (shard, "latentry/damage", 1):
        raise Unparsed(f"damage record has another shard or version, expected version 1 for shard {shard}")
    return tuple(list_of(document.get("damages"), lambda value, where: _one(value, where, shard), "damages"))


def _one(value: Any, where: str, shard: str) -> Damage:
    table = expect(value, dict, where)
    row = table.get("row")
    return Damage(
        shard=shard,
        field=_string_or_none(table, "field", where),
        array=_string_or_none(table, "array", where),
        row=None if row is None else count(row, f"{where}.row", MAX_ROWS),
        what=expect(table.get("what"), str, f"{where}.what"),
    )


def _string_or_none(table: dict[str, Any], name: str, where: str) -> str | None:
    value = table.get(name)
    return None if value is None else expect(value, str, f"{where}.{name}")
