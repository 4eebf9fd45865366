"""Opens a manifest's tables, each read and checked on first use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pyarrow as pa

from prep.cache.store import Cache, cache_at
from prep.errors import CacheError
from prep.findings import Finding
from prep.manifest.consistency import cache_of, check_places, read_findings, read_samples, read_shards
from prep.manifest.document import Manifest
from prep.manifest.samples import SampleColumns
from prep.manifest.shards import ShardFacts
from prep.manifest.tables import FINDINGS, read_table


def findings_of(manifest: Manifest) -> tuple[Finding, ...]:
    """The manifest's findings. Raises `CacheError`."""
    table = read_table(cache_at(manifest.cache), manifest.document["tables"]["findings"], FINDINGS)
    return tuple(Finding(**row) for row in table.to_pylist())


@dataclass(frozen=True, kw_only=True)
class OpenedManifest:
    """A manifest and its cache; tables are read, and their digests checked, on first use."""

    manifest: Manifest
    cache: Cache

    @cached_property
    def shards(self) -> list[dict[str, Any]]:
        """Rows of the SHARDS table: digest (hex), field, rows, bytes, shapes and dtypes by array."""
        return [{"digest": facts.digest, "field": facts.field, "rows": facts.rows, "bytes": facts.bytes,
                 "shapes": {name: list(shape) for name, shape in facts.shapes.items()}, "dtypes": dict(facts.dtypes)}
                for facts in self._facts]

    @cached_property
    def _facts(self) -> tuple[ShardFacts, ...]:
        return read_shards(self.cache, self.manifest)

    @cached_property
    def samples(self) -> SampleColumns:
        """The SAMPLES table; the places of its rows are checked if the SHARDS table can be read."""
        samples = read_samples(self.cache, self.manifest)
        try:
            facts = self._facts
        except CacheError:
            return samples  # reading `shards` raises it
        check_places(self.manifest, facts, samples)
        return samples

    @cached_property
    def findings_table(self) -> pa.Table:
        """The FINDINGS table."""
        return read_table(self.cache, self.manifest.document["tables"]["findings"], FINDINGS)

    @cached_property
    def prefixes(self) -> Sequence[str]:
        """The beginning of the names of each source's pictures in findings."""
        return self.manifest.prefixes

    def labels(self) -> list[str]:
        """The name of each sample in findings, which begins with its source's prefix."""
        sources, names = self.samples.source.tolist(), self.samples.table["name"].to_pylist()
        return [f"{self.prefixes[source]}{name}" for source, name in zip(sources, names, strict=True)]

    @cached_property
    def findings(self) -> list[dict[str, str]]:
        """Rows of the FINDINGS table: path, code, severity, detail."""
        return read_findings(self.cache, self.manifest)


def open_manifest(manifest: Manifest) -> OpenedManifest:
    """Opens a manifest and its cache. Raises `CacheError` if the cache is not where the manifest says."""
    return OpenedManifest(manifest=manifest, cache=cache_of(manifest))
