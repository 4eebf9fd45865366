"""CACHE/lookup.bin: what the ledger read of commits and shards, so that the next run opens only what changed.

    head      magic, version, counts of what follows
    commits   task, stamp, shard, rows, field, bytes: 112 bytes each, sorted by task
    shards    digest, stamp, rows, tree: 72 bytes each, sorted by digest; only sound ones with no damage record
    rows      keys (32 bytes each), numbers of their shards, places there (4 bytes each); sorted by key, then shard
    words     canonical JSON: names of fields, trees (the paths in a shard), rejected rows by task
    crc32c    of all before

Disposable: whatever is wrong with it, it counts as empty and is written anew. Nothing in it is believed without the
stamp of the commit or shard that it was read from. All little-endian. Whoever can write a sound one into a cache can
write commits and shards there as well; `prep verify` checks rows, and does not read this.
"""

from __future__ import annotations

import contextlib
import json
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from prep.cache import shard_format
from prep.cache.commits import Commit, as_json, parse_rejects
from prep.cache.ledger.columns import KEY, Column, Columns, gather, in_order, packed
from prep.cache.records import Shard
from prep.cache.store import Cache
from prep.digest import canonical
from prep.fs import atomic
from prep.fs.stamps import STAMP_BYTES, Tree
from prep.parse import Unparsed, digest_of, expect, list_of

NAME = "lookup.bin"
MAGIC = b"latentry/lookup\0"
VERSION = 1
MOST_BYTES = 1 << 33  # 2 * 10^8 rows; a larger file is not ours
HEAD = struct.Struct("<16s5Q")  # magic, version, and how many commits, shards, rows, bytes of words
COMMIT = np.dtype([("task", "u1", 32), ("stamp", "u1", 32), ("shard", "u1", 32),  # rows 0: it has no shard
                   ("rows", "<i4"), ("field", "<u4"), ("bytes", "<i8")])
SHARD = np.dtype([("digest", "u1", 32), ("stamp", "u1", 32), ("rows", "<i4"), ("tree", "<u4")])
ROW_BYTES = 32 + 4 + 4
PATH = re.compile(r"/([a-z0-9_][a-z0-9_.]*/?){0,2}")  # of a shard as ours are; they are looked at, never opened


@dataclass(frozen=True, slots=True)
class Entry:
    """A shard, and the stamp of what is in its directory."""

    stamp: bytes
    rows: int
    tree: Tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """Commits and shards, each with the stamp under which it was read."""

    commits: Mapping[str, tuple[bytes, Commit]]  # by task, sorted; without provenance
    shards: Mapping[str, Entry]  # by digest, sorted; the n-th has number n in the columns
    columns: Columns


EMPTY_INDEX = Lookup(commits={}, shards={}, columns=gather([]))


def load_index(cache: Cache) -> Lookup:
    """What was remembered; empty when there is nothing, or nothing sound. (A million rows: 0.05 s.)"""
    try:
        return _parse(_read(cache.root / NAME))
    except (OSError, MemoryError, Unparsed):
        return EMPTY_INDEX


def is_known_layout(tree: Tree) -> bool:
    """Whether a shard's paths are like those that we write; others are not remembered."""
    return all(PATH.fullmatch(path) for path in tree)


def save_index(cache: Cache, lookup: Lookup) -> None:
    """Remembers, whole or not at all; where that cannot be written, nothing is remembered."""
    with contextlib.suppress(OSError):
        cache.write(cache.root / NAME, _spell(lookup))


def drop_index(cache: Cache) -> None:
    """Forgets: the next ledger is read from commits and shards. For whoever found that files are not as they seem."""
    with contextlib.suppress(OSError):
        atomic.remove(cache.root / NAME)


def _read(path: Path) -> bytes:
    with path.open("rb") as handle:
        head = handle.read(HEAD.size)
        size = path.stat().st_size
        if len(head) < HEAD.size or size != _size(head) or size > MOST_BYTES:
            raise Unparsed(f"{NAME} has {size} bytes, expected as many as it says")
        handle.seek(0)
        return handle.read(size)


def _size(head: bytes) -> int:
    magic, version, commits, shards, rows, words = HEAD.unpack(head)
    if (magic, version) != (MAGIC, VERSION):
        raise Unparsed(f"{NAME} is of another version, expected {VERSION}")
    body = commits * COMMIT.itemsize + shards * SHARD.itemsize + rows * ROW_BYTES + words
    return HEAD.size + int(body) + shard_format.CRC_BYTES


def _spell(lookup: Lookup) -> bytes:
    found = [commit for _, commit in lookup.commits.values()]
    fields = sorted({commit.field for commit in found})
    rejects = {commit.task: [as_json(one) for one in commit.rejects] for commit in found if commit.rejects}
    trees = {tree: place for place, tree in enumerate(sorted({entry.tree for entry in lookup.shards.values()}))}
    words = canonical({"fields": fields, "trees": list(trees), "rejects": rejects})
    commits, shards = np.zeros(len(found), COMMIT), np.zeros(len(lookup.shards), SHARD)
    commits["task"], commits["stamp"] = _rows(lookup.commits), _stamps(stamp for stamp, _ in lookup.commits.values())
    commits["shard"] = _rows(commit.shard.digest if commit.shard else "00" * 32 for commit in found)
    commits["rows"] = [commit.shard.rows if commit.shard else 0 for commit in found]
    commits["bytes"] = [commit.shard.bytes if commit.shard else 0 for commit in found]
    commits["field"] = [fields.index(commit.field) for commit in found]
    shards["digest"], shards["stamp"] = _rows(lookup.shards), _stamps(entry.stamp for entry in lookup.shards.values())
    shards["rows"] = [entry.rows for entry in lookup.shards.values()]
    shards["tree"] = [trees[entry.tree] for entry in lookup.shards.values()]
    columns = lookup.columns
    body = b"".join([
        HEAD.pack(MAGIC, VERSION, len(commits), len(shards), len(columns), len(words)),
        commits.tobytes(), shards.tobytes(), columns.keys.tobytes(), columns.shard.astype("<i4").tobytes(),
        columns.row.astype("<i4").tobytes(), words,
    ])
    return body + shard_format.crc_bytes(body)


