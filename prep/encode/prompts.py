"""Runs `prep prompts`: replaces the sample prompts of a manifest, and encodes only the rows that its cache lacks.

Samples, fields of pictures and everything else that decides training steps stay as they are, so a run can resume. The
manifest is what `prep encode` with these prompts would write.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prep.buckets.references import ReferenceRules
from prep.cache.ledger.ledger import Ledger, load_ledger
from prep.cache.reader import Reader
from prep.cache.records import RowRef
from prep.cache.remote.opening import open_to_encode
from prep.cache.store import Cache
from prep.dataset.bucketing import rules_for
from prep.dataset.prompt_references import PromptReferences, prompt_references
from prep.dataset.texts import TextReading, text_options_of
from prep.digest import canonical
from prep.encode.engines.job import Job
from prep.encode.manifest.assemble import shard_row, write_new
from prep.encode.manifest.commits import require_commits
from prep.encode.manifest.document import prompt_document
from prep.encode.manifest.limits import check_document_size, largest_prompts, read_small_prompts
from prep.encode.manifest.rejected import NOT_ENCODED, split_prompts
from prep.encode.plan import EncodePlan, drop_plan, plan
from prep.encode.prepare import facts_for
from prep.encode.report import shortened
from prep.encode.resolve import remembered_digest, text_context_of
from prep.encode.targets.prompts import Painted, prompt_targets
from prep.encode.targets.records import Contexts, Targets
from prep.encode.text_groups import TextGroups
from prep.encode.truncation import PROMPT, Truncated, find_truncated
from prep.errors import CacheError, ManifestError, ModelError
from prep.findings import Finding
from prep.formatting import counted, grouped, printable
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.memo import Memo
from prep.fs.paths import NamedPath, check_disjoint, resolve
from prep.fs.place import Place, relative_name
from prep.geometry import FITS
from prep.keys import TextKeys
from prep.manifest.commands import encode_command
from prep.manifest.consistency import reference_sizes, seen_ways, shown_pictures
from prep.manifest.document import Manifest, check_model_named, read_manifest
from prep.manifest.opened import OpenedManifest, open_manifest
from prep.manifest.samples import Reference, renumber_shards
from prep.manifest.shards import keys_at
from prep.manifest.tables import build_findings, build_shards, write_table
from prep.models.configs import Configs
from prep.models.device.named import require_device
from prep.models.families.registry import FAMILIES
from prep.models.family import options_of
from prep.models.fields import STD, FieldSpecs
from prep.models.files import Model
from prep.models.fingerprint import Expected, FileDigest, bytes_of, text_files, ticking
from prep.models.hub import locate
from prep.parse import Alpha, alpha_setting, brief
from prep.progress import BackgroundTotal, Progress
from prep.recipe.schema import STORED_DTYPES, ModelOptions

MOST_REJECTS = 10  # rows that may fail before the run stops


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsCall:
    """A call of `prep prompts`."""

    file: Path
    manifest: Place
    model: str | None  # None: that of the manifest
    device: str
    download: bool
    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptsReport:
    """The result of a run."""

    file: Path
    manifest: Place
    prompts: int  # in the manifest
    encoded: int  # rows of text, and of references
    reused: int
    truncated: Truncated
    lost: tuple[Finding, ...]  # prompts that could not be encoded

    def as_json(self, seconds: float) -> dict[str, Any]:
        """The document of `--json`."""
        findings = (*self.lost, *self.truncated.findings)
        return {"format": "latentry/prompts", "version": 1, "manifest": str(self.manifest), "file": str(self.file),
                "prompts": self.prompts, "encoded": self.encoded, "reused": self.reused,
                "findings": [finding.as_json() for finding in findings], "seconds": round(seconds, 3)}

    def as_text(self, seconds: float) -> str:
        """A short summary for people."""
        lines = [f"{finding.severity}: {printable(shortened(finding.path))}: {finding.code}: "
                 f"{printable(shortened(finding.detail))}" for finding in (*self.lost, *self.truncated.findings)]
        if hint := self.truncated.hint:
            lines.append(f"hint: {'prep encode ' if hint.startswith('--') else ''}{hint}")
        return "\n".join([*lines, f"{printable(str(self.manifest))}: {counted(self.prompts, 'prompt')} in "
                          f"{seconds:.1f} s; rows: {grouped(self.encoded)} encoded, "
                          f"{grouped(self.reused)} reused"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Wanted:
    """The rows of prompts: what `prep.encode.plan` asks of wanted rows."""

    targets: Targets
    specs: FieldSpecs
    text_groups: TextGroups

    def group_of(self, field: str, key: str) -> tuple[int, int]:
        return self.targets.bucket_of(field, key) or (0, self.text_groups.tokens(key))

    def row_bytes(self, field: str, key: str) -> int:
        bucket = self.targets.bucket_of(field, key)
        return self.specs.row_bytes(field, bucket, None if bucket else self.text_groups.tokens(key))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Encoding:
    """How the manifest's rows were encoded, and are again."""

    reading: TextReading
    contexts: Contexts
    specs: FieldSpecs
    file_digest: FileDigest
    alpha: Alpha | None  # what becomes of transparency; None: it is refused

    def expected(self, field: str, name: str) -> Expected:
        """The fingerprint `name` in the context of `field`."""
        return Expected(digest=str(self.contexts.by_field()[field][name]), file_digest=self.file_digest)


