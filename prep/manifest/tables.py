"""Reads and writes a manifest's three tables: uncompressed Arrow IPC files, memory-mapped, named by their digest.

    SAMPLES   one row per sample, sorted by id: everything `train` needs, with the places of its rows
    SHARDS    one row per shard, sorted by (field, digest): SAMPLES refers to shards by row number
    FINDINGS  one row per finding, sorted

Equal rows give equal bytes: record batches of 65,536 rows, no metadata. 10^7 samples open in 0.5 ms, and processes
share the pages.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa

from prep.cache.arrow import parse_table, stream_of
from prep.cache.publish import publish_table
from prep.cache.remote.unsent import upload_table
from prep.cache.store import Cache
from prep.errors import CacheError
from prep.findings import Finding
from prep.fs.tree import file_digest
from prep.fs.untrusted import open_regular, size_regular
from prep.geometry import BucketShape, have_references
from prep.parse import Unparsed
from prep.runtime import return_heap

BATCH_ROWS = 1 << 16
POOL = pa.system_memory_pool()  # of what is written: Arrow's own keeps what was freed, 0.2 kB for each sample of many
MOST = 1 << 35  # bytes of a table; 10^8 samples have 24 GB
HINT = "run the prep encode command again: it rewrites the tables"


def _schema(**columns: pa.DataType) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable=name == "coverage") for name, kind in columns.items()])


def _records(**columns: pa.DataType) -> pa.DataType:
    return pa.list_(pa.field("item", pa.struct(list(_schema(**columns))), nullable=False))


INT = pa.int32()
DIGEST = pa.binary(32)
VIEW = dict.fromkeys(("scaled_width", "scaled_height", "crop_x", "crop_y"), INT) | {"flip": pa.bool_()} | dict.fromkeys(
    ("latent_shard", "latent_row", "mask_shard", "mask_row"), INT  # -1: no row
)
TEXT = {"caption": pa.string(), "weight": pa.float32(), "shard": INT, "row": INT}
SAMPLES = _schema(
    id=DIGEST, name=pa.string(), source=INT, role=pa.string(), picture=DIGEST,
    width=INT, height=INT,  # pixels, after orientation
    bucket=INT,  # index into the manifest's buckets
    repeats=INT, weight=pa.float32(),
    coverage=pa.float32(),  # mean of the mask, 0 to 1; null: no mask
    views=_records(**VIEW), texts=_records(**TEXT),
)
# Of a data set in which a sample has reference pictures: those of each view in turn, in their order, as many for each.
REFERENCE = {"name": pa.string(), "picture": DIGEST, "width": INT, "height": INT} | {
    name: VIEW[name] for name in ("scaled_width", "scaled_height", "crop_x", "crop_y", "flip", "latent_shard",
                                  "latent_row")}
SAMPLES_WITH_REFERENCES = SAMPLES.append(pa.field("references", _records(**REFERENCE), nullable=False))
# Of a data set with embeddings: one of each sample, at most; -1: it has none.
EMBEDDING = ("embedding_shard", "embedding_row")
SHARDS = _schema(
    digest=DIGEST, field=pa.string(), rows=INT, bytes=pa.int64(),
    shapes=pa.string(),  # canonical JSON {"latent": [4, 64, 64]}
    dtypes=pa.string(),  # canonical JSON {"latent": "bfloat16"}
)
FINDINGS = _schema(path=pa.string(), code=pa.string(), severity=pa.string(), detail=pa.string())


def samples_schema(shapes: Iterable[BucketShape], *, embedded: bool = False) -> pa.Schema:
    """The schema of the SAMPLES table of a data set with buckets of these shapes, and perhaps with embeddings."""
    schema = SAMPLES_WITH_REFERENCES if have_references(shapes) else SAMPLES
    for name in EMBEDDING if embedded else ():
        schema = schema.append(pa.field(name, INT, nullable=False))
    return schema


def write_table(cache: Cache, table: pa.Table) -> str:
    """Writes the table to the cache, also to its store, and returns the digest of its file."""
    schema, columns = table.schema.remove_metadata(), []
    while table.num_columns:  # of a million samples, each copy has 200 MB: one column at a time is there twice
        columns += table.select([0]).combine_chunks(memory_pool=POOL).columns
        table = table.remove_column(0)
        return_heap()  # the copied one
    whole = pa.Table.from_arrays(columns, schema=schema)
    del columns, table
    digest = publish_table(cache, partial(_spelled, whole))
    del whole
    upload_table(cache, digest)
    return digest


def _spelled(whole: pa.Table) -> Iterator[bytes]:
    """The bytes of the table's file, in parts: each is let go of before the next batch is spelled."""
    sink = _Parts()
    with pa.ipc.new_file(pa.PythonFile(sink, "w"), whole.schema,
                         options=pa.ipc.IpcWriteOptions(compression=None)) as writer:
        for batch in whole.to_batches(max_chunksize=BATCH_ROWS):
            writer.write_batch(batch)
            yield from sink.taken()
    yield from sink.taken()


