"""Every row of a manifest, wherever its cache is."""

from __future__ import annotations

from pathlib import Path

from prep.cache.reader import Reader
from prep.manifest.document import read_manifest
from prep.manifest.opened import open_manifest


def rows_of(path: Path):
    """The bytes of each row, by shard, array and number."""
    audit = open_manifest(read_manifest(path))
    reader, found = Reader(audit.cache), {}
    for shard in audit.shards:
        for array in shard["shapes"]:
            spec, rows = reader.array_info(shard["digest"], array)
            for row in range(rows):
                out = memoryview(bytearray(spec.row_bytes))
                reader.read_into(out, shard["digest"], array, row)
                found[shard["digest"], array, row] = bytes(out)
    reader.close()
    return found
