"""Reads and writes CACHE/lookup.arrow: what commits and shards contain, so that the next run opens only changed ones.

The file is an Arrow IPC stream of one row, whose columns are lists, followed by its CRC-32C:

    commits.task, .stamp, .shard, .rows, .bytes, .field    of each commit, sorted by task; rows 0: it has no shard
    shards.digest, .stamp, .rows, .tree     of each intact shard without a damage record, sorted by digest
    keys.key, .shard, .row                  of each row, sorted by key, then shard: its shard's number, its row there
    words                                   canonical JSON: names of fields, trees (the paths in a shard), rejected rows

Disposable: a file with any fault counts as empty and is written again. An entry is believed only if the stamp of its
commit or shard still matches. The file is read only up to the size that the cache's commits and keys account for: so a
sparse file takes no memory. Whoever can write an intact file into a cache can write commits and shards there as well;
`prep verify` checks rows, and does not read this file.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from prep.cache import shard_format
from prep.cache.arrow import check_stream, digests_of, parse_table
from prep.cache.commits import Commit, as_json, parse_rejects
from prep.cache.ledger.columns import KEY, Column, Columns, gather, in_order, packed, unpacked
from prep.cache.records import Shard
from prep.cache.store import Cache
from prep.digest import canonical
from prep.fs import atomic
from prep.fs.stamps import Tree
from prep.fs.untrusted import entries, read_regular
from prep.parse import Unparsed, digest_of, expect, list_of

NAME = "lookup.arrow"
VERSION = 2  # 1 was lookup.bin
MOST_BYTES = 1 << 33  # 2 * 10^8 rows; larger files are refused
FREE_BYTES = 1 << 26  # accepted whatever the cache holds: 1.6 million rows
DIGEST = pa.binary(32)
PATH = re.compile(r"/([a-z0-9_][a-z0-9_.]*/?){0,2}")  # a path as in the shards we write; only its status is read


def _list_of(kind: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", kind, nullable=False))


_COLUMNS = {"commits.task": DIGEST, "commits.stamp": DIGEST, "commits.shard": DIGEST, "commits.rows": pa.int32(),
            "commits.bytes": pa.int64(), "commits.field": pa.int32(),
            "shards.digest": DIGEST, "shards.stamp": DIGEST, "shards.rows": pa.int32(), "shards.tree": pa.int32(),
            "keys.key": DIGEST, "keys.shard": pa.int32(), "keys.row": pa.int32()}
SCHEMA = pa.schema([*(pa.field(name, _list_of(kind), nullable=False) for name, kind in _COLUMNS.items()),
                    pa.field("words", pa.binary(), nullable=False)],
                   metadata={"format": "latentry/lookup", "version": str(VERSION)})


@dataclass(frozen=True, slots=True)
class Entry:
    """What is remembered of a shard: the stamp of its files, its rows, and its paths."""

    stamp: bytes
    rows: int
    tree: Tree


@dataclass(frozen=True, kw_only=True, slots=True)
class Lookup:
    """Commits and shards, each with the stamp that it had when it was read."""

    commits: Mapping[str, tuple[bytes, Commit]]  # by task, sorted; without provenance
    shards: Mapping[str, Entry]  # by digest, sorted; the n-th shard has number n in the columns
    columns: Columns


EMPTY_INDEX = Lookup(commits={}, shards={}, columns=gather([]))


def load_index(cache: Cache) -> Lookup:
    """The remembered commits and shards; empty if the file is missing or damaged. (A million rows: 0.05 s.)"""
    try:
        return _parse(_read(cache))
    except (OSError, MemoryError, Unparsed):
        return EMPTY_INDEX


def is_known_layout(tree: Tree) -> bool:
    """Whether a shard's paths look like those that Latentry writes; other shards are not remembered."""
    return all(PATH.fullmatch(path) for path in tree)


def save_index(cache: Cache, lookup: Lookup) -> None:
    """Writes the look-up file atomically; ignores errors, because it is disposable."""
    with contextlib.suppress(OSError):
        cache.write(cache.root / NAME, _spell(lookup))


def drop_index(cache: Cache) -> None:
    """Removes the look-up file, so that the next ledger is read from commits and shards; used when damage was found."""
    with contextlib.suppress(OSError):
        atomic.remove(cache.root / NAME)


