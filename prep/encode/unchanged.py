"""Remembers a run that found nothing to encode: where nothing has changed since, its manifest is written as it is.

A manifest follows from what `_name` puts together (names and stamps of all files, the recipe, the model, this code) and
from the rows in the cache. If all of that is as it was when the manifest was written, another run would make the same
one, so it plans nothing. Whatever differs, or is not known, leads to a plan.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

from prep.cache.ledger.ledger import Ledger, load_ledger
from prep.cache.publish import leftovers
from prep.cache.remote.opening import open_to_encode
from prep.cache.store import Cache
from prep.dataset.facts import fact_kinds
from prep.encode.manifest.assemble import write_new
from prep.encode.plan import EncodePlan
from prep.encode.prepare import Begun, Prepared
from prep.encode.report import EncodeReport, errors_of
from prep.encode.truncation import Truncated
from prep.errors import CacheError
from prep.findings import Finding
from prep.fs.lock import PATIENCE, lock_directory
from prep.fs.memo import REFRESH
from prep.images.plugins import decoders
from prep.maintenance.repair import damaged_shards, incomplete_commits
from prep.manifest.document import Manifest
from prep.manifest.opened import findings_of
from prep.manifest.tables import SHARDS, read_table, samples_schema
from prep.progress import phase

MOST_BYTES = 1 << 22  # of what is remembered of a run, compressed; the captions that are cut take most of it
_DAY = 86400
# Their versions decide facts of files, which captions are cut, or the bytes of tables.
_LIBRARIES = ("numpy", "pillow", "pyarrow", "tokenizers", "transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    """What is remembered of a run, besides its manifest."""

    day: int  # after `REFRESH` days it is planned again, which renews what is remembered of files
    manifest: str  # digest
    ledger: str  # digest
    plan: str  # digest of the wanted keys
    reused: Mapping[str, int]
    notices: tuple[str, ...]
    masks: Mapping[str, int] | None
    truncated: Truncated

    def spelled(self) -> bytes:
        """As bytes to be remembered."""
        words = {"day": self.day, "manifest": self.manifest, "ledger": self.ledger, "plan": self.plan,
                 "reused": dict(self.reused), "notices": self.notices,
                 "masks": None if self.masks is None else dict(self.masks), "hint": self.truncated.hint,
                 "truncated": [(cut.path, cut.code, cut.severity, cut.detail) for cut in self.truncated.findings]}
        return zlib.compress(json.dumps(words).encode("ascii"), 1)

    @classmethod
    def parsed(cls, data: bytes) -> _Run:
        """What `spelled` spelled."""
        words: dict[str, Any] = json.loads(zlib.decompress(data))
        findings = tuple(Finding(path=path, code=code, severity=severity, detail=detail)
                         for path, code, severity, detail in words["truncated"])
        return cls(day=words["day"], manifest=words["manifest"], ledger=words["ledger"], plan=words["plan"],
                   reused=words["reused"], notices=tuple(words["notices"]), masks=words["masks"],
                   truncated=Truncated(findings=findings, hint=words["hint"]))


def repeat_unchanged(begun: Begun) -> EncodeReport | None:
    """Writes the manifest of an earlier run if nothing has changed since, and reports it; else `None`, and nothing is
    written. Raises `CacheError`."""
    name = _name(begun)
    noted = None if name is None else begun.facts.recall(name)
    if noted is None or begun.replaces is None:
        return None
    run = _Run.parsed(noted)
    if not 0 <= _today() - run.day < REFRESH or begun.replaces.digest != run.manifest:
        return None
    cache = open_to_encode(begun.call.cache, create=True)
    with (phase(begun.call.progress, "checking the cache"),
          lock_directory(cache.root, exclusive=False, patience=PATIENCE)):
        if not _is_as_it_was(cache, begun.replaces, run):
            return None
        document = {key: value for key, value in begun.replaces.document.items() if key != "self"}
        sealed = write_new(cache, begun.output, document, begun.replaces)
        return EncodeReport(
            manifest=begun.call.output, encoded=dict.fromkeys(run.reused, 0), reused=run.reused, bytes=0,
            rejected=errors_of(findings_of(sealed)), notices=run.notices, samples=sealed.document["samples"],
            dry_run=False, masks=run.masks, truncated=run.truncated)


def note_unchanged(ready: Prepared, planned: EncodePlan, report: EncodeReport, sealed: Manifest) -> None:
    """Remembers a run that wrote the manifest `sealed`, if it had nothing to encode and could read all files."""
    name = _name(ready.begun)
    if name is None or planned.tasks or ready.resolved.survey.failed:
        return
    run = _Run(day=_today(), manifest=sealed.digest, ledger=_digest_of(planned.ledger), plan=planned.digest,
               reused=report.reused, notices=report.notices, masks=report.masks, truncated=ready.truncated)
    if len(spelled := run.spelled()) <= MOST_BYTES:
        ready.begun.facts.note(name, spelled)


def _is_as_it_was(cache: Cache, manifest: Manifest, run: _Run) -> bool:
    """Whether a cache has the rows and tables that it had, and nothing in it waits to be repaired."""
    if damaged_shards(cache) or leftovers(cache.unsent) or cache.plan(run.plan).exists():
        return False
    ledger = load_ledger(cache, remember=True)
    if _digest_of(ledger) != run.ledger or incomplete_commits(cache, ledger):
        return False
    try:
        for table, schema in (("samples", samples_schema(manifest.shapes, embedded=manifest.embedded)),
                              ("shards", SHARDS)):
            read_table(cache, manifest.document["tables"][table], schema)
        findings_of(manifest)
    except CacheError:
        return False
    return True


def _name(begun: Begun) -> bytes | None:
    """The name under which a run is remembered: a digest of all that its manifest follows from, but for the rows in the
    cache. `None` for a run that does something else (`EncodeCall.is_plain`), or whose files may change without a trace.
    """
    call, model = begun.call, begun.model
    if not begun.listed.digest or any(prompt.references for prompt in begun.prompts):
        return None
    inputs = (begun.listed.digest, call.recipe, call.cache, begun.output, call.output, model.recipe, model.model,
              model.options, model.prediction, model.contexts, model.denoiser, model.missing, begun.prompts,
              begun.prompt_bytes, _code(), sys.hexversion, [version(name) for name in _LIBRARIES],
              sorted(fact_kinds().items()), decoders())
    return b"unchanged:" + hashlib.blake2b(repr(inputs).encode("utf-8", "surrogatepass"), digest_size=32).digest()


def _digest_of(ledger: Ledger) -> str:
    """Tells ledgers with other rows, or rows in other places, apart."""
    seen = hashlib.blake2b(digest_size=32)
    for column in (ledger.keys, ledger.shard, ledger.row):
        seen.update(np.ascontiguousarray(column).data)
    rejects = sorted((key, repr(reject)) for key, reject in ledger.rejects.items())
    seen.update(repr((ledger.shards, ledger.fields, rejects)).encode("utf-8", "surrogatepass"))
    return seen.hexdigest()


@cache  # what this process runs was loaded when it began
def _code() -> str:
    """Tells versions of this package apart, also while it is being worked on."""
    files = []
    for folder, _, names in os.walk(Path(__file__).parents[1]):
        for path in (os.path.join(folder, name) for name in names if name.endswith(".py")):  # noqa: PTH118  (3 µs less)
            status = os.stat(path)  # noqa: PTH116
            files.append((path, status.st_size, status.st_mtime_ns))
    return hashlib.blake2b(repr(sorted(files)).encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


def _today() -> int:
    return int(time.time()) // _DAY
