"""The final report of `prep encode` and `prep seal`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prep.batching.split import ROLES
from prep.encode.engines.job import Outcome
from prep.encode.forecast.estimate import Estimate
from prep.encode.manifest.replaced import Replaced
from prep.encode.plan import EncodePlan, PlanPart
from prep.encode.resolve import ResolvedRecipe
from prep.encode.truncation import Truncated
from prep.findings import LISTED, Finding, rejected_lines
from prep.formatting import counted, grouped, join_names, printable, shell_name
from prep.fs.place import Place
from prep.manifest.document import Manifest
from prep.manifest.opened import findings_of, open_manifest

UNREAD = ("unreadable-file", "changed-meanwhile", "not-encoded")  # what the disk or a cluster failed at, no bad picture
WIDTH = 120  # characters of what is said about each


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeReport:
    """The result of a run; with `dry_run`, `encoded` counts the rows that would be encoded."""

    manifest: Place
    encoded: Mapping[str, int]
    reused: Mapping[str, int]
    rejected: tuple[Finding, ...]
    notices: tuple[str, ...]
    bytes: int  # of the new rows
    samples: Mapping[str, int]
    dry_run: bool
    masks: Mapping[str, int] | None = None  # how many were found and used; None: no masks requested
    truncated: Truncated = field(default_factory=Truncated)
    estimate: Estimate | None = None  # of a dry run: what the run would take
    part: PlanPart | None = None  # what was encoded; None: everything, and the manifest was written
    replaced: Replaced | None = None  # the manifest that was replaced; None: none, or by the same
    unmade: int = 0  # rows that failed in this run, and that another run may make

    def as_json(self, seconds: float) -> dict[str, Any]:
        """The document of `--json`."""
        return {"format": "latentry/encode", "version": 1,
                "manifest": str(self.manifest), "part": None if self.part is None else str(self.part),
                "dry_run": self.dry_run, "samples": dict(self.samples),
                "encoded": dict(self.encoded), "reused": dict(self.reused),
                "rejected": [finding.as_json() for finding in self.rejected],
                "truncated": [finding.as_json() for finding in self.truncated.findings],
                "masks": None if self.masks is None else dict(self.masks),
                "estimate": None if self.estimate is None else self.estimate.as_json(),
                **({} if self.replaced is None else {"replaced": self.replaced.as_json()}),
                "bytes": self.bytes, "seconds": round(seconds, 3)}

    def as_text(self, seconds: float, *, every: bool = False) -> str:
        """A short summary for people; with `every`, it lists every rejected picture."""
        verb, size = ("would encode" if self.dry_run else "encoded"), f"{self.bytes / 2**20:.1f} MiB"
        done = ", ".join(f"{grouped(count)} {field}" for field, count in self.encoded.items())
        reused = ", ".join(f"{grouped(count)} {field}" for field, count in self.reused.items())
        lines = [f"{verb}: {done} ({size}); reused: {reused}"]
        lines += [] if self.estimate is None else self.estimate.as_lines()
        lines += rejected_lines(self.rejected, every=every)
        lines += self.truncated_lines(every=every)
        if self.part is not None and not self.dry_run:
            lines.append(self._part_words)
        elif not self.dry_run:
            roles = ", ".join(f"{grouped(count)} {role}" for role, count in self.samples.items())
            lines.append(f"{printable(str(self.manifest))}: {roles} samples in {seconds:.1f} s{self._mask_words}")
            lines += [self._unmade_words] if self.unmade else []
        return "\n".join(lines)

    @property
    def _unmade_words(self) -> str:
        return f"{counted(self.unmade, 'row')} could not be encoded in this run; run the same command again"

    def truncated_lines(self, *, every: bool) -> list[str]:
        """The lines about captions and prompts that are cut; unless `every`, the first ones, shortened."""
        return _truncated_lines(self.truncated, every=every)

    @property
    def _part_words(self) -> str:
        if self.unmade:
            return f"part {self.part}: {self._unmade_words}"
        return f"part {self.part} is encoded; once all parts are, prep seal writes {printable(str(self.manifest))}"

    @property
    def _mask_words(self) -> str:
        if self.masks is None:
            return ""
        masks_found, used = self.masks["found"], self.masks["used"]
        drawn = f", {grouped(self.masks['drawn'])} drawn" if "drawn" in self.masks else ""
        found = f"{counted(masks_found, 'mask')} found" if masks_found else "no masks found"
        return f"; {found}{drawn}, {grouped(used)} used" if masks_found or drawn else f"; {found}"


def _truncated_lines(truncated: Truncated, *, every: bool) -> list[str]:
    """The lines about captions and prompts that are cut; unless `every`, the first ones, shortened."""
    cut = [finding for finding in truncated.findings if finding.severity == "warning"]
    partly = len(truncated.findings) - len(cut)
    lines = [f"{finding.severity}: {shell_name(finding.path)}: {finding.code}: "
             f"{printable(finding.detail if every else shortened(finding.detail))}"
             for finding in (cut if every else cut[:LISTED])]
    if len(cut) > len(lines):
        lines.append(f"and {grouped(len(cut) - len(lines))} more captions that are cut; --all lists all by name")
    if partly:
        lines.append(f"info: {counted(partly, 'caption')} longer than one text encoder reads; another reads all of it")
    return [*lines, f"hint: {truncated.hint}"] if cut and truncated.hint else lines


def shortened(text: str) -> str:
    """At most `WIDTH` characters of a text."""
    return text if len(text) <= WIDTH else f"{text[:WIDTH - 1]}…"


def report_of(path: Place, resolved: ResolvedRecipe, planned: EncodePlan, outcome: Outcome, sealed: Manifest, *,
              masks_asked: bool, replaced: Replaced | None = None) -> EncodeReport:
    """The report of a run that wrote the manifest `sealed` at `path`."""
    used, black = _masked(resolved, sealed)
    drawn = len({target.name for target in resolved.targets.masks.values() if target.mask_from == "drawn"})
    masks = {"found": resolved.survey.masks, "used": used, **({"drawn": drawn} if resolved.recipe.draws_masks else {})}
    note = "" if replaced is None else replaced.note(printable(str(path)))
    return EncodeReport(manifest=path, encoded=_encoded(planned, outcome), reused=planned.reused, bytes=planned.bytes,
                        rejected=errors_of(findings_of(sealed)),
                        notices=(*resolved.targets.notices, *outcome.notices, *black, *([note] if note else [])),
                        replaced=replaced,
                        samples={role: sealed.document["samples"][role] for role in ROLES}, dry_run=False,
                        masks=masks if masks_asked else None,
                        unmade=sum(finding.code in UNREAD for finding in outcome.transient))


def part_report(path: Place, resolved: ResolvedRecipe, planned: EncodePlan, outcome: Outcome, part: PlanPart,
                rejected: Sequence[Finding]) -> EncodeReport:
    """The report of one part. `rejected`: samples of which it, or another part that has ended, could not make a row."""
    return EncodeReport(manifest=path, encoded=_encoded(planned, outcome), reused=planned.reused, bytes=planned.bytes,
                        rejected=(*errors_of(resolved.targets.findings), *rejected, *outcome.transient),
                        notices=(*resolved.targets.notices, *outcome.notices), samples={}, dry_run=False, part=part,
                        unmade=len(outcome.transient))


def errors_of(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """The findings for which a picture is left out."""
    return tuple(finding for finding in findings if finding.severity == "error")


def _encoded(planned: EncodePlan, outcome: Outcome) -> dict[str, int]:
    return {field: outcome.encoded.get(field, 0) for field in planned.missing}


def _masked(resolved: ResolvedRecipe, sealed: Manifest) -> tuple[int, list[str]]:
    """How many pictures of the manifest have a mask, and a notice if masks are entirely black."""
    if resolved.recipe.mask_origin == "none":
        return 0, []
    samples = open_manifest(sealed).samples
    masked = (~np.isnan(samples.coverage)).nonzero()[0]
    pictures = {(int(samples.source[number]), samples.name(int(number))) for number in masked}
    black = [samples.name(int(number)) for number in (samples.coverage == 0).nonzero()[0]]
    return len(pictures), [f"{counted(len(black), 'mask')} entirely black; with masked loss "
                           f"{'this sample' if len(black) == 1 else 'these samples'} would not train: "
                           f"{join_names(black, 8)}"] if black else []