class _Parts:
    """A file for Arrow to write, whose bytes are taken while it is written."""

    closed = False

    def __init__(self) -> None:
        self._parts: deque[bytes] = deque()
        self._written = 0

    def write(self, data: bytes) -> int:
        self._parts.append(data)
        self._written += len(data)
        return len(data)

    def tell(self) -> int:
        return self._written

    def flush(self) -> None:
        """Nothing waits for anything but `taken`."""

    def close(self) -> None:
        """What was written can still be taken."""

    def taken(self) -> Iterator[bytes]:
        """What was written and not taken yet, piece by piece."""
        while self._parts:
            yield self._parts.popleft()


def read_table(cache: Cache, digest: str, schema: pa.Schema, *, check: bool = True) -> pa.Table:
    """The table with that digest, memory-mapped; `check` reads the whole file once to verify the digest.

    Raises `CacheError` if it is missing, damaged, or has another schema. The file is untrusted: a returned table is
    structurally valid and took no more memory than the file has bytes. `prep.manifest.consistency` checks its values.
    """
    path = cache.table(digest)
    try:
        if (size := size_regular(path)) > MOST:
            raise Unparsed(f"it has {size} bytes, expected at most {MOST}")
        if check and file_digest(path) != digest:
            raise CacheError(f"table {digest} is damaged: its bytes do not match its name", hint=HINT)
        return parse_table(stream_of(_mapped(path)), schema)
    except FileNotFoundError:
        raise CacheError(f"table {digest} is missing", hint=HINT) from None
    except (OSError, Unparsed) as error:
        raise CacheError(f"table {digest} cannot be read: {error}", hint=HINT) from None


def _mapped(path: Path) -> memoryview:
    """A file's bytes, memory-mapped; the map closes with its last reference."""
    descriptor = open_regular(path)
    try:
        if not os.fstat(descriptor).st_size:
            raise Unparsed("it is empty")
        return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))
    finally:
        os.close(descriptor)


def build_shards(rows: list[dict[str, Any]]) -> pa.Table:
    """The SHARDS table of the rows {digest (hex), field, rows, bytes, shapes, dtypes}, sorted by (field, digest)."""
    ordered = sorted(rows, key=lambda row: (row["field"], row["digest"]))
    return pa.Table.from_pylist([{**row, "digest": bytes.fromhex(row["digest"])} for row in ordered], schema=SHARDS)


def build_findings(findings: list[Finding]) -> pa.Table:
    """The FINDINGS table, sorted by path, code, severity, detail."""
    rows = sorted((finding.path, finding.code, finding.severity, finding.detail) for finding in findings)
    return pa.Table.from_pylist([dict(zip(FINDINGS.names, row, strict=True)) for row in rows], schema=FINDINGS)