def _parse(data: bytes) -> Lookup:
    _, _, commits, shards, rows, words = HEAD.unpack(data[: HEAD.size])
    body = np.frombuffer(data, np.uint8)[: -shard_format.CRC_BYTES]
    if len(data) != _size(data[: HEAD.size]) or shard_format.crc_bytes(body) != data[-shard_format.CRC_BYTES :]:
        raise Unparsed(f"{NAME} does not match its checksum")
    parts, place = [], HEAD.size
    for kind, number in ((COMMIT, commits), (SHARD, shards), (KEY, rows), ("<i4", rows), ("<i4", rows), ("u1", words)):
        parts.append(np.frombuffer(data, kind, number, place))
        place += parts[-1].nbytes
    columns = Columns(keys=parts[2], shard=parts[3], row=parts[4])
    document = _parse_words(parts[5].tobytes())
    known = _parse_shards(parts[1], document)
    _check_columns(columns, parts[1]["rows"])
    return Lookup(commits=_parse_commits(parts[0], document), shards=known, columns=columns)


def _parse_words(words: bytes) -> dict[str, Any]:
    try:
        return expect(json.loads(words), dict, NAME)
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"words of {NAME} are not JSON: {error}") from None


def _parse_shards(table: Column, document: Mapping[str, Any]) -> dict[str, Entry]:
    trees = [tuple(tree) for tree in list_of(document.get("trees"), _paths, "trees")]
    names, rows = _names(table["digest"]), table["rows"].tolist()
    if any(first >= second for first, second in pairwise(names)) or min(rows, default=1) < 1:
        raise Unparsed(f"shards of {NAME} are not sorted, or have no rows")
    if table["tree"].max(initial=0) > len(trees) - 1 and len(table):
        raise Unparsed(f"shards of {NAME} have trees that it does not have")
    found = zip(names, _split(table["stamp"]), rows, table["tree"].tolist(), strict=True)
    return {name: Entry(stamp, number, trees[tree]) for name, stamp, number, tree in found}


def _paths(value: Any, where: str) -> list[str]:
    return list_of(value, _path, where)


def _path(value: Any, where: str) -> str:
    if not is_known_layout((expect(value, str, where),)):
        raise Unparsed(f"{where} is {value[:80]!r}, expected a path in a shard")
    return str(value)


def _check_columns(columns: Columns, rows: Column) -> None:
    """Raises `Unparsed` unless every place is one of a shard that is there, and each shard has as many as it says."""
    if len(columns) and not 0 <= columns.shard.min() <= columns.shard.max() < len(rows):
        raise Unparsed(f"rows of {NAME} are in shards that it does not have")
    if not (np.bincount(columns.shard, minlength=len(rows)) == rows).all():
        raise Unparsed(f"shards of {NAME} have other numbers of rows than they say")
    if not ((columns.row >= 0) & (columns.row < rows[columns.shard])).all() or not in_order(columns.keys):
        raise Unparsed(f"rows of {NAME} are not in their shards, or not sorted")


def _parse_commits(table: Column, document: Mapping[str, Any]) -> dict[str, tuple[bytes, Commit]]:
    fields = list_of(document.get("fields"), shard_format.checked_name, "fields")
    rejects = {digest_of(task, "rejects"): parse_rejects(found, "rejects")
               for task, found in expect(document.get("rejects"), dict, "rejects").items()}
    tasks = _names(table["task"])
    least = min(table[name].min(initial=0) for name in ("rows", "bytes"))
    if any(first >= second for first, second in pairwise(tasks)) or least < 0:
        raise Unparsed(f"commits of {NAME} are not sorted, or have fewer than no rows")
    if table["field"].max(initial=0) > len(fields) - 1 and len(table):
        raise Unparsed(f"commits of {NAME} have fields that it does not have")
    columns = zip(tasks, _split(table["stamp"]), _names(table["shard"]), table["rows"].tolist(),
                  table["bytes"].tolist(), table["field"].tolist(), strict=True)
    commits = {}
    for task, stamp, digest, rows, size, field in columns:
        shard = Shard(digest=digest, rows=rows, bytes=size) if rows else None
        commits[task] = (stamp, Commit(task=task, field=fields[field], shard=shard, rejects=rejects.get(task, ()),
                                       provenance={}))
    return commits


def _rows(digests: Iterable[str]) -> Column:
    return packed(digests).view(np.uint8).reshape(-1, 32)


def _stamps(stamps: Iterable[bytes]) -> Column:
    return np.frombuffer(b"".join(stamps), np.uint8).reshape(-1, STAMP_BYTES)


def _names(table: Column) -> list[str]:
    """Rows of 32 bytes as hex."""
    digits = table.tobytes().hex()
    return [digits[place : place + 64] for place in range(0, len(digits), 64)]


def _split(table: Column) -> list[bytes]:
    """Rows of 32 bytes."""
    data = table.tobytes()
    return [data[place : place + STAMP_BYTES] for place in range(0, len(data), STAMP_BYTES)]
