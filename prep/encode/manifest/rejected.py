"""Samples and prompts of which a row could not be made: left out of a manifest, each with a finding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from prep.cache.ledger.ledger import Ledger
from prep.cache.records import RowRef
from prep.encode.report import UNREAD
from prep.encode.resolve import ResolvedRecipe
from prep.encode.targets.records import PromptTarget
from prep.errors import CacheError, EmptyPlanError
from prep.findings import Finding
from prep.formatting import counted, printable_name
from prep.manifest.samples import Sample, Samples

NOT_ENCODED = "prompt-not-encoded"  # the finding on a sample prompt without a text row


def split_samples(resolved: ResolvedRecipe, ledger: Ledger, refs: Mapping[str, RowRef],
                  transient: Sequence[Finding]) -> tuple[Samples, list[Finding]]:
    """Samples with all their rows in the cache, and a finding for each other sample; one that lacks its embedding alone
    stays, without it. Raises `CacheError`."""
    if len(refs) == resolved.targets.rows:
        return resolved.targets.samples, []
    said = {finding.path: finding for finding in transient}
    whole = Samples()
    findings: list[Finding] = []
    for sample, path in zip(resolved.targets.samples, resolved.targets.labels, strict=True):
        if all(key in refs for key in keys_of(sample)):
            lacks = sample.embedding is not None and sample.embedding not in refs
            whole.add(sample._replace(embedding=None) if lacks else sample)
            findings += [Finding(path=path, code="not-embedded", severity="warning", detail=(
                "has no embedding, which could not be made; training needs none"))] if lacks else []
        else:
            findings.append(_reject_of(resolved, ledger, sample, path) or said.get(path)
                            or _unmade(path, known=bool(transient)))
    return whole, findings


_SOUND = ("prep scan SOURCE says whether the pictures are sound; if they are, the model is not: name another copy of "
          "it; --retry-rejects tries the same rows again")


def require_training(resolved: ResolvedRecipe, whole: Samples, rejected: Sequence[Finding]) -> None:
    """Raises `EmptyPlanError` if pictures to train on were wanted, but none could be encoded."""
    count = resolved.targets.samples.having("train")
    if count and not whole.having("train"):
        first = rejected[0]
        raise EmptyPlanError(f"none of {counted(count, 'picture')} to train on could be encoded; the first, "
                             f"{printable_name(first.path)}, {first.code}: {first.detail}",
                             hint=_way_out(first.code, imported=resolved.latents_from is not None))


def _way_out(code: str, *, imported: bool) -> str:
    """What helps where no picture could be encoded, the first because of `code`."""
    if code in UNREAD:
        return "run the same command again, once the files can be read and nothing changes them"
    return "let sd-scripts make its caches again, with --no_half_vae" if imported and code == "not-finite" else _SOUND


def rejected_so_far(resolved: ResolvedRecipe, ledger: Ledger) -> list[Finding]:
    """A finding for each sample of which this or an earlier run could not make a row."""
    if not ledger.rejects:
        return []
    findings = (_reject_of(resolved, ledger, sample, path)
                for sample, path in zip(resolved.targets.samples, resolved.targets.labels, strict=True))
    return [finding for finding in findings if finding is not None]


def _reject_of(resolved: ResolvedRecipe, ledger: Ledger, sample: Sample, path: str) -> Finding | None:
    reject = next((reject for reject in map(ledger.rejected, keys_of(sample)) if reject is not None), None)
    return None if reject is None else Finding(path=path, code=reject.code, severity="error",
                                               detail=f"{_file_of(resolved, sample, reject.key)}{reject.detail}")


def _file_of(resolved: ResolvedRecipe, sample: Sample, key: str) -> str:
    """Names the mask or reference that a finding is about, as the start of its detail; empty for the picture itself."""
    latent, target = resolved.targets.latents.get(key), resolved.targets.masks.get(key)
    if latent is not None and latent.hole is not None:
        return "" if latent.hole.blob == latent.blob else f"under its mask {printable_name(latent.hole.blob.name)}: "
    for view in sample.views:
        for reference in view.references:
            if reference.latent == key != view.latent:
                return f"its reference {reference.name}: "
    own = target is None or resolved.recipe.mask_origin == "alpha"
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
    return [key for field in ("latent", "mask", "text") for key in sample.keys(field)]


def split_prompts(prompts: Sequence[PromptTarget],
                  refs: Mapping[str, RowRef]) -> tuple[list[PromptTarget], list[Finding]]:
    """The prompts with all rows in the cache, and a finding for each other prompt."""
    encoded = [prompt for prompt in prompts if all(key in refs for key in prompt.keys)]
    lost = [Finding(path=prompt.prompt, code=NOT_ENCODED, severity="warning", detail=(
        "this sample prompt has no text row, so no picture is made for it"
        if prompt.positive_key not in refs or prompt.negative_key not in refs else
        "a reference of this sample prompt could not be encoded, so no picture is made for it"))
            for prompt in prompts if prompt not in encoded]
    return encoded, lost
