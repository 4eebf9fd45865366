"""Looks up captions in tables: Hugging Face's `metadata.{jsonl,csv,parquet}`, kohya's JSON, others' JSON lines.

A row names its picture by `file_name` (a POSIX path below the table's directory; also `image_path`, `image` or `file`),
gives its caption as in a JSON caption (`prep.captions.read`), and may name a mask by `mask_file_name` and references by
`references`, `control_path` and others. A path that leads out of the source is a finding. A worker reads the file
(`prep.sources.table_files`); this module checks the paths in its rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from prep.captions.read import HALF
from prep.findings import Finding, finding
from prep.formatting import counted, join_names
from prep.fs.blob import Blob, blob_at
from prep.fs.paths import resolve
from prep.fs.place import Place
from prep.sources.readers import lost_detail, read_table
from prep.sources.table_files import MOST_SAID, SHOWN, BadTable, ParsedRow, outside
from prep.sources.tree import PICTURES
from prep.workers.pool import WorkerLost, WorkerPool


@dataclass(frozen=True, kw_only=True, slots=True)
class TableRow:
    """Captions, mask and references of one picture, from a table."""

    name: str  # of the picture, as it is looked up
    captions: tuple[str, ...]
    mask: Blob | None
    table: str  # for messages
    where: str  # its position in the table
    references: tuple[Blob, ...] = ()


@dataclass(kw_only=True, slots=True)
class Tables:
    """The rows of all tables of a source, by the picture's name below its root."""

    root: Place
    workers: WorkerPool  # of `prep.sources.readers`
    findings: list[Finding] = field(default_factory=list)
    rows: dict[str, TableRow] = field(default_factory=dict)
    stems: dict[str, TableRow] = field(default_factory=dict)  # rows without an extension, as kohya allows
    used: set[str] = field(default_factory=set)
    referred: set[str] = field(default_factory=set)  # names below the root that rows name as references
    faulty: dict[str, TableRow] = field(default_factory=dict)  # rows that cannot be used, if their picture is known
    unused: dict[str, list[str]] = field(default_factory=dict)  # by table: pictures whose caption files go before it
    read: list[tuple[str, str]] = field(default_factory=list)  # the directory of each table, and its name

    def add(self, table: Blob, prefix: str, label: str) -> None:
        """Reads a table; names in it are relative to the directory `prefix` of the source."""
        bad = repeated = 0
        self.read.append((prefix, label))
        try:
            parts = read_table(self.workers, table)
        except WorkerLost as lost:
            self._say(label, "bad-table", lost_detail(lost))
            return
        for part in parts:
            for row in part.rows:
                try:
                    other = self._add_row(row, prefix, label)
                except BadTable as error:
                    bad += 1
                    if bad <= MOST_SAID:
                        self._say(label, "bad-table", row.fault or f"{row.where}: {error}")
                    continue
                repeated += other is not None
                if other is not None and repeated <= MOST_SAID:
                    self._say(label, "duplicate-row", f"{row.where}: {other.name[:SHOWN]} has a row before, "
                              f"{other.where} of {other.table}, which is used")
            bad += part.more_faults
            if part.ending is not None:
                self._say(label, *part.ending)
        if bad > MOST_SAID:
            self._say(label, "bad-table", f"{bad - MOST_SAID} more rows cannot be used")
        if repeated > MOST_SAID:
            self._say(label, "duplicate-row", f"{repeated - MOST_SAID} more rows of pictures that have one before")

    def find(self, name: str, *, captioned: bool = False) -> TableRow | None:
        """The row of the picture `name`, which is `captioned` by a file or not; records that it was used."""
        stem = name.rpartition(".")[0]
        key, row = (name, self.rows[name]) if name in self.rows else (stem, self.stems.get(stem))
        if row is not None:
            self.used.add(key)
            if captioned and row.captions:
                self.unused.setdefault(row.table, []).append(name)
        return row

    def only_refers_to(self, name: str) -> bool:
        """Whether rows name the picture `name` as a reference, and none is its own: then it is no sample."""
        return name in self.referred and name not in self.rows and name.rpartition(".")[0] not in self.stems

    def why_none(self, name: str) -> str:
        """Returns why no table has a caption of the picture `name`; "" if no table names it."""
        row = self.rows.get(name) or self.stems.get(stem := name.rpartition(".")[0])
        faulty = self.faulty.get(name) or self.faulty.get(stem) if row is None else None
        if row is not None:
            return f"no caption file, and no caption in {row.where} of {row.table}"
        if faulty is not None:
            return f"no caption file, and {faulty.where} of {faulty.table} cannot be used"
        tables = [label for prefix, label in self.read if name.startswith(prefix)]
        return f"no caption file, and no row in {join_names(tables, 3)}" if tables else ""

    def leftovers(self) -> Iterator[Finding]:
        """Findings on rows that match no picture, or are not used."""
        for label, names in self.unused.items():
            yield finding(label, "second-caption", f"{counted(len(names), 'row')} of pictures with a caption file, "
                          f"which is used instead: {join_names(names, 5)}")
        spelled = {name.rpartition(".")[0]: name for name in self.rows.keys() & self.used}
        unused = sorted((self.rows.keys() | self.stems.keys()) - self.used)
        for stem in [stem for stem in unused if stem in self.stems and stem in spelled]:
            other, row = self.rows[spelled[stem]], self.stems[stem]
            unused.remove(stem)
            yield finding(row.table, "duplicate-row", f"{row.where}: {spelled[stem]} has a row by its whole name, "
                          f"{other.where} of {other.table}, which is used")
        if unused:
            shown = ", ".join(name[:SHOWN] for name in unused[:5]) + (" …" if len(unused) > 5 else "")
            yield Finding(path=".", code="table-without-picture", severity="warning",
                          detail=f"{len(unused)} rows of tables name pictures that do not exist: {shown}")

    def _add_row(self, row: ParsedRow, prefix: str, label: str) -> TableRow | None:
        """Adds a row, or returns the row that its picture already has. Raises `BadTable`."""
        name = self._below(row.named, prefix) if row.named or row.fault is None else ""
        if row.fault is not None:
            self.faulty[name] = TableRow(name=name, captions=(), mask=None, table=label, where=row.where)
            raise BadTable(row.fault)
        mask = None if row.mask is None else blob_at(self.root, self._below(row.mask, prefix))
        place = self.rows if PurePosixPath(name).suffix.lower() in PICTURES else self.stems
        references = [self._below(named, prefix) for named in row.references]
        self.referred.update(references)
        added = TableRow(name=name, captions=row.captions, mask=mask, table=label, where=row.where,
                         references=tuple(blob_at(self.root, named) for named in references))
        first = place.setdefault(name, added)
        return None if first is added else first

    def _below(self, named: str, prefix: str) -> str:
        """The path relative to the source's root. Raises `BadTable` if it leads out of the root."""
        text = named.replace("\\", "/")
        if Path(named).is_absolute() or text[:1] == "/" or text[1:3] == ":/":
            root = resolve(self.root).as_posix() + "/"
            if not text.startswith(root):
                raise outside(named)
            text, prefix = text.removeprefix(root), ""
        if ".." in text.split("/") or "\0" in text or HALF.search(text):
            raise outside(named)
        return prefix + PurePosixPath(text).as_posix()

    def _say(self, path: str, code: str, detail: str) -> None:
        self.findings.append(finding(path, code, detail))
