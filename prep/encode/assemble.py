"""Assembles a manifest from the ledger: each row's place, tables, counts. The same inputs give the same bytes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

from prep.batching.split import Role
from prep.cache.ledger.ledger import Ledger, load_ledger
from prep.cache.reader import Reader
from prep.cache.records import RowRef, Shard
from prep.cache.store import Cache
from prep.digest import canonical, digest_bytes
from prep.encode.mask_coverage import coverage
from prep.encode.plan import EncodePlan
from prep.encode.replaced import keep_replaced
from prep.encode.resolve import ResolvedRecipe
from prep.encode.targets import PromptTarget
from prep.errors import CacheError, EmptyPlanError, PathError
from prep.findings import Finding
from prep.formatting import counted, printable_name
from prep.fs.memo import Memo
from prep.fs.place import Place
from prep.fs.remote.bucket import Bucket
from prep.geometry import Size
from prep.manifest.document import (
    FORMAT,
    VERSION,
    Manifest,
    read_manifest,
    relative_to_manifest,
    write_manifest,
)
from prep.manifest.samples import Sample, build_samples
from prep.manifest.tables import SHARDS, build_findings, build_shards, read_table, write_table
from prep.models.latents import latent_facts
from prep.parse import color_of

NOT_ENCODED = "prompt-not-encoded"  # the finding on a sample prompt without a text row


def assemble_manifest(wanted: ResolvedRecipe, cache: Cache, path: Place, *, frame: Mapping[str, Any],
                      prompt_bytes: bytes | None, facts: Memo, transient: Sequence[Finding] = (),
                      replaces: Manifest | None = None, found: EncodePlan | None = None) -> Manifest:
    """Writes the manifest at `path` from its `frame` and the rows in the cache. Raises `CacheError`, `EmptyPlanError`.

    If the cache is in a store, `path` is that of a local copy there, or on a disk; returns what was read from there.

    `replaces`, which is at `path`, is kept beside it if it differs. A sample with a rejected row is dropped, with a
    finding; `transient` are findings of this run only. `found` is the plan if it had no task: the cache has not changed
    since, so the ledger is not read again.
    """
    ledger = load_ledger(cache) if found is None else found.ledger
    refs = ledger.resolve(wanted.targets.keys()) if found is None else found.refs
    if wanted.targets.unconditional not in refs:
        raise CacheError("the unconditional text row could not be encoded", hint="run the same command again")
    samples, rejected = _split(wanted, ledger, refs, transient)
    _require_training(wanted, samples, rejected)
    prompts, lost = split_prompts(wanted.targets.prompts, refs)
    used = _used(wanted, samples, prompts, refs)
    reader = Reader(cache)
    numbers, shards = _shard_table(ledger, {ref.shard for ref in used.values()}, wanted, reader)
    reader.close()
    means = _coverage(cache, facts, samples, refs)
    buckets = sorted({sample.bucket for sample in samples})
    findings, file = [*wanted.targets.findings, *rejected, *lost], wanted.recipe.prompts
    document = {
        **frame,
        "fields": _fields(wanted, used, ledger),
        "buckets": _buckets(buckets, samples),
        "samples": _roles(Counter(sample.role for sample in samples)),
        "prompts": prompt_document(None if file is None else relative_to_manifest(file, path), prompt_bytes,
                                   wanted.targets.unconditional, prompts, refs, numbers),
        "tables": {
            "samples": write_table(cache, build_samples(samples, buckets, refs, numbers, means)),
            "shards": write_table(cache, shards),
            "findings": write_table(cache, build_findings(findings)),
        },
        "rejected": len({finding.path for finding in findings if finding.severity == "error"}),
    }
    return write_new(cache, path, document, replaces)


def write_new(cache: Cache, path: Place, document: Mapping[str, Any], replaces: Manifest | None = None) -> Manifest:
    """Writes the manifest of rows in `cache`, and keeps the one that it replaces. Raises `CacheError`, `ManifestError`.
    """
    if replaces is not None:
        keep_replaced(replaces, document)
    manifest = write_manifest(path, document)
    if cache.store is None:
        return manifest
    manifest = read_manifest(path)
    _require_shards(cache, manifest)
    return manifest


def _require_shards(cache: Cache, manifest: Manifest) -> None:
    """Raises `CacheError` if commits of a manifest's shards are gone from a store: `prep gc` ran there meanwhile."""
    table = read_table(cache, manifest.document["tables"]["shards"], SHARDS)
    lost = {digest.as_py().hex() for digest in table["digest"]} - {one.digest for one in load_ledger(cache).shards}
    if lost:
        raise CacheError(f"{manifest.path} was written, but {_uncommitted(cache, lost)}: prep gc may have "
                         "removed them meanwhile", hint="run the same command again, which encodes what is missing")