def run_prompts(call: PromptsCall) -> PromptsReport:
    """Encodes the prompts and rewrites the manifest. Raises `PathError`, `ConfigError`, `ManifestError`, `CacheError`,
    `ModelError`, `UsageError`.
    """
    require_device(call.device)
    # A link is followed once, for the file and for the paths in it.
    path = resolve(call.manifest)
    manifest = read_manifest(path)
    data, prompts = read_small_prompts(call.file, "FILE")
    for role, place in (("cache", manifest.cache), ("manifest", path)):
        check_disjoint([NamedPath(role="prompts", path=call.file), NamedPath(role=role, path=place)])
    opened = open_manifest(manifest)
    _ = opened.samples  # errors in the tables show before anything is encoded
    facts = facts_for(manifest.cache, trust=True)
    encoding = _encoding_of(call, manifest, facts)
    references = prompt_references(prompts, call.file.absolute().parent, encoding.specs.family,
                                   _rules_of(manifest), manifest.alpha, facts)
    targets = prompt_targets(prompts, references, encoding.contexts, encoding.alpha, encoding.specs.family,
                             _painted(opened, references))
    check_document_size({**manifest.document, "prompts": largest_prompts(call.file, path, targets.prompts),
                         "options": _options(manifest, call.file)}, path)
    truncated = find_truncated(targets, encoding.reading, facts, call.progress)
    cache = open_to_encode(manifest.cache, create=False)
    with lock_directory(cache.root, exclusive=False, patience=PATIENCE):
        planned, encoded = _encode(call, cache, targets, encoding)
        lost, kept = _rewrite(call, opened, cache, targets, data, truncated)
        drop_plan(cache, planned, path)
    facts.save()
    return PromptsReport(file=call.file, manifest=call.manifest, prompts=kept, encoded=encoded,
                         reused=targets.rows - encoded, truncated=truncated, lost=lost)


def _rules_of(manifest: Manifest) -> ReferenceRules | None:
    """How the recipe of a manifest has references fitted; `None` if its family takes none."""
    chosen = manifest.document["latents"].get("references", {"fit": FITS[0], "resolution": 0})
    return rules_for(FAMILIES[manifest.family], chosen["fit"], chosen["resolution"])


def _encoding_of(call: PromptsCall, manifest: Manifest, facts: Memo) -> _Encoding:
    """How rows are encoded. Raises `ModelError` unless they would be as those of the manifest."""
    check_model_named(manifest, call.model)
    model = locate(call.model or manifest.model, download=call.download)
    context, family = manifest.fields["text"].context, FAMILIES[manifest.family]
    try:
        chosen = options_of(context)
    except (KeyError, TypeError, ValueError) as error:
        raise ManifestError(f"{manifest.path} does not say how its text rows were encoded: {error!r}",
                            hint=encode_command(manifest, "--prompts", call.file)) from None
    options = text_options_of(family, ModelOptions(max_length=chosen.max_length, clip_skip=chosen.clip_skip,
                                                   text_windows=chosen.windows, text_quantization=chosen.quantization),
                              Configs(model))
    compute, stored = context.get("compute"), context.get("stored")
    if compute not in STORED_DTYPES or stored not in STORED_DTYPES:
        raise ManifestError(f"{manifest.path} has text rows of dtype {brief(stored)}, computed in {brief(compute)}, "
                            f"expected {' or '.join(STORED_DTYPES)}")
    file_digest = remembered_digest(facts)
    total = BackgroundTotal(lambda: bytes_of(text_files(model).encoders.values()))
    with call.progress("hashing the model", total, "bytes") as tick:
        made = text_context_of(model, family, options, ticking(file_digest, tick), compute=compute, stored=stored)
    _require_same(made, context, model, manifest, call.file)
    latent = manifest.fields["latent"]
    specs = FieldSpecs(family=family, dtype=stored, text=family.text.shapes(Configs(model), options),
                       with_std=STD in latent.arrays)
    return _Encoding(reading=TextReading(model=model, family=family, options=options), specs=specs,
                     contexts=Contexts(latent=latent.context, text=context,
                                       mask=manifest.fields["mask"].context if manifest.inpaints else None),
                     file_digest=file_digest, alpha=manifest.alpha)


