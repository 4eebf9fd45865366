"""A manifest with its tables, each read and checked when it is first asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prep.cache.store import Cache, open_cache
from prep.errors import CacheError
from prep.findings import Finding
from prep.manifest.consistency import check_places, read_findings, read_samples, read_shards
from prep.manifest.document import Manifest
from prep.manifest.samples import SampleColumns
from prep.manifest.shards import ShardFacts
from prep.manifest.tables import FINDINGS, read_table


def findings_of(manifest: Manifest) -> tuple[Finding, ...]:
    """The findings that a manifest holds. Raises `CacheError`."""
    table = read_table(Cache(root=manifest.cache_root), manifest.document["tables"]["findings"], FINDINGS)
    return tuple(Finding(**row) for row in table.to_pylist())


@dataclass(frozen=True, kw_only=True)
class OpenedManifest:
    """A manifest and its cache; tables are read, and their digests checked, when first asked for."""

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
        """The SAMPLES table; the places of rows in it are checked, too, where the SHARDS table can be read."""
        found = read_samples(self.cache, self.manifest)
        try:
            facts = self._facts
        except CacheError:
            return found  # whoever asks for the shards is told
        check_places(self.manifest, facts, found)
        return found

    @cached_property
    def findings(self) -> list[dict[str, str]]:
        """Rows of the FINDINGS table: path, code, severity, detail."""
        return read_findings(self.cache, self.manifest)


def open_manifest(manifest: Manifest) -> OpenedManifest:
    """The audit of a manifest. Raises `CacheError` when its cache is not where it says."""
    return OpenedManifest(manifest=manifest, cache=open_cache(manifest.cache_root, create=False))
