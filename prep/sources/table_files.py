"""Parses tables of captions: JSON, JSON lines, CSV or Parquet. Runs in a worker (`prep.sources.readers`).

kohya's JSON maps paths or stems to rows, diffusion-pipe's maps names to lists of captions; in the other formats, each
row names its picture in a column.
"""

from __future__ import annotations

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

import msgspec

from prep.captions.read import HALF, BadCaption, captions_of, judge_captions
from prep.fs.blob import Blob, error_code, read_blob
from prep.parse import Repeated, keep_repeated

KINDS = (".json", ".jsonl", ".csv", ".parquet")
_FILE, _MASK = ("file_name", "image_path", "image", "file"), ("mask_file_name", "mask_path", "mask")
# Columns of references: ours, musubi-tuner's, those of data sets on the Hub (with _file_name as its image folders have
# it), DiffSynth's. Each has a path, or a list; the first that a row has counts. With a number behind it, each has one.
_REFERENCES = ("references", "reference", "control_path", "conditioning_image", "conditioning_image_file_name",
               "edit_image", "edit_image_file_name")
_NUMBERED = re.compile(rf"({'|'.join(_REFERENCES)})_(\d{{1,3}})")
MOST_REFERENCES = 100  # of a row
_COLUMNS = {*_FILE, *_MASK, *_REFERENCES, "captions", "texts", "caption", "text", "prompt", "tags"}
_MORE = "\0"  # the values of a row beyond its columns
MOST_SAID = 20  # faults of one table that are reported; further ones are only counted
MOST_ROWS = 10_000_000
MOST_AGAIN = 1_000_000  # lines of a CSV that are read again because what begins above them is no row
MOST_BYTES = 1 << 28  # of a Parquet file's decoded texts: a kilobyte of it can expand to a billion characters
SHOWN = 200  # characters of a name in a message
PART_ROWS, PART_CHARACTERS = 1000, 1 << 20  # per part; exceeded by at most one row
_LINE = re.compile(rb"[^\r\n]*(?:\r\n?|\n)|[^\r\n]+")  # line ends as `csv` counts them
Numbered = tuple[str, Mapping[str, Any] | str]  # position in the table, for messages; the row, or its fault


class BadTable(Exception):
    """A table, or one of its rows, cannot be used; the message says why."""


class ParsedRow(msgspec.Struct, frozen=True, array_like=True):
    """The content of one row, or why it cannot be used."""

    where: str  # position in the table, for messages
    named: str = ""  # the picture, as the table spells it; of an unusable row, if it is known
    captions: tuple[str, ...] = ()
    mask: str | None = None  # as the table spells it
    fault: str | None = None  # with its position
    references: tuple[str, ...] = ()  # as the table spells them


class TableMessage(msgspec.Struct, frozen=True, array_like=True):
    """A table to read: a path, which may not be valid UTF-8, or the URL and bytes of a table in a store."""

    file: bytes
    data: bytes | None

    @classmethod
    def of(cls, table: Blob) -> TableMessage:
        """The message of a table."""
        return cls(os.fsencode(table.file), table.data)

    def blob(self) -> Blob:
        """The table of the message."""
        return Blob(file=os.fsdecode(self.file), data=self.data)


class TablePart(msgspec.Struct, frozen=True, array_like=True):
    """Some rows of a table, in order."""

    rows: list[ParsedRow]
    more_faults: int = 0  # unusable rows beyond `MOST_SAID`
    ending: tuple[str, str] | None = None  # (code, detail) if the rest of the table cannot be read


def read_parts(table: Blob) -> Iterator[TablePart]:
    """The rows of a table. The last part has the fault of the table, if any."""
    rows: list[ParsedRow] = []
    characters = bad = 0
    ending = None
    try:
        for number, (where, values) in enumerate(rows_of(table)):
            if number >= MOST_ROWS:
                raise BadTable(f"has more than {MOST_ROWS} rows")
            row = _row(where, values)
            bad += row.fault is not None
            if row.fault is None or bad <= MOST_SAID:
                rows.append(row)
                characters += sum(map(len, row.captions))
            if len(rows) >= PART_ROWS or characters >= PART_CHARACTERS:
                yield TablePart(rows)
                rows, characters = [], 0
    except OSError as error:
        ending = unreadable(error)
    except BadTable as error:
        ending = ("bad-table", _clean(str(error)))
    yield TablePart(rows, max(0, bad - MOST_SAID), ending)


def unreadable(error: OSError) -> tuple[str, str]:
    """The fault of a table that cannot be read."""
    return error_code(error), f"table cannot be read: {error.strerror or error}"


