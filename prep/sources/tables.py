"""Tables of captions beside pictures: Hugging Face's `metadata.{jsonl,csv,parquet}`, kohya's JSON, others' JSON lines.

A row names its picture by `file_name` (a POSIX path below the table's directory; also `image_path`, `image` or `file`),
its caption as a JSON caption does (`prep.captions.read`), and perhaps a mask by `mask_file_name`. kohya's JSON is a
table of rows by path or by stem, diffusion-pipe's one of lists of captions by name. A path that leads out of the
source is no name of a picture in it, and a finding.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from prep.captions.read import HALF, BadCaption, captions_of, judge_captions
from prep.findings import Finding
from prep.fs.blob import Blob, error_code, read_blob
from prep.sources.tree import PICTURES

KINDS = (".json", ".jsonl", ".csv", ".parquet")
_FILE, _MASK = ("file_name", "image_path", "image", "file"), ("mask_file_name", "mask_path", "mask")
MOST_SAID = 20  # faults of one table that are named; the others are counted
# Of a Parquet file, spelled out: a kilobyte of it can say that there are a thousand million rows of a million bytes.
MOST_ROWS, MOST_BYTES = 10_000_000, 1 << 28
SHOWN = 200  # characters of a name in a message
Numbered = tuple[str, Mapping[str, Any]]  # where in the table, for people; the row


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """What a table says of one picture."""

    captions: tuple[str, ...]
    mask: str | None  # the file's path


class BadTable(Exception):
    """A table, or a row of it, cannot be used; says why."""


@dataclass(kw_only=True, slots=True)
class Tables:
    """The rows of all tables of a source, by the picture's name below its root."""

    root: Path
    findings: list[Finding] = field(default_factory=list)
    rows: dict[str, TableRow] = field(default_factory=dict)
    stems: dict[str, TableRow] = field(default_factory=dict)  # kohya's rows may leave the extension out
    used: set[str] = field(default_factory=set)

    def add(self, path: Path, prefix: str, label: str) -> None:
        """Reads the table at `path`; its names are below the directory `prefix` of the source."""
        bad = 0
        try:
            for where, row in rows_of(path):
                try:
                    self._add_row(row, prefix)
                except (BadTable, BadCaption) as error:
                    bad += 1
                    if bad <= MOST_SAID:
                        self._say(label, "bad-table", f"{where}: {error}")
        except OSError as error:
            self._say(label, error_code(error), f"table cannot be read: {error.strerror or error}")
        except BadTable as error:
            self._say(label, "bad-table", str(error))
        if bad > MOST_SAID:
            self._say(label, "bad-table", f"{bad - MOST_SAID} more of its rows cannot be used")

    def find(self, name: str) -> TableRow | None:
        """The row of a picture."""
        stem = name.rpartition(".")[0]
        key, found = (name, self.rows[name]) if name in self.rows else (stem, self.stems.get(stem))
        if found is not None:
            self.used.add(key)
        return found

    def orphans(self) -> Iterator[Finding]:
        """One finding for all rows that no picture asked for."""
        left = sorted((self.rows.keys() | self.stems.keys()) - self.used)
        if left:
            shown = ", ".join(one[:SHOWN] for one in left[:5]) + (" …" if len(left) > 5 else "")
            yield Finding(path=".", code="table-without-picture", severity="warning",
                          detail=f"{len(left)} rows of tables name pictures that are not there: {shown}")

    def _add_row(self, row: Mapping[str, Any], prefix: str) -> None:
        named = next((row[key] for key in _FILE if row.get(key)), None)
        if not isinstance(named, str):
            raise BadTable(f"has no file_name, expected a string in one of {', '.join(_FILE)}")
        name = self._below(named, prefix)
        mask = next((row[key] for key in _MASK if isinstance(row.get(key), str) and row[key]), None)
        texts, _ = judge_captions(captions_of(dict(row)))
        found = TableRow(captions=texts, mask=None if mask is None else str(self.root / self._below(mask, prefix)))
        (self.rows if PurePosixPath(name).suffix.lower() in PICTURES else self.stems)[name] = found

    def _below(self, named: str, prefix: str) -> str:
        """The name below the source's root. Raises `BadTable` for one that leads out of it."""
        text = named.replace("\\", "/")
        if Path(named).is_absolute() or text[:1] == "/" or text[1:3] == ":/":
            root = self.root.resolve().as_posix() + "/"
            if not text.startswith(root):
                raise BadTable(f"names {named[:SHOWN]!r}, expected a path inside the source")
            text, prefix = text.removeprefix(root), ""
        if ".." in text.split("/") or "\0" in text or HALF.search(text):
            raise BadTable(f"names {named[:SHOWN]!r}, expected a path inside the source")
        return prefix + PurePosixPath(text).as_posix()

    def _say(self, path: str, code: str, detail: str) -> None:
        self.findings.append(Finding(path=path, code=code, severity="error", detail=detail))


