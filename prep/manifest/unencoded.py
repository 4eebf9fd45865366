"""A data set that is not encoded yet, in the tables of a manifest: the same samples and findings, without rows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from prep.cache.records import RowRef
from prep.findings import Finding
from prep.geometry import BucketShape
from prep.manifest.describe import describe_columns
from prep.manifest.samples import Sample, SampleColumns, build_samples, open_samples
from prep.manifest.tables import FINDINGS

NO_KEY = ""  # of a row that is in no cache
_NOWHERE = {NO_KEY: RowRef(shard="", row=-1)}


@dataclass(frozen=True, kw_only=True)
class Unencoded:
    """Samples and findings, as `OpenedManifest` has them."""

    samples: SampleColumns
    findings_table: pa.Table
    shapes: tuple[BucketShape, ...]  # of the buckets
    prefixes: tuple[str, ...] = ("",)  # of the names of each source's pictures in findings

    def describe(self, number: int) -> dict[str, Any]:
        """One sample as a document, its rows `None`; the mask of a view is {} if there is one."""
        row = describe_columns(self.samples, self.shapes, number, lambda _shard, _row: None)
        if row["coverage"] is not None:
            row["views"] = [{**view, "mask": {}} for view in row["views"]]
        return row

    def renewed(self, samples: Mapping[int, Sample], coverage: Mapping[str, float], paths: Collection[str],
                findings: Iterable[Finding]) -> Unencoded:
        """The tables with other samples at these numbers, of the same ids and names; `coverage` has their masks.

        `findings` replace those about `paths`. Only the batches of these samples are copied.
        """
        rows = {number: _table([sample], self.shapes, coverage) for number, sample in samples.items()}
        batches: list[pa.RecordBatch] = []
        first = 0
        for batch in self.samples.table.to_batches():
            parts, at = [], 0
            for number in sorted(row for row in rows if first <= row < first + len(batch)):
                parts += [batch.slice(at, number - first - at), *rows[number].to_batches()]
                at = number - first + 1
            whole = pa.Table.from_batches([*parts, batch.slice(at)]).combine_chunks().to_batches() if parts else [batch]
            batches += whole
            first += len(batch)
        others = pc.invert(pc.is_in(self.findings_table["path"], pa.array(paths, pa.string())))
        table = pa.concat_tables([self.findings_table.filter(others), _findings(findings)]).combine_chunks()
        return replace(self, findings_table=table,
                       samples=open_samples(pa.Table.from_batches(batches, schema=self.samples.table.schema)))


def unencoded(samples: Iterable[Sample], shapes: Sequence[BucketShape], coverage: Mapping[str, float],
              findings: Iterable[Finding], prefixes: Sequence[str] = ("",)) -> Unencoded:
    """The tables of samples whose keys are all `NO_KEY`, and of findings; `coverage` as for `build_samples`."""
    return Unencoded(samples=open_samples(_table(samples, shapes, coverage)), shapes=tuple(shapes),
                     findings_table=_findings(findings), prefixes=tuple(prefixes))


def _table(samples: Iterable[Sample], shapes: Sequence[BucketShape], coverage: Mapping[str, float]) -> pa.Table:
    return build_samples(samples, shapes, _NOWHERE, {"": -1}, coverage)


def _findings(findings: Iterable[Finding]) -> pa.Table:
    return pa.Table.from_pylist([finding.as_json() for finding in findings], schema=FINDINGS)
