"""Reads and checks commits: the record that each finished task leaves."""

from __future__ import annotations

from collections import defaultdict
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
MOST = 1 << 26  # bytes of a commit; a task with only rejected rows and long details takes some hundred thousand


@dataclass(frozen=True, kw_only=True, slots=True)
class Commit:
    """The record of a finished task."""

    task: str
    field: str
    shard: Shard | None  # None: every row was rejected
    rejects: tuple[Reject, ...]
    provenance: Mapping[str, Any]  # host, device, versions, milliseconds


def read_commit(cache: Cache, task: str) -> Commit | None:
    """The commit of a task; `None` if it is missing, damaged, or not readable by this user.

    Raises `CacheError` for a commit of another version.
    """
    try:
        return checked_commit(cache, task)
    except (FileNotFoundError, PermissionError, NotRegularFile, Unparsed):
        return None


def tasks_by_shard(cache: Cache) -> dict[str, list[str]]:
    """The tasks whose commits name each shard, by its digest."""
    tasks: dict[str, list[str]] = defaultdict(list)
    for task in cache.names("commits"):
        commit = read_commit(cache, task)
        if commit is not None and commit.shard is not None:
            tasks[commit.shard.digest].append(task)
    return dict(tasks)


def is_damaged(cache: Cache, task: str) -> bool:
    """Whether a task's commit is damaged, and not merely unreadable now."""
    try:
        checked_commit(cache, task)
    except (NotRegularFile, Unparsed):
        return True
    except OSError:
        pass
    return False


def checked_commit(cache: Cache, task: str) -> Commit:
    """The commit of a task. Raises `Unparsed` if it is damaged, `OSError`, and `CacheError` for another version."""
    path = cache.commit(task)
    return parse_commit(read_regular(path, MOST), task, str(path))


def parse_commit(data: bytes, task: str, path: str) -> Commit:
    """The commit of a task that was read from `path`. Raises `Unparsed`, and `CacheError` for another version."""
    document = sealed_json(data, "commit")
    if (document.get("format"), document.get("version")) != ("latentry/commit", VERSION):
        raise CacheError(f"{path} is {brief(document.get('format'))} version {brief(document.get('version'))}, "
                         f"expected 'latentry/commit' version {VERSION}")
    parsed = _parse(document)
    if parsed.task != task:
        raise Unparsed(f"commit is of task {parsed.task}, expected the task in its file name")
    return parsed


def parse_rejects(value: Any, where: str) -> tuple[Reject, ...]:
    """Rejected rows, as written by `as_json`. Raises `Unparsed`."""
    return tuple(list_of(value, _reject, where))


def as_json(reject: Reject) -> dict[str, str]:
    """A rejected row, as a commit stores it."""
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