def rows_of(path: Path) -> Iterator[Numbered]:
    """The rows of the table at `path`, whose extension says how it is written. Raises `BadTable`, `OSError`."""
    readers = {".json": _json, ".jsonl": _jsonl, ".csv": _csv, ".parquet": _parquet}
    kind = path.suffix.lower()
    if kind not in readers:
        raise BadTable(f"is {path.suffix!r}, expected a table: {', '.join(KINDS)}")
    yield from readers[kind](read_blob(Blob(file=str(path))))


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadTable(f"byte {error.start} is not UTF-8, expected UTF-8 text") from None


def _json(data: bytes) -> Iterator[Numbered]:
    document = _loads(_text(data), "the table")
    if isinstance(document, list):
        for number, row in enumerate(document, 1):
            yield f"row {number}", _table(row, f"row {number}")
    elif isinstance(document, dict):
        for key, row in document.items():
            if not isinstance(row, dict | list | str):
                wanted = "expected a table with caption or tags, or captions"
                raise BadTable(f"entry {key[:80]!r} is {type(row).__name__}, {wanted}")
            yield f"entry {key[:80]!r}", {"file_name": key, **(row if isinstance(row, dict) else {"captions": row})}
    else:
        raise BadTable(f"is JSON of {type(document).__name__}, expected a list or a table of rows")


def _jsonl(data: bytes) -> Iterator[Numbered]:
    for number, line in enumerate(_text(data).splitlines(), 1):
        if line.strip():
            yield f"line {number}", _table(_loads(line, f"line {number}"), f"line {number}")


def _table(row: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(row, dict):
        raise BadTable(f"{where} is {type(row).__name__}, expected a table")
    return row


def _loads(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BadTable(f"{where} is not JSON: {str(error)[:80]}") from None


def _csv(data: bytes) -> Iterator[Numbered]:
    reader = csv.DictReader(io.StringIO(_text(data), newline=""), strict=True)
    try:
        for row in reader:
            if None in row:
                raise BadTable(f"line {reader.line_num} has more values than there are columns")
            yield f"line {reader.line_num}", row
    except csv.Error as error:
        raise BadTable(f"line {reader.line_num} is not CSV: {error}") from None


def _parquet(data: bytes) -> Iterator[Numbered]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(pa.BufferReader(data))
        wanted = [one.name for one in file.schema_arrow if one.name in _COLUMNS and _is_text(one)]
        leaves = [file.schema.column(number).path for number in range(len(file.schema))]
        texts = [leaf for leaf in leaves if leaf.partition(".")[0] in wanted]
        file = pq.ParquetFile(pa.BufferReader(data), read_dictionary=texts)  # what comes again is there once
        number = characters = 0
        for batch in file.iter_batches(batch_size=1024, columns=wanted):
            characters += sum(map(_characters, batch.columns))
            if number + len(batch) > MOST_ROWS or characters > MOST_BYTES:
                raise BadTable(f"has more than {MOST_ROWS} rows or {MOST_BYTES} bytes of text")
            for row in batch.to_pylist():
                number += 1
                yield f"row {number}", row
    except (pa.ArrowException, OSError, ValueError, MemoryError) as error:
        raise BadTable(f"is no Parquet file that can be read: {str(error)[:200]}") from None


def _characters(column: Any) -> int:
    """How many bytes its texts have when each is spelled out."""
    import pyarrow.compute as pc

    while hasattr(column, "flatten") and hasattr(column.type, "value_type") and not hasattr(column, "dictionary"):
        column = column.flatten()
    if hasattr(column, "dictionary"):
        lengths = pc.binary_length(column.dictionary).take(column.indices)
    else:
        lengths = pc.binary_length(column.cast("string"))
    return pc.sum(lengths).as_py() or 0


def _is_text(column: Any) -> bool:
    """Whether a column has text, or lists of it. Raises `BadTable` where captions are anything else.

    Names and masks are passed over then: next to file_name, others keep the picture itself in a column called image.
    """
    import pyarrow as pa

    kind = column.type
    for whole in (pa.types.is_list, pa.types.is_large_list, pa.types.is_fixed_size_list, pa.types.is_dictionary):
        kind = kind.value_type if whole(kind) else kind
    if any(plain(kind) for plain in (pa.types.is_string, pa.types.is_large_string, pa.types.is_null)):
        return True
    if column.name in (*_FILE, *_MASK):
        return False
    raise BadTable(f"column {column.name!r} is {str(column.type)[:SHOWN]}, expected text or lists of it")


_COLUMNS = {*_FILE, *_MASK, "captions", "texts", "caption", "text", "prompt", "tags"}