def _row(where: str, table: Mapping[str, Any] | str) -> ParsedRow:
    if isinstance(table, str):
        return ParsedRow(where, fault=_clean(f"{where} {table}"))
    named = next((table[key] for key in _FILE if table.get(key)), None)
    known = named if isinstance(named, str) and not HALF.search(named) else ""
    try:
        if isinstance(table, Repeated) and (twice := sorted(filter(_is_column, table.repeated))):
            raise BadTable(f"has {twice[0]!r} twice, expected once")
        if table.get(_MORE):
            return ParsedRow(where, known, fault=f"{where} has more values than there are columns")
        if not isinstance(named, str):
            raise BadTable(f"has no file_name, expected a string in one of {', '.join(_FILE)}")
        mask = next((table[key] for key in _MASK if isinstance(table.get(key), str) and table[key]), None)
        references = _references(table)
        for text in (named, mask, *references):
            if text is not None and HALF.search(text):
                raise outside(text)
        return ParsedRow(where, named, judge_captions(captions_of(table))[0], mask, references=references)
    except (BadTable, BadCaption) as error:
        return ParsedRow(where, known, fault=_clean(f"{where}: {error}"))


def _references(table: Mapping[str, Any]) -> tuple[str, ...]:
    """The references that a row names, in order. Raises `BadTable`."""
    values = [table[key] for key in _REFERENCES if table.get(key)][:1]
    if not values:
        numbered = sorted((int(found[2]), str(key)) for key in table if (found := _NUMBERED.fullmatch(str(key))))
        values = [table[key] for _, key in numbered if table[key]]
    texts: list[str] = []
    for value in values:
        if isinstance(value, str) and value[:1] == "[" and value[-1:] == "]":  # a list in a CSV
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        texts += [value] if isinstance(value, str) else value if isinstance(value, list) else [value]
    if bad := [text for text in texts if not isinstance(text, str) or not text]:
        raise BadTable(f"names {str(bad[0])[:SHOWN]!r} as a reference, expected a path")
    if len(texts) > MOST_REFERENCES:
        raise BadTable(f"names {len(texts)} references, expected at most {MOST_REFERENCES}")
    return tuple(texts)


def _is_column(name: str) -> bool:
    return name in _COLUMNS or _NUMBERED.fullmatch(name) is not None


def outside(named: str) -> BadTable:
    """The fault of a row whose name is not a path inside its source."""
    return BadTable(f"names {named[:SHOWN]!r}, expected a path inside the source")


def _clean(text: str) -> str:
    return text.encode("utf-8", "backslashreplace").decode()


# ---- each kind of table ----------------------------------------------------------------------------------------------


def rows_of(table: Blob) -> Iterator[Numbered]:
    """The rows of a table, parsed according to its extension. Raises `BadTable`, `OSError`."""
    readers = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    suffix = PurePosixPath(table.name).suffix
    if suffix.lower() not in readers:
        raise BadTable(f"is {suffix!r}, expected a table: {', '.join(KINDS)}")
    yield from readers[suffix.lower()](read_blob(table))


