"""Tables of captions beside pictures: Hugging Face's `metadata.{jsonl,csv,parquet}`, kohya's JSON, others' JSON lines.

A row names its picture by `file_name` (a POSIX path below the table's directory; also `image_path`, `image` or `file`),
its caption as a JSON caption does (`prep.captions.read`), and perhaps a mask by `mask_file_name`. A path that leads out
of the source is no name of a picture in it, and a finding. A worker reads the file (`prep.sources.table_files`); what
its rows name is checked here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from prep.captions.read import HALF
from prep.findings import Finding
from prep.sources.readers import lost_detail, read_table
from prep.sources.table_files import MOST_SAID, SHOWN, BadTable, Row, outside
from prep.sources.tree import PICTURES
from prep.workers.pool import WorkerLost, WorkerPool


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """What a table says of one picture."""

    captions: tuple[str, ...]
    mask: str | None  # the file's path


@dataclass(kw_only=True, slots=True)
class Tables:
    """The rows of all tables of a source, by the picture's name below its root."""

    root: Path
    workers: WorkerPool  # that read
    findings: list[Finding] = field(default_factory=list)
    rows: dict[str, TableRow] = field(default_factory=dict)
    stems: dict[str, TableRow] = field(default_factory=dict)  # kohya's rows may leave the extension out
    used: set[str] = field(default_factory=set)

    def add(self, path: Path, prefix: str, label: str) -> None:
        """Reads the table at `path`; its names are below the directory `prefix` of the source."""
        bad = 0
        try:
            parts = read_table(self.workers, path)
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

    def _add_row(self, row: Row, prefix: str) -> None:
        if row.fault is not None:
            raise BadTable(row.fault)
        name = self._below(row.named, prefix)
        mask = None if row.mask is None else str(self.root / self._below(row.mask, prefix))
        found = TableRow(captions=row.captions, mask=mask)
        (self.rows if PurePosixPath(name).suffix.lower() in PICTURES else self.stems)[name] = found

    def _below(self, named: str, prefix: str) -> str:
        """The name below the source's root. Raises `BadTable` for one that leads out of it."""
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