def _require_same(made: Mapping[str, Any], context: Mapping[str, Any], model: Model, manifest: Manifest,
                  file: Path) -> None:
    """Raises `ModelError` unless text rows that this program makes with `model` are like those of the manifest."""
    differing = sorted(name for name in {*made, *context} if made.get(name) != context.get(name))
    if not differing:
        return
    again = f"encode everything again: {encode_command(manifest, '--prompts', file)}"
    if "text" in differing:
        raise ModelError(f"the text encoder of {model} did not make the text rows of {manifest.path}: it is "
                         f"{str(made['text'])[:12]}, expected {str(context['text'])[:12]}",
                         hint=f"name the model that did with --model, or {again}")
    name = differing[0]
    raise ModelError(f"text rows of {manifest.path} were made with {name} {brief(context.get(name))}, and would now be "
                     f"made with {brief(made.get(name))}", hint=again)


def _encode(call: PromptsCall, cache: Cache, targets: Targets, encoding: _Encoding) -> tuple[EncodePlan, int]:
    """Encodes the rows that the cache lacks: the plan, and how many rows were made."""
    reading, contexts = encoding.reading, encoding.contexts
    groups = TextGroups(reading.model, reading.family, reading.options, targets.texts)
    planned = plan(_Wanted(targets=targets, specs=encoding.specs, text_groups=groups), cache, retry=True)
    if not planned.tasks:
        return planned, 0
    from prep.encode.engines.local import run  # here: a run with nothing to do loads no engine and no torch

    job = Job(cache=cache, model=reading.model, specs=encoding.specs, targets=targets, tasks=planned.tasks,
              vae=encoding.expected("latent", "vae") if targets.latents else encoding.expected("text", "text"),
              text=encoding.expected("text", "text"), text_options=reading.options, text_groups=groups,
              alpha=alpha_setting(encoding.alpha),
              compute={field: str(contexts.by_field()[field].get("compute", "")) for field in ("latent", "text")},
              tile=int(contexts.latent.get("tile", 0)), device=call.device, batch_size=1, jobs=1,
              max_rejects=MOST_REJECTS)
    return planned, sum(run(job, call.progress).encoded.values())


def _rewrite(call: PromptsCall, opened: OpenedManifest, cache: Cache, targets: Targets, data: bytes,
             truncated: Truncated) -> tuple[tuple[Finding, ...], int]:
    """Writes the manifest with these prompts: findings on those that have no rows, and the number of the others."""
    manifest, samples, own = opened.manifest, opened.samples, _own_rows(opened)
    ledger = load_ledger(cache)
    shown_keys = {key for prompt in targets.prompts for key in prompt.keys} - targets.texts.keys()
    refs = {**ledger.resolve([*targets.keys(), *shown_keys]), **{key: own[key] for key in targets.texts if key in own}}
    if targets.unconditional not in refs:
        raise CacheError("the unconditional text row could not be encoded", hint="run the same command again")
    prompts, lost = split_prompts(targets.prompts, refs)
    of_prompts = {key for prompt in prompts for key in prompt.keys} | {targets.unconditional}
    shards = _shards(opened, cache, {refs[key].shard for key in of_prompts}, ledger)
    require_commits(cache, manifest.path, {shard["digest"] for shard in shards}, ledger)
    table = build_shards(shards)
    numbers = {digest.as_py().hex(): number for number, digest in enumerate(table["digest"])}
    moved = np.array([numbers.get(shard["digest"], -1) for shard in opened.shards])
    tables = dict(manifest.document["tables"])
    if not np.array_equal(moved, np.arange(len(moved))):
        tables["samples"] = write_table(cache, renumber_shards(samples.table, moved))
    tables["shards"] = write_table(cache, table)
    findings = [Finding(**record) for record in opened.findings if record["code"] not in (PROMPT, NOT_ENCODED)]  # type: ignore[arg-type]
    tables["findings"] = write_table(cache, build_findings([*findings, *lost, *truncated.findings]))
    references = [reference for prompt in prompts for reference in prompt.references]
    shown = {"latent": {refs[reference.latent] for reference in references},
             "mask": {refs[reference.mask.key] for reference in references if reference.mask is not None}}
    texts = {refs[key] for key in of_prompts - shown_keys} | set(own.values())
    counts = {"text": len(texts), **{field: _rows_of(opened, field, rows) for field, rows in shown.items()
                                     if field == "latent" or manifest.inpaints}}
    fields = {**manifest.document["fields"], **{
        name: {**manifest.document["fields"][name], "rows": rows,
               "shards": sum(shard["field"] == name for shard in shards),
               "bytes": sum(shard["bytes"] for shard in shards if shard["field"] == name)}
        for name, rows in counts.items()}}
    place = relative_name(call.file, manifest.path)
    document = {name: value for name, value in manifest.document.items() if name != "self"}
    write_new(cache, manifest.path, {
        **document, "fields": fields, "tables": tables, "options": _options(manifest, call.file),
        "prompts": prompt_document(place, data, targets.unconditional, prompts, refs, numbers)})
    return tuple(lost), len(prompts)


