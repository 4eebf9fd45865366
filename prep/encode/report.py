"""The final report of `prep encode`, as text and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prep.encode.estimate import Estimate
from prep.encode.truncation import Truncated
from prep.findings import Finding, rejected_lines
from prep.formatting import counted, grouped, printable, shell_name

TRUNCATED = 10  # captions listed by name
WIDTH = 120  # characters of what is said about each


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeReport:
    """The result of a run; with `dry_run`, `encoded` counts the rows that would be encoded."""

    manifest: Path
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

    def as_json(self, seconds: float) -> dict[str, Any]:
        """The document of `--json`."""
        return {"format": "latentry/encode", "version": 1,
                "manifest": str(self.manifest), "dry_run": self.dry_run, "samples": dict(self.samples),
                "encoded": dict(self.encoded), "reused": dict(self.reused),
                "rejected": [one.as_json() for one in self.rejected],
                "truncated": [one.as_json() for one in self.truncated.findings],
                "masks": None if self.masks is None else dict(self.masks),
                "estimate": None if self.estimate is None else self.estimate.as_json(),
                "bytes": self.bytes, "seconds": round(seconds, 3)}

    def as_text(self, seconds: float, *, every: bool = False) -> str:
        """A short summary for people; with `every`, it lists every rejected picture."""
        verb, size = ("would encode" if self.dry_run else "encoded"), f"{self.bytes / 2**20:.1f} MiB"
        done = ", ".join(f"{grouped(count)} {field}" for field, count in self.encoded.items())
        kept = ", ".join(f"{grouped(count)} {field}" for field, count in self.reused.items())
        lines = [f"{verb}: {done} ({size}); reused: {kept}"]
        lines += [] if self.estimate is None else self.estimate.as_lines()
        lines += rejected_lines(self.rejected, every=every)
        lines += _truncated_lines(self.truncated, every=every)
        if not self.dry_run:
            roles = ", ".join(f"{grouped(count)} {role}" for role, count in self.samples.items())
            lines.append(f"{printable(str(self.manifest))}: {roles} samples in {seconds:.1f} s{self._mask_words}")
        return "\n".join(lines)

    @property
    def _mask_words(self) -> str:
        if self.masks is None:
            return ""
        found, used = self.masks["found"], self.masks["used"]
        return f"; {counted(found, 'mask')} found, {grouped(used)} used" if found else "; no masks found"


def _truncated_lines(truncated: Truncated, *, every: bool) -> list[str]:
    """The lines about captions and prompts that are cut; unless `every`, the first ones, shortened."""
    cut = [one for one in truncated.findings if one.severity == "warning"]
    partly = len(truncated.findings) - len(cut)
    lines = [f"{one.severity}: {shell_name(one.path)}: {one.code}: "
             f"{printable(one.detail if every else shortened(one.detail))}"
             for one in (cut if every else cut[:TRUNCATED])]
    if len(cut) > len(lines):
        lines.append(f"and {grouped(len(cut) - len(lines))} more captions that are cut; --json lists all by name")
    if partly:
        lines.append(f"info: {counted(partly, 'caption')} longer than one text encoder reads; another reads all of it")
    return [*lines, f"hint: {truncated.hint}"] if cut and truncated.hint else lines


def shortened(text: str) -> str:
    """At most `WIDTH` characters of a text."""
    return text if len(text) <= WIDTH else f"{text[:WIDTH - 1]}…"