def _read(cache: Cache) -> bytes:
    """The file's bytes. Raises `OSError`, and `Unparsed` if the file is larger than the cache accounts for."""
    path = cache.root / NAME
    size = path.lstat().st_size
    if size > FREE_BYTES and size > min(MOST_BYTES, FREE_BYTES + 2 * _accounted(cache)):
        raise Unparsed(f"{NAME} has {size} bytes, more than commits and keys of its cache account for")
    return read_regular(path, size)


def _accounted(cache: Cache) -> int:
    """Bytes of all commits and of the keys of all shards, which bound the size of a look-up file."""
    total = 0
    for kind, inner in (("commits", ""), (cache.headers, shard_format.KEY_PATH)):
        for fan in entries(cache.root / kind):
            for entry in entries(Path(fan.path)) if fan.is_dir(follow_symlinks=False) else ():
                with contextlib.suppress(OSError):
                    total += Path(entry.path, inner).lstat().st_size
    return total


def _spell(lookup: Lookup) -> bytes:
    commits, columns = [commit for _, commit in lookup.commits.values()], lookup.columns
    fields = sorted({commit.field for commit in commits})
    rejects = {commit.task: [as_json(reject) for reject in commit.rejects] for commit in commits if commit.rejects}
    trees = {tree: place for place, tree in enumerate(sorted({entry.tree for entry in lookup.shards.values()}))}
    entries = list(lookup.shards.values())
    values: dict[str, Any] = {
        "commits.task": packed(lookup.commits), "commits.stamp": _joined(stamp for stamp, _ in lookup.commits.values()),
        "commits.shard": packed(commit.shard.digest if commit.shard else "00" * 32 for commit in commits),
        "commits.rows": [commit.shard.rows if commit.shard else 0 for commit in commits],
        "commits.bytes": [commit.shard.bytes if commit.shard else 0 for commit in commits],
        "commits.field": [fields.index(commit.field) for commit in commits],
        "shards.digest": packed(lookup.shards), "shards.stamp": _joined(entry.stamp for entry in entries),
        "shards.rows": [entry.rows for entry in entries], "shards.tree": [trees[entry.tree] for entry in entries],
        "keys.key": columns.keys, "keys.shard": columns.shard, "keys.row": columns.row,
    }
    words = canonical({"fields": fields, "trees": list(trees), "rejects": rejects})
    arrays = [_one_list(values[name], kind) for name, kind in _COLUMNS.items()]
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(pa.Table.from_arrays([*arrays, pa.array([words], pa.binary())], schema=SCHEMA))
    return sealed(sink.getvalue())


def sealed(stream: atomic.Buffer) -> bytes:
    """A stream, followed by its checksum."""
    return b"".join([stream, shard_format.crc_bytes(np.frombuffer(stream, np.uint8))])


def _one_list(values: Any, kind: pa.DataType) -> pa.Array:
    """An Arrow array with one element, the list of `values`."""
    if kind == DIGEST:
        data = np.ascontiguousarray(values)
        inner = pa.FixedSizeBinaryArray.from_buffers(DIGEST, len(data), [None, pa.py_buffer(data)])
    else:
        inner = pa.array(np.asarray(values, kind.to_pandas_dtype()))
    return pa.ListArray.from_arrays(pa.array([0, len(inner)], pa.int32()), inner, type=_list_of(kind))


def _parse(data: bytes) -> Lookup:
    stream = memoryview(data)[: -shard_format.CRC_BYTES]
    if shard_format.crc_bytes(np.frombuffer(stream, np.uint8)) != data[-shard_format.CRC_BYTES :]:
        raise Unparsed(f"{NAME} does not match its checksum")
    if check_stream(stream) != len(stream):
        raise Unparsed(f"{NAME} has data after its end")
    table = parse_table(stream, SCHEMA)
    if table.num_rows != 1:
        raise Unparsed(f"{NAME} has {table.num_rows} rows, expected 1")
    values = {name: _values(table[name], kind) for name, kind in _COLUMNS.items()}
    for group in ("commits", "shards", "keys"):
        if len({len(column) for name, column in values.items() if name.startswith(group)}) > 1:
            raise Unparsed(f"{group} of {NAME} have columns of different lengths")
    columns = Columns(keys=values["keys.key"], shard=values["keys.shard"], row=values["keys.row"])
    document = _parse_words(table["words"][0].as_py())
    known = _parse_shards(values, document)
    _check_columns(columns, values["shards.rows"])
    return Lookup(commits=_parse_commits(values, document), shards=known, columns=columns)