def _painted(opened: OpenedManifest, references: PromptReferences) -> Painted:
    """The masked pictures of the manifest's samples that prompts name, as they are and not mirrored."""
    wanted = {each.known.picture for each in references.values() if each.placement is None}
    if not wanted:
        return Painted(pictures={}, buckets=())
    samples, columns = opened.samples, opened.samples.references
    sizes, digests = reference_sizes(opened.manifest, samples), samples.reference_digests
    numbers = np.array([number for number, digest in enumerate(digests)
                        if digest in wanted and not columns["flip"][number]], np.int64)
    keys = keys_at(opened.cache, [shard["digest"] for shard in opened.shards], columns["latent_shard"][numbers],
                   columns["latent_row"][numbers])
    found: dict[str, Reference] = {}
    for at, number in enumerate(numbers.tolist()):
        width, height = sizes[number].tolist()
        found[digests[number]] = Reference(
            name="", picture=digests[number], size=(int(columns["width"][number]), int(columns["height"][number])),
            placement=samples.reference_placement(number, (width, height)), latent=keys[at:at + 1].tobytes().hex())
    return Painted(pictures=found, buckets=sorted(set(opened.manifest.buckets)))


def _own_rows(opened: OpenedManifest) -> dict[str, RowRef]:
    """The places of the text rows of the manifest's samples, by each key that they may have."""
    samples, texts, found = opened.samples, opened.samples.texts, dict[str, RowRef]()
    keys = TextKeys(opened.manifest.fields["text"].context)
    digests = [shard["digest"] for shard in opened.shards]
    places = (RowRef(shard=digests[shard], row=row) for shard, row in
              zip(texts["shard"].tolist(), texts["row"].tolist(), strict=True))
    for number, own in enumerate(samples.table["texts"].to_pylist()):
        ways = seen_ways(opened.manifest, shown_pictures(opened.manifest, samples, number))
        for text in own:
            place = next(places)
            found |= {keys.key(text["caption"], seen): place for seen in ways}
    return found


def _rows_of(opened: OpenedManifest, field: str, shown: set[RowRef]) -> int:
    """How many rows of latents or masks the manifest's samples have, and `shown` besides."""
    samples = opened.samples
    tables = (samples.views, samples.references) if field == "latent" else (samples.views,)
    shard, row = (np.concatenate([table[f"{field}_{name}"] for table in tables]).astype(np.int64)
                  for name in ("shard", "row"))
    numbers = {shard["digest"]: number for number, shard in enumerate(opened.shards)}
    more = [(numbers[ref.shard] << 32) + ref.row for ref in shown if ref.shard in numbers]
    return len(np.union1d((shard << 32) + row, np.array(more, np.int64))) + sum(ref.shard not in numbers
                                                                                 for ref in shown)


def _shards(opened: OpenedManifest, cache: Cache, needed: set[str], ledger: Ledger) -> list[dict[str, Any]]:
    """The rows of the table of shards: those that samples use, and those `needed` for prompts."""
    used = {int(number) for column in opened.samples.shard_columns for number in np.unique(column) if number >= 0}
    rows = [_spelled(shard) for number, shard in enumerate(opened.shards)
            if number in used or shard["digest"] in needed]
    added = needed - {shard["digest"] for shard in rows}
    fields = opened.manifest.fields
    with closing(Reader(cache)) as reader:
        return rows + [shard_row(shard, field, fields[field].arrays, reader)
                       for shard, field in zip(ledger.shards, ledger.fields, strict=True) if shard.digest in added]


def _spelled(shard: Mapping[str, Any]) -> dict[str, Any]:
    return {**shard, **{name: canonical(shard[name]).decode() for name in ("shapes", "dtypes")}}


def _options(manifest: Manifest, file: Path) -> list[Any]:
    """The recorded options, so that the command that they spell encodes these prompts."""
    options, place = list(manifest.document["options"]), relative_name(file, manifest.path)
    if place == manifest.document["prompts"]["file"]:
        return options
    at = options.index("--prompts") if "--prompts" in options else len(options)
    return [*options[:at], "--prompts", {"path": place}, *options[at + 2:]]