def _decoded(data: bytes, start: int = 0) -> str:
    """These bytes of the table, which begin at `start`, as text without a byte order mark. Raises `BadTable`."""
    try:
        return data.decode("utf-8" if start else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadTable(f"byte {start + error.start} is not UTF-8, expected UTF-8 text") from None


def _json(data: bytes) -> Iterator[Numbered]:
    try:
        document = json.loads(_decoded(data), object_pairs_hook=keep_repeated)
    except (ValueError, RecursionError) as error:
        raise BadTable(f"the table is not JSON: {str(error)[:80]}") from None
    if isinstance(document, list):
        for number, row in enumerate(document, 1):
            yield f"row {number}", _table(row)
    elif isinstance(document, dict):
        for key, row in document.pairs if isinstance(document, Repeated) else document.items():
            yield f"entry {key[:80]!r}", _entry(key, row)
    else:
        raise BadTable(f"is JSON of {type(document).__name__}, expected a list or a table of rows")


def _entry(key: str, row: Any) -> Mapping[str, Any] | str:
    """The row of a picture called `key`, or its fault."""
    if isinstance(row, Repeated) and "file_name" not in row:
        return Repeated([("file_name", key), *row.pairs])
    if isinstance(row, dict):
        return {"file_name": key, **row}
    if isinstance(row, list | str):
        return {"file_name": key, "captions": row}
    return f"is {type(row).__name__}, expected a table with caption or tags, or captions"


def _jsonl(data: bytes) -> Iterator[Numbered]:
    """One row for each line. A line ends with LF, CR LF or CR, and not with Unicode's other line ends: JSON strings may
    contain those."""
    for number, match in enumerate(_LINE.finditer(data), 1):
        if match[0].strip():
            yield f"line {number}", _json_line(match)


def _json_line(match: re.Match[bytes]) -> Mapping[str, Any] | str:
    try:
        return _table(json.loads(_decoded(match[0], match.start()), object_pairs_hook=keep_repeated))
    except BadTable as error:
        return str(error)
    except json.JSONDecodeError as error:
        return f"is not JSON from column {error.colno} on: {error.msg[:80]}"
    except (ValueError, RecursionError) as error:
        return f"is not JSON: {str(error)[:80]}"


def _table(row: Any) -> Mapping[str, Any] | str:
    return row if isinstance(row, dict) else f"is {type(row).__name__}, expected a table"


def _csv(data: bytes) -> Iterator[Numbered]:
    """Yields the rows below the line of names. After a row that is not CSV, reads on in the line below its first: a
    quotation mark that nothing closes would take the others with it."""
    rows = _csv_rows(data)
    where, heads = next(rows, ("line 1", []))
    if isinstance(heads, str):
        raise BadTable(f"{where} {heads}")
    names = [name.strip() for name in heads]
    if twice := sorted(name for name in set(names) if _is_column(name) and names.count(name) > 1):
        raise BadTable(f"has two columns {twice[0]!r}, expected one")
    for where, row in rows:
        yield where, row if isinstance(row, str) else {**dict(zip(names, row, strict=False)), _MORE: row[len(names):]}


def _csv_rows(data: bytes) -> Iterator[tuple[str, list[str] | str]]:
    """Yields the values of each row, or the fault of a line where no row begins."""
    lines = _TextLines(data)
    reader, again = csv.reader(lines, strict=True), 0
    while lines.at < len(lines.spans):
        begun = lines.at
        try:
            row = next(reader)
        except (csv.Error, BadTable) as error:
            where, fault = f"line {begun + 1}", f"is not CSV: {error}" if isinstance(error, csv.Error) else str(error)
            again += lines.at - begun
            if again > MOST_AGAIN:
                raise BadTable(f"{where} {fault}; the lines below it are not read") from None
            yield where, fault
            lines.at, reader = begun + 1, csv.reader(lines, strict=True)
            continue
        if row:
            yield f"line {lines.at}", row


class _TextLines:
    """The lines of a table, as text."""

    def __init__(self, data: bytes) -> None:
        self.spans, self.at = [match.span() for match in _LINE.finditer(data)], 0  # which is next
        self._data = data

    def __iter__(self) -> _TextLines:
        return self

    def __next__(self) -> str:
        if self.at == len(self.spans):
            raise StopIteration
        start, end = self.spans[self.at]
        self.at += 1
        return _decoded(self._data[start:end], start)


def _parquet(data: bytes) -> Iterator[Numbered]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        wanted = [column.name for column in file.schema_arrow if _is_column(column.name) and _is_text(column)]
        if twice := sorted({name for name in wanted if wanted.count(name) > 1}):
            raise BadTable(f"has two columns {twice[0]!r}, expected one")
        leaves = [file.schema.column(number).path for number in range(len(file.schema))]
        texts = [leaf for leaf in leaves if leaf.partition(".")[0] in wanted]
        _check_declared(file.metadata, [number for number, leaf in enumerate(leaves) if leaf in texts])
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts)  # repeated texts take memory only once
        number = characters = 0
        for batch in file.iter_batches(batch_size=1024, columns=wanted, use_threads=False):
            characters += sum(map(_characters, batch.columns))
            _check_most(number + len(batch), characters)
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except MemoryError:  # Arrow's own is a subclass
        raise
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadTable(f"is not a readable Parquet file: {str(error)[:200]}") from None


def _check_declared(metadata: Any, leaves: list[int]) -> None:
    """Raises `BadTable` if the file's metadata declares too much text, before any of it is decoded."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    declared = sum(group.column(leaf).total_uncompressed_size for group in groups for leaf in leaves)
    _check_most(metadata.num_rows, declared - 16 * len(leaves) * metadata.num_rows)  # lengths and levels, rounded up


def _check_most(rows: int, characters: int) -> None:
    if rows > MOST_ROWS or characters > MOST_BYTES:
        raise BadTable(f"has more than {MOST_ROWS} rows or {MOST_BYTES} bytes of text")


def _characters(column: Any) -> int:
    """The total bytes of its texts, with repeated ones counted each time."""
    import pyarrow.compute as pc

    while hasattr(column, "flatten") and hasattr(column.type, "value_type") and not hasattr(column, "dictionary"):
        column = column.flatten()
    if hasattr(column, "dictionary"):
        lengths = pc.binary_length(column.dictionary).take(column.indices)
    else:
        lengths = pc.binary_length(column.cast("string"))
    return pc.sum(lengths).as_py() or 0


def _is_text(column: Any) -> bool:
    """Whether a column has text, or lists of text. Raises `BadTable` if a caption column has anything else.

    Columns of names, masks and references with other content are ignored: some tables have the picture itself in a
    column `image`.
    """
    import pyarrow as pa

    kind = column.type
    for whole in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_dictionary):
        kind = kind.value_type if whole(kind) else kind
    if any(plain(kind) for plain in (pa.types.is_string, pa.types.is_large_string, pa.types.is_null)):
        return True
    if column.name in (*_FILE, *_MASK, *_REFERENCES) or _NUMBERED.fullmatch(column.name):
        return False
    raise BadTable(f"column {column.name!r} is {str(column.type)[:SHOWN]}, expected text or lists of text")
