"""Assembles a manifest from the ledger: each row's place, tables, counts. The same inputs give the same bytes."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from prep.cache.ledger.ledger import Ledger, StoredRows, load_ledger
from prep.cache.reader import Reader
from prep.cache.records import Shard
from prep.cache.store import Cache
from prep.digest import canonical
from prep.encode.manifest.commits import require_shards
from prep.encode.manifest.document import buckets_of, fields_of, prompt_document, roles_of
from prep.encode.manifest.mask_coverage import coverage
from prep.encode.manifest.rejected import keys_of, require_training, split_prompts, split_samples
from prep.encode.manifest.replaced import keep_replaced
from prep.encode.plan import EncodePlan
from prep.encode.report import errors_of
from prep.encode.resolve import ResolvedRecipe
from prep.encode.targets.records import PromptTarget
from prep.errors import CacheError
from prep.findings import Finding
from prep.fs.memo import Memo
from prep.fs.place import Place, relative_name
from prep.manifest.document import Manifest, version_of, write_manifest
from prep.manifest.samples import Sample, build_samples
from prep.manifest.tables import build_findings, build_shards, write_table


def assemble_manifest(resolved: ResolvedRecipe, cache: Cache, path: Place, *, frame: Mapping[str, Any],
                      prompt_bytes: bytes | None, facts: Memo, transient: Sequence[Finding] = (),
                      replaces: Manifest | None = None, unchanged: EncodePlan | None = None) -> Manifest:
    """Writes the manifest at `path` from its `frame` and the rows in the cache. Raises `CacheError`, `EmptyPlanError`.

    If the cache is in a store, `path` is that of a local copy there, or on a disk; returns what was read from there.

    `replaces`, which is at `path`, is kept beside it if it differs. A sample with a rejected row is dropped, with a
    finding; `transient` are findings of this run only. `unchanged` is the plan if it had no task: the cache is as then,
    so the ledger is not read again.
    """
    ledger, refs = (unchanged.ledger, unchanged.refs) if unchanged is not None else _resolved(resolved, cache)
    if resolved.targets.unconditional not in refs:
        raise CacheError("the unconditional text row could not be encoded", hint="run the same command again")
    samples, rejected = split_samples(resolved, ledger, refs, transient)
    require_training(resolved, samples, errors_of(tuple(rejected)))
    prompts, lost = split_prompts(resolved.targets.prompts, refs)
    used = _used(resolved, samples, prompts, refs)
    with closing(Reader(cache)) as reader:
        numbers, shards = _shard_table(ledger, used.by_shard(), resolved, reader)
        means = coverage(reader, facts, samples, refs) if resolved.targets.masks else {}
    buckets, embedded = buckets_of(samples), resolved.vision is not None
    findings, file = [*resolved.targets.findings, *rejected, *lost], resolved.recipe.prompts
    document = {
        **frame,
        "version": version_of(samples.shapes, embedded=embedded),
        "fields": fields_of(resolved, used, ledger),
        "buckets": buckets,
        "samples": roles_of(buckets),
        "prompts": prompt_document(None if file is None else relative_name(file, path), prompt_bytes,
                                   resolved.targets.unconditional, prompts, refs, numbers),
        "tables": {
            "samples": write_table(cache, build_samples(samples, samples.shapes, refs, numbers, means,
                                                        embedded=embedded)),
            "shards": write_table(cache, shards),
            "findings": write_table(cache, build_findings(findings)),
        },
        "rejected": len({finding.path for finding in findings if finding.severity == "error"}),
    }
    return write_new(cache, path, document, replaces)


def _resolved(resolved: ResolvedRecipe, cache: Cache) -> tuple[Ledger, StoredRows]:
    ledger = load_ledger(cache)
    return ledger, ledger.resolve(resolved.targets.keys())


def write_new(cache: Cache, path: Place, document: Mapping[str, Any], replaces: Manifest | None = None) -> Manifest:
    """Writes the manifest of rows in `cache`, and keeps the one that it replaces. Raises `CacheError`, `ManifestError`.
    """
    if replaces is not None:
        keep_replaced(replaces, document)
    manifest = write_manifest(path, document)
    require_shards(cache, manifest)
    return manifest


def _used(resolved: ResolvedRecipe, samples: Iterable[Sample], prompts: Iterable[PromptTarget],
          refs: StoredRows) -> StoredRows:
    """The rows that samples and prompts use: all rows, if no wanted row is missing."""
    if len(refs) == resolved.targets.rows:
        return refs
    keys = {key for sample in samples for key in (*keys_of(sample), *sample.keys("embedding"))}
    keys |= {key for prompt in prompts for key in prompt.keys}
    return refs.only(keys | {resolved.targets.unconditional})


def _shard_table(ledger: Ledger, used: Container[str], resolved: ResolvedRecipe,
                 reader: Reader) -> tuple[dict[str, int], Any]:
    """Number of each used shard in the table, and the table."""
    rows = [shard_row(shard, field, resolved.specs.as_manifest(field), reader)
            for shard, field in zip(ledger.shards, ledger.fields, strict=True) if shard.digest in used]
    table = build_shards(rows)
    return {digest.as_py().hex(): number for number, digest in enumerate(table["digest"])}, table


def shard_row(shard: Shard, field: str, arrays: Iterable[str], reader: Reader) -> dict[str, Any]:
    """A shard's row of the table; `arrays` are the names of the field's arrays."""
    specs = [reader.array_info(shard.digest, name)[0] for name in arrays]
    return {"digest": shard.digest, "field": field, "rows": shard.rows, "bytes": shard.bytes,
            "shapes": canonical({spec.name: list(spec.shape) for spec in specs}).decode(),
            "dtypes": canonical({spec.name: spec.dtype for spec in specs}).decode()}
