"""What an attacker may do to a record: to JSON, to a table's values, to bytes. Drawn from a seed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from random import Random
from typing import Any

import pyarrow as pa
from victims import file_of

PATHS = ("../../../../etc/passwd", "/etc/passwd", "..", ".", "", "/", "C:/windows", "a\\b", "a/../../b", "\0", "a\0b",
         "a" * 5000, "a/" * 3000, "\ud800", "\udcff", "file:///etc/passwd", "~/x", "$HOME", "x" * 300, "cache/tmp",
         "shards", "../" * 500 + "etc/passwd", "\u202e", "\x1b[31m", "con", "|id", "é", "a:b/c")
NUMBERS = (0, -1, 1, 2, 7, 255, 1 << 15, (1 << 31) - 1, 1 << 31, -(1 << 31), 1 << 32, (1 << 53) - 1, 1 << 53, 1 << 62,
           (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64, 1 << 70, 10**400, 1 << 24, (1 << 24) - 1)
WORDS = ("ab" * 32, "AB" * 32, "0" * 64, "0" * 63, "nan", "inf", "1e99", "-0", "1e-99", "0", "0.18215", "train", "text",
         "latent", "mask", "uint8", "float64", "bfloat16", "sd15", "latentry/manifest", "hidden", "key", "self",
         "x" * 100000)
LEAVES = (None, True, False, *NUMBERS, *PATHS, *WORDS)
RAWS = ("NaN", "Infinity", "-Infinity", "1.5", "1e999", "-0", "01", "[" * 3000 + "]" * 3000, "[" * 20 + "]" * 20,
        '{"a":' * 3000 + "1" + "}" * 3000, '{"a":1,"a":2}', "9" * 5000, "1E400", '"\\ud800"', "", '"\x7f"', " 1")


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a document but the whole."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, below in inner:
        yield (*path, name)
        yield from places(below, (*path, name))


def parent(document: Any, path: tuple[Any, ...]) -> Any:
    for name in path[:-1]:
        document = document[name]
    return document


def some_value(rng: Random, depth: int = 2) -> Any:
    if depth and rng.random() < 0.15:
        return [some_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 2, 3, 50)))]
    if depth and rng.random() < 0.15:
        return {str(rng.choice(WORDS + PATHS))[:80]: some_value(rng, depth - 1) for _ in range(rng.choice((0, 1, 3)))}
    return rng.choice(LEAVES)


def mutate_json(document: dict[str, Any], rng: Random) -> dict[str, str]:
    """Changes the document in one or a few places; returns texts that are to stand in it raw (see `sealed`)."""
    raw: dict[str, str] = {}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        every = list(places(document))
        if not every:
            break
        path = rng.choice(every)
        target, name = parent(document, path), path[-1]
        kind = rng.choice(("value", "value", "value", "near", "drop", "rename", "swap", "twice", "raw", "key"))
        if kind == "value":
            target[name] = some_value(rng)
        elif kind == "near":
            target[name] = near(target[name], rng)
        elif kind == "drop":
            del target[name]
        elif kind == "rename" and isinstance(target, dict):
            target[str(rng.choice(WORDS + PATHS))] = target.pop(name)
        elif kind == "swap":
            other = rng.choice(every)
            theirs = parent(document, other)
            target[name], theirs[other[-1]] = copied(theirs[other[-1]]), copied(target[name])
        elif kind == "twice" and isinstance(target, list):
            target.extend([copied(target[name])] * rng.choice((1, 3, 300)))
        elif kind == "raw":
            mark = f"@raw{len(raw)}@"
            target[name], raw[mark] = mark, rng.choice(RAWS)
        elif isinstance(target, dict):
            target[str(rng.choice(WORDS + PATHS))] = some_value(rng)
    return raw


def near(value: Any, rng: Random) -> Any:
    """Something of the same kind."""
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        return rng.choice((value + 1, value - 1, -value, value * 2, value << 20, *NUMBERS))
    if isinstance(value, float):
        return rng.choice((-value, value + 1, float("nan"), float("inf"), -float("inf"), 1e30, 1e-30, 0.0))
    if isinstance(value, str):
        at = rng.randrange(len(value) + 1)
        return rng.choice((value[:at], value[:at] + rng.choice("z0/.\0\ud800") + value[at:], value * 2, value.upper(),
                           rng.choice(PATHS), rng.choice(WORDS)))
    if isinstance(value, bytes):
        return rng.choice((bytes(32), b"\xff" * 32, value[::-1], bytes([value[0] ^ 1]) + value[1:]))
    return copied(value) * 2 if isinstance(value, list) else {}


def copied(value: Any) -> Any:
    return json.loads(json.dumps(value)) if isinstance(value, dict | list) else value


def mutate_table(rows: list[dict[str, Any]], schema: pa.Schema, rng: Random) -> bytes:
    """The IPC file of changed rows; sometimes of another schema, or written in another way."""
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        kind = rng.choice(("cell", "cell", "cell", "cell", "drop", "twice", "swap", "clear"))
        at = rng.randrange(len(rows)) if rows else 0
        if not rows:
            break
        if kind == "cell":
            _change_cell(rows, rng)
        elif kind == "drop":
            del rows[at]
        elif kind == "twice":
            rows.insert(at, rows[at])
        elif kind == "swap":
            other = rng.randrange(len(rows))
            rows[at], rows[other] = rows[other], rows[at]
        else:
            rows.clear()
    table = pa.Table.from_pylist(rows, schema=schema)
    return _written(table, rng)


def _change_cell(rows: list[dict[str, Any]], rng: Random) -> None:
    every = [path for path in places(rows) if not isinstance(path[-1], int)]
    path = rng.choice(every)
    target = parent(rows, path)
    before = target[path[-1]]
    if isinstance(before, int) and not isinstance(before, bool):
        near_by = (before + 1, before - 1, *NUMBERS)
        target[path[-1]] = rng.choice([one for one in near_by if -(1 << 31) <= one < 1 << 31])
    elif isinstance(before, str) and before.startswith("{"):
        inner = json.loads(before)
        raw = mutate_json(inner, rng)
        spelled = json.dumps(inner, sort_keys=True, separators=(",", ":"))
        for mark, text in raw.items():
            spelled = spelled.replace(f'"{mark}"', text)
        target[path[-1]] = spelled
    elif isinstance(before, str):
        target[path[-1]] = near(before, rng).encode("utf-8", "replace").decode()
    elif isinstance(before, list):
        target[path[-1]] = rng.choice(([], before * 2, before * 300))
    else:
        target[path[-1]] = near(before, rng) if before is not None else rng.choice((0.5, 2.0, float("nan")))


def _written(table: pa.Table, rng: Random) -> bytes:
    kind = rng.choice(("plain",) * 12 + ("zstd", "lz4", "chunks", "nullable", "metadata", "dictionary", "large", "V4",
                                        "nulls", "order"))
    if kind in ("zstd", "lz4"):
        return file_of(table, compression=kind)
    if kind == "chunks":
        return file_of(table, chunk=rng.choice((1, 2, 5)))
    if kind == "V4":
        return file_of(table, metadata_version=pa.ipc.MetadataVersion.V4)
    if kind == "metadata":
        return file_of(table.replace_schema_metadata({"a": "b"}))
    if kind == "order":
        return file_of(table.select(table.column_names[::-1]))
    at = rng.randrange(table.num_columns)
    field, column = table.schema.field(at), table.column(at)
    if kind == "nullable":
        return file_of(table.set_column(at, field.with_nullable(not field.nullable), column))
    if kind == "nulls":
        return file_of(table.set_column(at, field, pa.nulls(len(table), field.type)))
    if kind == "dictionary" and pa.types.is_string(field.type):
        return file_of(table.set_column(at, field.name, column.dictionary_encode()))
    if kind == "large" and pa.types.is_string(field.type):
        return file_of(table.set_column(at, field.name, column.cast(pa.large_string())))
    return file_of(table)


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """Flips, numbers written over others, cuts, insertions; most of them where headers are."""
    body = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        if not body:
            break
        edge = min(len(body), 3000)
        at = rng.choice((rng.randrange(len(body)), rng.randrange(edge), len(body) - 1 - rng.randrange(edge)))
        kind = rng.choice(("flip", "flip", "number", "number", "cut", "insert", "zero", "copy"))
        if kind == "flip":
            body[at] ^= 1 << rng.randrange(8)
        elif kind == "number":
            width = rng.choice((1, 2, 4, 8))
            at -= at % width
            number = rng.choice((*NUMBERS, len(body), rng.randrange(len(body) + 1)))
            body[at:at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif kind == "cut":
            del body[at:at + rng.choice((1, 8, 64, len(body)))]
        elif kind == "insert":
            body[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        elif kind == "zero":
            body[at:at + 16] = bytes(len(body[at:at + 16]))
        else:
            other = rng.randrange(len(body))
            body[at:at + 32] = body[other:other + 32]
    return bytes(body)