def _values(column: pa.ChunkedArray, kind: pa.DataType) -> Column:
    """The values of a column's only list, without a copy."""
    inner = column.combine_chunks().flatten() if column.num_chunks != 1 else column.chunk(0).flatten()
    if kind == DIGEST:
        return digests_of(inner)
    values: Column = inner.to_numpy(zero_copy_only=True)
    return values


def _parse_words(words: bytes) -> dict[str, Any]:
    try:
        return expect(json.loads(words), dict, NAME)
    except (ValueError, RecursionError) as error:
        raise Unparsed(f"words of {NAME} are not JSON: {error}") from None


def _parse_shards(values: Mapping[str, Column], document: Mapping[str, Any]) -> dict[str, Entry]:
    trees = [tuple(tree) for tree in list_of(document.get("trees"), _paths, "trees")]
    names, rows = unpacked(values["shards.digest"]), values["shards.rows"].tolist()
    if any(first >= second for first, second in pairwise(names)) or min(rows, default=1) < 1:
        raise Unparsed(f"shards of {NAME} are not sorted, or have no rows")
    if not _are_places(values["shards.tree"], trees):
        raise Unparsed(f"shards of {NAME} refer to trees that it does not have")
    entries = zip(names, _split(values["shards.stamp"]), rows, values["shards.tree"].tolist(), strict=True)
    return {name: Entry(stamp, number, trees[tree]) for name, stamp, number, tree in entries}


def _paths(value: Any, where: str) -> list[str]:
    return list_of(value, _path, where)


def _path(value: Any, where: str) -> str:
    if not is_known_layout((expect(value, str, where),)):
        raise Unparsed(f"{where} is {value[:80]!r}, expected a path in a shard")
    return str(value)


def _check_columns(columns: Columns, rows: Column) -> None:
    """Raises `Unparsed` unless each row lies in a listed shard, and each shard has as many rows as it states."""
    if len(columns) and not 0 <= columns.shard.min() <= columns.shard.max() < len(rows):
        raise Unparsed(f"rows of {NAME} refer to shards that it does not have")
    if not (np.bincount(columns.shard, minlength=len(rows)) == rows).all():
        raise Unparsed(f"shards of {NAME} do not have as many rows as they state")
    if not ((columns.row >= 0) & (columns.row < rows[columns.shard])).all() or not in_order(columns.keys):
        raise Unparsed(f"rows of {NAME} are outside their shards, or not sorted")


def _are_places(numbers: Column, values: list[Any]) -> bool:
    return not len(numbers) or bool(0 <= numbers.min() <= numbers.max() < len(values))


def _parse_commits(values: Mapping[str, Column], document: Mapping[str, Any]) -> dict[str, tuple[bytes, Commit]]:
    fields = list_of(document.get("fields"), shard_format.checked_name, "fields")
    rejects = {digest_of(task, "rejects"): parse_rejects(items, "rejects")
               for task, items in expect(document.get("rejects"), dict, "rejects").items()}
    tasks = unpacked(values["commits.task"])
    least = min(values[name].min(initial=0) for name in ("commits.rows", "commits.bytes"))
    if any(first >= second for first, second in pairwise(tasks)) or least < 0:
        raise Unparsed(f"commits of {NAME} are not sorted, or have negative counts")
    if not _are_places(values["commits.field"], fields):
        raise Unparsed(f"commits of {NAME} refer to fields that it does not have")
    columns = zip(tasks, _split(values["commits.stamp"]), unpacked(values["commits.shard"]),
                  *(values[f"commits.{name}"].tolist() for name in ("rows", "bytes", "field")), strict=True)
    commits = {}
    for task, stamp, digest, rows, size, field in columns:
        shard = Shard(digest=digest, rows=rows, bytes=size) if rows else None
        commits[task] = (stamp, Commit(task=task, field=fields[field], shard=shard, rejects=rejects.get(task, ()),
                                       provenance={}))
    return commits


def _joined(stamps: Iterable[bytes]) -> Column:
    return np.frombuffer(b"".join(stamps), KEY)


def _split(table: Column) -> list[bytes]:
    """Rows of 32 bytes."""
    data = table.tobytes()
    return [data[place : place + 32] for place in range(0, len(data), 32)]
