"""A data set that is not encoded yet, in the tables of a manifest: the same samples and findings, without rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from prep.cache.records import RowRef
from prep.findings import Finding
from prep.geometry import Size
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
    buckets: tuple[Size, ...]

    def describe(self, number: int) -> dict[str, Any]:
        """One sample as a document, its rows `None`; the mask of a view is {} if there is one."""
        row = describe_columns(self.samples, self.buckets, number, lambda _shard, _row: None)
        if row["coverage"] is not None:
            row["views"] = [{**view, "mask": {}} for view in row["views"]]
        return row


def unencoded(samples: Iterable[Sample], buckets: Sequence[Size], coverage: Mapping[str, float],
              findings: Iterable[Finding]) -> Unencoded:
    """The tables of samples whose keys are all `NO_KEY`, and of findings; `coverage` as for `build_samples`."""
    table = build_samples(samples, buckets, _NOWHERE, {"": -1}, coverage)
    rows = [one.as_json() for one in findings]
    return Unencoded(samples=open_samples(table), buckets=tuple(buckets),
                     findings_table=pa.Table.from_pylist(rows, schema=FINDINGS))
