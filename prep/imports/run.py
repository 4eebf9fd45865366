"""Runs `prep import`: finds caches, compares some, imports all; masks and texts are encoded as by `prep encode`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from prep.encode.options import EncodeOptions
from prep.encode.prepare import EncodeCall, Prepared
from prep.encode.report import EncodeReport
from prep.encode.run import run_encode
from prep.errors import UsageError
from prep.findings import rejected_lines
from prep.formatting import counted, grouped, printable
from prep.fs.place import Place
from prep.imports.source import ORIGIN, KohyaLatents
from prep.imports.verify import Verified, verify
from prep.models.device.named import require_device
from prep.parse import brief
from prep.progress import Progress
from prep.recipe.schema import Recipe

ORIGINS = (ORIGIN,)


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportCall:
    """A call of `prep import`."""

    recipe: Recipe
    origin: str  # one of ORIGINS
    cache: Place
    output: Place
    verify: int  # latents to compare; 0: none
    no_upscale: bool  # whether sd-scripts had `bucket_no_upscale`
    options: EncodeOptions
    progress: Progress


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """The result of an import."""

    encoded: EncodeReport
    verified: Verified
    notices: tuple[str, ...] = field(default=())

    def as_json(self, seconds: float) -> dict[str, Any]:
        """The document of `--json`."""
        latents, others = _split(self.encoded.encoded), _split(self.encoded.reused)
        return {"format": "latentry/import", "version": 1, "manifest": str(self.encoded.manifest), "from": ORIGIN,
                "samples": dict(self.encoded.samples), "imported": latents[0], "encoded": latents[1],
                "reused": {"latent": others[0], **others[1]},
                "verified": {"compared": self.verified.compared, "unclear": self.verified.unclear,
                             "deviation": round(self.verified.deviation, 4)},
                "rejected": [finding.as_json() for finding in self.encoded.rejected],
                "truncated": [finding.as_json() for finding in self.encoded.truncated.findings],
                "bytes": self.encoded.bytes, "seconds": round(seconds, 3)}

    def as_text(self, seconds: float, *, every: bool = False) -> str:
        """A short summary for people; with `every`, it lists every rejected picture."""
        (latents, made), (reused_latents, others) = _split(self.encoded.encoded), _split(self.encoded.reused)
        reused = ", ".join(f"{grouped(count)} {name}" for name, count in {"latent": reused_latents, **others}.items())
        encoded = ", ".join(f"{grouped(count)} {name}" for name, count in made.items())
        counts = [f"imported: {counted(latents, 'latent')}", f"encoded: {encoded}", f"reused: {reused}"]
        roles = ", ".join(f"{grouped(count)} {role}" for role, count in self.encoded.samples.items())
        return "\n".join(["; ".join(counts), *rejected_lines(self.encoded.rejected, every=every),
                          *self.encoded.truncated_lines(every=every), self._verified_line,
                          f"{printable(str(self.encoded.manifest))}: {roles} samples in {seconds:.1f} s"])

    @property
    def _verified_line(self) -> str:
        if not self.verified.compared:
            return "VAE unverified: no latent was compared with what the model's VAE makes"
        return (f"VAE verified: {counted(self.verified.compared, 'latent')} compared, which deviate by at most "
                f"{self.verified.deviation:.3f} of their spread")


def _split(rows: Mapping[str, int]) -> tuple[int, dict[str, int]]:
    """The number of latents, and the numbers of the other rows by field."""
    return rows.get("latent", 0), {name: count for name, count in rows.items() if name != "latent"}


def run_import(call: ImportCall) -> ImportReport:
    """Imports latents, encodes masks and texts, and writes the manifest. Raises every kind of `Problem`."""
    require_device(call.options.device)
    if call.origin not in ORIGINS:
        raise UsageError(f"--from is {brief(call.origin)}, expected {', '.join(ORIGINS)}")
    verified = Verified()

    def check(ready: Prepared) -> Prepared:
        nonlocal verified
        if not call.verify:
            return ready
        latents: Mapping[str, Any] = ready.frame["latents"]
        rows = source.rows(ready.resolved.specs.family, ready.resolved.specs.dtype, latents)
        verified = verify(ready, rows, call.verify, device=call.options.device, progress=call.progress)
        imported = {**latents["imported"], "verified": verified.compared}
        return replace(ready, frame={**ready.frame, "latents": {**latents, "imported": imported}})

    source = KohyaLatents(no_upscale=call.no_upscale)
    report = run_encode(EncodeCall(
        recipe=call.recipe, cache=call.cache, output=call.output, options=replace(call.options, batch_size=1),
        progress=call.progress, latents_from=source, check=check))
    unclear = (f"note: {counted(verified.unclear, 'latent')} would also fit the mirrored picture, or the picture "
               "cannot be decoded, so they tell nothing of the VAE",) if verified.unclear else ()
    return ImportReport(encoded=report, verified=verified, notices=(*report.notices, *unclear))