def require_commits(cache: Cache, path: Place, needed: Set[str], ledger: Ledger) -> None:
    """Raises `CacheError`, before a manifest in a store is replaced, if shards that it goes on to need have no commit.

    Such shards were uploaded without their commits. Other caches do not need them.
    """
    lost = needed - {shard.digest for shard in ledger.shards}
    if cache.store is not None and lost:
        raise CacheError(f"{path} is not replaced, because {_uncommitted(cache, lost)}",
                         hint="run prep push MANIFEST URL again where the cache was uploaded from, which sends the "
                         "commits; or prep encode as it was first run, which encodes these rows again")


def _uncommitted(cache: Cache, lost: Collection[str]) -> str:
    return f"{cache.store} has no commits for {counted(len(lost), 'shard')} that it names"


def _coverage(cache: Cache, facts: Memo, samples: Iterable[Sample], refs: Mapping[str, RowRef]) -> dict[str, float]:
    reader = Reader(cache)
    try:
        return coverage(reader, facts, samples, refs)
    finally:
        reader.close()


def _split(wanted: ResolvedRecipe, ledger: Ledger, refs: Mapping[str, RowRef],
           transient: Sequence[Finding]) -> tuple[list[Sample], list[Finding]]:
    """Samples with all their rows in the cache, and a finding for each other sample. Raises `CacheError`."""
    if len(refs) == wanted.targets.rows:
        return list(wanted.targets.samples), []
    said = {finding.path: finding for finding in transient}
    whole: list[Sample] = []
    findings: list[Finding] = []
    for sample, path in zip(wanted.targets.samples, wanted.targets.labels, strict=True):
        if all(key in refs for key in keys_of(sample)):
            whole.append(sample)
        else:
            findings.append(_reject_of(wanted, ledger, sample, path) or said.get(path)
                            or _unmade(path, known=bool(transient)))
    return whole, findings


def _require_training(wanted: ResolvedRecipe, whole: Sequence[Sample], rejected: Sequence[Finding]) -> None:
    """Raises `EmptyPlanError` if pictures to train on were wanted, but none could be encoded."""
    asked = sum(sample.role == "train" for sample in wanted.targets.samples)
    if asked and not any(sample.role == "train" for sample in whole):
        first = rejected[0]
        raise EmptyPlanError(f"none of {counted(asked, 'picture')} to train on could be encoded; the first, "
                             f"{printable_name(first.path)}, {first.code}: {first.detail}",
                             hint="prep scan SOURCE says whether the pictures are sound; if they are, the model is "
                             "not: name another copy of it; --retry-rejects tries the same rows again")


def rejected_so_far(wanted: ResolvedRecipe, ledger: Ledger) -> list[Finding]:
    """A finding for each sample of which this or an earlier run could not make a row."""
    if not ledger.rejects:
        return []
    found = (_reject_of(wanted, ledger, sample, path)
             for sample, path in zip(wanted.targets.samples, wanted.targets.labels, strict=True))
    return [one for one in found if one is not None]


