"""Looks up captions in tables: Hugging Face's `metadata.{jsonl,csv,parquet}`, kohya's JSON, others' JSON lines.

A row names its picture by `file_name` (a POSIX path below the table's directory; also `image_path`, `image` or `file`),
gives its caption as in a JSON caption (`prep.captions.read`), and may name a mask by `mask_file_name`. A path that
leads out of the source is a finding. A worker reads the file (`prep.sources.table_files`); this module checks the paths
in its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from prep.captions.read import HALF
from prep.findings import Finding
from prep.fs.blob import Blob, blob_at
from prep.sources.readers import lost_detail, read_table
from prep.sources.table_files import MOST_SAID, SHOWN, BadTable, Row, outside
from prep.sources.tree import PICTURES
from prep.workers.pool import WorkerLost, WorkerPool


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """Captions and mask of one picture, from a table."""

    captions: tuple[str, ...]
    mask: Blob | None


@dataclass(kw_only=True, slots=True)
class Tables:
    """The rows of all tables of a source, by the picture's name below its root."""

    root: Path
    workers: WorkerPool  # of `prep.sources.readers`
    findings: list[Finding] = field(default_factory=list)
    rows: dict[str, TableRow] = field(default_factory=dict)
    stems: dict[str, TableRow] = field(default_factory=dict)  # rows without an extension, as kohya allows
    used: set[str] = field(default_factory=set)

    def add(self, table: Blob, prefix: str, label: str) -> None:
        """Reads a table; names in it are relative to the directory `prefix` of the source."""
        bad = 0
        try:
            parts = read_table(self.workers, table)
        except WorkerLost as lost:
            self._say(label, "bad-table", lost_detail(lost))
            return
        for part in parts:
            for row in part.rows:
                try:
                    self._add_row(row, prefix)
                except BadTable as error:
                    bad += 1
                    if bad <= MOST_SAID:
                        self._say(label, "bad-table", f"{row.where}: {error}")
            bad += part.more_faults
            if part.ending is not None:
                self._say(label, *part.ending)
        if bad > MOST_SAID:
            self._say(label, "bad-table", f"{bad - MOST_SAID} more rows cannot be used")

    def find(self, name: str) -> TableRow | None:
        """The row of the picture `name`; records that it was used."""
        stem = name.rpartition(".")[0]
        key, found = (name, self.rows[name]) if name in self.rows else (stem, self.stems.get(stem))
        if found is not None:
            self.used.add(key)
        return found

    def orphans(self) -> Iterator[Finding]:
        """One finding on all rows that match no picture."""
        left = sorted((self.rows.keys() | self.stems.keys()) - self.used)
        if left:
            shown = ", ".join(one[:SHOWN] for one in left[:5]) + (" …" if len(left) > 5 else "")
            yield Finding(path=".", code="table-without-picture", severity="warning",
                          detail=f"{len(left)} rows of tables name pictures that do not exist: {shown}")

    def _add_row(self, row: Row, prefix: str) -> None:
        if row.fault is not None:
            raise BadTable(row.fault)
        name = self._below(row.named, prefix)
        mask = None if row.mask is None else blob_at(self.root, self._below(row.mask, prefix))
        found = TableRow(captions=row.captions, mask=mask)
        (self.rows if PurePosixPath(name).suffix.lower() in PICTURES else self.stems)[name] = found

    def _below(self, named: str, prefix: str) -> str:
        """The path relative to the source's root. Raises `BadTable` if it leads out of the root."""
        text = named.replace("\\", "/")
        if Path(named).is_absolute() or text[:1] == "/" or text[1:3] == ":/":
            root = self.root.resolve().as_posix() + "/"
            if not text.startswith(root):
                raise outside(named)
            text, prefix = text.removeprefix(root), ""
        if ".." in text.split("/") or "\0" in text or HALF.search(text):
            raise outside(named)
        return prefix + PurePosixPath(text).as_posix()

    def _say(self, path: str, code: str, detail: str) -> None:
        self.findings.append(Finding(path=path, code=code, severity="error", detail=detail))
