"""The record that a finished task leaves: read, checked, believed only when whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from prep.cache import shard_format
from prep.cache.records import Reject, Shard
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.fs.untrusted import NotRegularFile, read_regular
from prep.parse import Unparsed, brief, count, digest_of, expect, list_of, sealed_json, within

VERSION = 1
MOST = 1 << 26  # bytes of a commit; one whose every row was rejected at length has some hundred thousand


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """What a finished task left."""

    task: str
    field: str
    shard: Shard | None  # None: every row was rejected
    rejects: tuple[Reject, ...]
    provenance: Mapping[str, Any]  # host, device, versions, milliseconds


def read_commit(cache: Cache, task: str) -> Commit | None:
    """The commit of a task; `None` when it has none, a damaged one, or one that this user may not read.

    Raises `CacheError` for another version.
    """
    try:
        return checked_commit(cache, task)
    except (FileNotFoundError, PermissionError, NotRegularFile, Unparsed):
        return None


def is_damaged(cache: Cache, task: str) -> bool:
    """Whether a task has a commit that says nothing: not one that merely cannot be read now."""
    try:
        checked_commit(cache, task)
    except (NotRegularFile, Unparsed):
        return True
    except OSError:
        pass
    return False


def checked_commit(cache: Cache, task: str) -> Commit:
    """The commit of a task. Raises `Unparsed`, `OSError`, and `CacheError` for another version."""
    path = cache.commit(task)
    document = sealed_json(read_regular(path, MOST), "commit")
    if (document.get("format"), document.get("version")) != ("latentry/commit", VERSION):
        raise CacheError(f"{path} is {brief(document.get('format'))} version {brief(document.get('version'))}, "
                         f"expected 'latentry/commit' version {VERSION}")
    parsed = _parse(document)
    if parsed.task != task:
        raise Unparsed(f"commit is of task {parsed.task}, expected that of its file's name")
    return parsed


def parse_rejects(value: Any, where: str) -> tuple[Reject, ...]:
    """Rejected rows as `as_json` spells them. Raises `Unparsed`."""
    return tuple(list_of(value, _reject, where))


def as_json(reject: Reject) -> dict[str, str]:
    """A rejected row in a commit."""
    return {"key": reject.key, "code": reject.code, "detail": reject.detail}


def _parse(document: Mapping[str, Any]) -> Commit:
    shard = None
    if document.get("shard") is not None:
        rows, size = (count(document.get(name), name) for name in ("rows", "bytes"))
        within(rows, 1, shard_format.MAX_ROWS, "rows")
        shard = Shard(digest=digest_of(document["shard"], "shard"), rows=rows, bytes=size)
    known = {"format", "version", "task", "field", "shard", "rows", "bytes", "rejects", "self"}
    return Commit(
        task=digest_of(document.get("task"), "task"), field=shard_format.checked_name(document.get("field"), "field"),
        shard=shard, rejects=parse_rejects(document.get("rejects"), "rejects"),
        provenance={key: value for key, value in document.items() if key not in known},
    )


def _reject(value: Any, where: str) -> Reject:
    table = expect(value, dict, where)
    code, detail = (expect(table.get(name), str, f"{where}.{name}") for name in ("code", "detail"))
    return Reject(key=digest_of(table.get("key"), f"{where}.key"), code=code, detail=detail)