def _reject_of(wanted: ResolvedRecipe, ledger: Ledger, sample: Sample, path: str) -> Finding | None:
    reject = next((reject for reject in map(ledger.rejected, keys_of(sample)) if reject is not None), None)
    return None if reject is None else Finding(path=path, code=reject.code, severity="error",
                                               detail=f"{_mask_of(wanted, reject.key)}{reject.detail}")


def _mask_of(wanted: ResolvedRecipe, key: str) -> str:
    """Names the mask file that a finding is about, as the start of its detail; empty for the picture itself."""
    target = wanted.targets.masks.get(key)
    own = target is None or wanted.recipe.mask_origin == "alpha"
    return "" if target is None or own else f"its mask {printable_name(target.blob.name)}: "


def _unmade(path: str, *, known: bool) -> Finding:
    """The finding on a sample that lacks a row of which nothing is said; `known` if some rows failed in this run.

    Raises `CacheError` if none did: the cache does not give back what it has.
    """
    if not known:
        raise CacheError(f"the rows of {printable_name(path)} were encoded, but cannot be read from the cache",
                         hint="check the disk, and run the same command again")
    return Finding(path=path, code="not-encoded", severity="error",
                   detail="its rows could not be encoded in this run; run the command again")


def keys_of(sample: Sample) -> list[str]:
    """The keys of all rows of a sample."""
    masks = [view.mask for view in sample.views if view.mask is not None]
    return [*(view.latent for view in sample.views), *masks, *(text.key for text in sample.texts)]


def split_prompts(prompts: Sequence[PromptTarget],
                  refs: Mapping[str, RowRef]) -> tuple[list[PromptTarget], list[Finding]]:
    """The prompts with both rows in the cache, and a finding for each other prompt."""
    kept = [prompt for prompt in prompts if prompt.positive_key in refs and prompt.negative_key in refs]
    lost = [Finding(path=prompt.prompt, code=NOT_ENCODED, severity="warning",
                    detail="this sample prompt has no text row, so no picture is made for it")
            for prompt in prompts if prompt not in kept]
    return kept, lost


def _used(wanted: ResolvedRecipe, samples: Iterable[Sample], prompts: Iterable[PromptTarget],
          refs: Mapping[str, RowRef]) -> Mapping[str, RowRef]:
    """The rows that samples and prompts use: all rows, if no wanted row is missing."""
    if len(refs) == wanted.targets.rows:
        return refs
    keys = {key for sample in samples for key in keys_of(sample)}
    keys |= {key for prompt in prompts for key in (prompt.positive_key, prompt.negative_key)}
    return {key: refs[key] for key in keys | {wanted.targets.unconditional}}


def _shard_table(ledger: Ledger, used: set[str], wanted: ResolvedRecipe, reader: Reader) -> tuple[dict[str, int], Any]:
    """Number of each used shard in the table, and the table."""
    rows = [shard_row(shard, field, wanted.specs.as_manifest(field), reader)
            for shard, field in zip(ledger.shards, ledger.fields, strict=True) if shard.digest in used]
    table = build_shards(rows)
    return {digest.as_py().hex(): number for number, digest in enumerate(table["digest"])}, table


def shard_row(shard: Shard, field: str, arrays: Iterable[str], reader: Reader) -> dict[str, Any]:
    """A shard's row of the table; `arrays` are the names of the field's arrays."""
    specs = [reader.array_info(shard.digest, name)[0] for name in arrays]
    return {"digest": shard.digest, "field": field, "rows": shard.rows, "bytes": shard.bytes,
            "shapes": canonical({spec.name: list(spec.shape) for spec in specs}).decode(),
            "dtypes": canonical({spec.name: spec.dtype for spec in specs}).decode()}


