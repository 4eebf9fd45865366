"""Runs `prep embed`: makes the embeddings of a recipe's pictures that a cache lacks, without any other encoder.

A later `prep encode` with the same crops and vision model finds them.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from prep.cache.ledger.ledger import Ledger, load_ledger
from prep.cache.plans import remove_plan
from prep.cache.remote.opening import check_can_encode_to, is_cache, open_to_encode
from prep.cache.store import Cache
from prep.embedding.analysis import of_pictures
from prep.embedding.rows import embeddings_in
from prep.embedding.survey import Survey, open_vision, survey
from prep.encode.engines.job import Outcome, PictureJob
from prep.encode.execute import heeding, run_here, run_job
from prep.encode.options import BATCH, EncodeOptions
from prep.encode.plan import EncodePlan, plan
from prep.encode.planned import WantedRows, clean_up, planned_rows
from prep.encode.prepare import check_places, facts_for
from prep.encode.report import errors_of
from prep.errors import EmptyPlanError
from prep.findings import Finding, rejected_lines
from prep.formatting import counted, format_bytes, grouped, printable
from prep.fs.memo import Memo, memo_path
from prep.fs.place import Place
from prep.models.device.named import require_device
from prep.models.vision.model import VisionModel
from prep.models.vision.texts import MEMORY, EmbeddedTexts, embed_lacking
from prep.progress import Progress, silent
from prep.recipe.schema import Recipe
from prep.runtime import StopRequest, gc_disabled


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedCall:
    """A call of `prep embed`."""

    recipe: Recipe  # with its vision model
    cache: Place
    options: EncodeOptions
    progress: Progress = silent


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedReport:
    """The result of a run; with `dry_run`, `made` counts the rows that would be made."""

    cache: Place
    model: str
    pictures: int  # in buckets: a picture counts once for each resolution
    made: int
    reused: int
    bytes: int  # of the rows that were made
    captions: EmbeddedTexts | None  # None: the model reads no texts
    rejected: tuple[Finding, ...]
    findings: tuple[Finding, ...]  # on what resembles what, for information
    notices: tuple[str, ...]
    dry_run: bool
    unmade: int = 0  # rows that failed in this run, and that another run may make

    def as_json(self, seconds: float) -> dict[str, Any]:
        """The document of `--json`."""
        return {"format": "latentry/embed", "version": 1, "cache": str(self.cache), "model": self.model,
                "dry_run": self.dry_run, "pictures": self.pictures, "made": self.made, "reused": self.reused,
                "bytes": self.bytes,
                "captions": None if self.captions is None else {"made": self.captions.made,
                                                                "reused": self.captions.reused},
                "rejected": [finding.as_json() for finding in self.rejected],
                "findings": [finding.as_json() for finding in self.findings],
                "seconds": round(seconds, 3)}

    def as_text(self, seconds: float, *, every: bool = False) -> str:
        """A short summary for people; with `every`, it lists every rejected picture."""
        verb, again = ("would make", "reuse") if self.dry_run else ("made", "reused")
        texts = self.captions
        also = "" if texts is None or not (count := texts.made + texts.reused) else (
            f"; {counted(count, 'caption')}: {verb} {grouped(texts.made)}, {again} {grouped(texts.reused)}")
        lines = [*rejected_lines(self.rejected, every=every),
                 f"{printable(str(self.cache))}: {verb} {counted(self.made, 'embedding')} "
                 f"({format_bytes(self.bytes)}), {again} {grouped(self.reused)}, of "
                 f"{counted(self.pictures, 'picture')} in {seconds:.1f} s{also}"]
        if self.unmade:
            lines.append(f"{counted(self.unmade, 'embedding')} could not be made in this run; run the same command "
                         "again")
        return "\n".join(lines)


@gc_disabled()
def run_embed(call: EmbedCall) -> EmbedReport:
    """Makes the missing embeddings. Raises `PathError`, `ConfigError`, `ModelError`, `CacheError`, `UsageError`,
    `StoppedError`."""
    with heeding(call.options) as stop:
        return _embed(call, stop)


def _embed(call: EmbedCall, stop: StopRequest) -> EmbedReport:
    options = call.options
    if not options.dry_run:
        require_device(options.device, several=True)
    check_places(call.recipe, call.cache, None)
    check_can_encode_to(call.cache)
    with closing(facts_for(call.cache, trust=not options.rehash)) as facts:
        vision = open_vision(call.recipe.embed, facts, call.progress,
                             download=options.download and not options.dry_run)
        wanted = survey(call.recipe, vision, facts, jobs=options.jobs, progress=call.progress)
        _require_pictures(call.recipe, wanted)
        if options.dry_run:
            cache = open_to_encode(call.cache, create=False) if is_cache(call.cache) else None
            planned = plan(wanted, cache, shard_bytes=options.shard_bytes, retry=options.retry_rejects, store=False)
            failed = () if options.retry_rejects else _rejected(wanted, planned.ledger)
            with closing(Memo(memo_path(*MEMORY))) as memory:
                would = _embed_captions(call, vision, wanted, memory)
            return _report(call, wanted, planned, planned.missing, captions=would, rejected=failed)
        cache = open_to_encode(call.cache, create=True)
        clean_up(cache)
        with planned_rows(WantedRows(wanted, options, call.progress), cache) as planned:
            outcome = _run(call, wanted, planned, cache, stop)
            if cache.plan(planned.digest).exists():  # else nothing is written: the cache may be read-only
                remove_plan(cache, planned.digest)
            rejected = (*_rejected(wanted, load_ledger(cache)), *outcome.transient)
            rows, there = embeddings_in(cache, wanted)
    with closing(Memo(memo_path(*MEMORY))) as memory:
        done = _embed_captions(call, vision, wanted, memory)
        with call.progress("comparing", len(wanted.pictures), "pictures") as tick:
            findings = of_pictures(call.recipe, wanted.pictures, rows, there, vision, memory, tick)
    return _report(call, wanted, planned, outcome.encoded, captions=done, rejected=rejected, findings=findings,
                   notices=outcome.notices, unmade=len(outcome.transient))


def _embed_captions(call: EmbedCall, vision: VisionModel, wanted: Survey, memory: Memo) -> EmbeddedTexts | None:
    if vision.reading is None:
        return None
    captions = (caption for picture in wanted.pictures for caption in picture.captions)
    return embed_lacking(vision, captions, memory, device=call.options.device, progress=call.progress,
                         dry_run=call.options.dry_run)


def _run(call: EmbedCall, wanted: Survey, planned: EncodePlan, cache: Cache, stop: StopRequest) -> Outcome:
    options, most = call.options, call.options.max_rejects
    if not planned.tasks:
        return Outcome(encoded={}, transient=())
    job = PictureJob(cache=cache, targets=wanted.targets, tasks=planned.tasks, alpha=call.recipe.image.alpha,
                     vision=wanted.vision, device=options.device, batch_size=BATCH, jobs=options.jobs,
                     max_rejects=max(10, len(wanted.pictures) // 100) if most is None else most)
    return run_job(job, stop, lambda: run_here(job, call.progress))


def _report(call: EmbedCall, wanted: Survey, planned: EncodePlan, made: Mapping[str, int], *,
            captions: EmbeddedTexts | None, rejected: tuple[Finding, ...], findings: tuple[Finding, ...] = (),
            notices: tuple[str, ...] = (), unmade: int = 0) -> EmbedReport:
    count = made.get("embedding", 0)
    return EmbedReport(cache=call.cache, model=call.recipe.embed, pictures=len(wanted.pictures), made=count,
                       reused=planned.reused.get("embedding", 0), bytes=count * wanted.row_bytes("embedding", ""),
                       rejected=tuple(sorted((*errors_of(wanted.findings), *rejected), key=attrgetter("path", "code"))),
                       findings=findings, captions=captions, dry_run=call.options.dry_run, unmade=unmade,
                       notices=(*call.recipe.notes, *notices,
                                *((f"note: {captions.note}",) if captions is not None and captions.note else ())))


def _rejected(wanted: Survey, ledger: Ledger) -> tuple[Finding, ...]:
    """A finding for each picture whose embedding this or an earlier run could not make."""
    found = ((picture.label, ledger.rejected(picture.key)) for picture in wanted.pictures)
    return tuple(Finding(path=label, code=reject.code, severity="error", detail=reject.detail)
                 for label, reject in found if reject is not None)


def _require_pictures(recipe: Recipe, wanted: Survey) -> None:
    if not wanted.pictures:
        named = ", ".join(str(source.path) for source in recipe.sources)
        errors = errors_of(wanted.findings)
        first = f": the first of {counted(len(errors), 'picture')} that cannot be used, {errors[0].path}, " \
                f"{errors[0].detail}" if errors else ""
        raise EmptyPlanError(f"no pictures to embed in {named}{first}",
                             hint="prep scan SOURCE gives the reason for each" if errors else
                             "name a directory with pictures, or tar files")