def fixed_fields(wanted: ResolvedRecipe, cache: Place, path: Place) -> dict[str, Any]:
    """The parts of the document that do not depend on rows, so that their errors show before anything is encoded.

    Raises `PathError`, `ModelError`.
    """
    family, factors = wanted.specs.family, latent_facts(wanted.model, wanted.specs.family)
    alpha = wanted.recipe.image.alpha
    return {
        "format": FORMAT, "version": VERSION, "cache": _cache(cache, path),
        "family": wanted.family,
        "model": _model(wanted, path),
        "latents": {"channels": family.latent_channels, "factor": family.factor,
                    **factors, "alpha": None if alpha == "reject" else list(color_of(alpha)),
                    **({} if wanted.latents_from is None else {"imported": wanted.latents_from.described()})},
        "prediction": wanted.prediction,
        "models": {"vae": str(wanted.contexts.latent["vae"]), "text": str(wanted.contexts.text["text"])},
        "sources": [relative_to_manifest(source.path, path) for source in wanted.recipe.sources],
        "recipe": None if wanted.recipe.file is None else relative_to_manifest(wanted.recipe.file, path),
        "options": [_option(word, path) for word in wanted.recipe.options],
    }


def _model(wanted: ResolvedRecipe, path: Place) -> dict[str, str]:
    if not Path(wanted.recipe.model.path).is_dir():
        return {"hub": wanted.recipe.model.path}
    return {"path": _place("model", Path(wanted.recipe.model.path), path)}


def _cache(cache: Place, path: Place) -> str:
    """How the manifest at `path` names its cache: relative to itself, unless only the cache is in a store."""
    if isinstance(cache, Bucket) and isinstance(path, Bucket):
        return path.parent.leads_to(cache)
    return _place("cache", cache, path)


def _place(what: str, target: Place, path: Place) -> str:
    place = relative_to_manifest(target, path)
    if place is None:
        raise PathError(f"no portable relative path leads from manifest {path} to {what} {target}",
                        hint="keep them on one drive, without backslashes in names")
    return place


def _option(word: str | Place, path: Place) -> str | dict[str, str | None]:
    return {"path": relative_to_manifest(word, path)} if isinstance(word, Place) else word


def _fields(wanted: ResolvedRecipe, used: Mapping[str, RowRef], ledger: Ledger) -> dict[str, Any]:
    sizes = {shard.digest: shard.bytes for shard in ledger.shards}
    found: dict[str, Any] = {}
    rows = wanted.targets.rows_by_field()
    for field, context in wanted.contexts.by_field().items():
        refs = [used[key] for key in rows[field] if key in used]
        shards = {ref.shard for ref in refs}
        found[field] = {"context": context, "arrays": wanted.specs.as_manifest(field), "rows": len(refs),
                        "shards": len(shards), "bytes": sum(sizes[shard] for shard in shards)}
    return found


def _buckets(sizes: Iterable[Size], samples: Iterable[Sample]) -> list[dict[str, Any]]:
    counts: dict[Size, Counter[Role]] = defaultdict(Counter)
    for sample in samples:
        counts[sample.bucket][sample.role] += 1
    return [{"size": list(size), **_roles(counts[size])} for size in sizes]


def _roles(counts: Counter[Role]) -> dict[str, int]:
    return {"train": counts["train"], "validation": counts["validation"], "prior": counts["prior"]}


def prompt_document(file: str | None, data: bytes | None, unconditional: str, prompts: Iterable[PromptTarget],
                    refs: Mapping[str, RowRef], numbers: Mapping[str, int]) -> dict[str, Any]:
    """The prompts of a manifest: their file, relative to it, with its bytes; `unconditional` is a key of `refs`."""
    def row(key: str) -> dict[str, int]:
        return {"shard": numbers[refs[key].shard], "row": refs[key].row}

    return {
        "file": file,
        "digest": None if data is None else digest_bytes(data),
        "unconditional": row(unconditional),
        "samples": [{**prompt.as_document(), "positive": row(prompt.positive_key),
                     "negative_row": row(prompt.negative_key)} for prompt in prompts],
    }
