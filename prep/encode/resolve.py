"""Resolves a recipe and a model to the inputs of every key, and to the wanted rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from prep.buckets.assign import Assignments
from prep.dataset.bucketing import buckets_for, rules_of
from prep.dataset.ingest import Ingested, ingest
from prep.dataset.samples import settle_masks
from prep.encode.targets import Contexts, Targets, targets_of
from prep.fs.memo import Memo
from prep.images.decode import POLICY
from prep.keys import latent_context, mask_context, text_context
from prep.models.family import FAMILIES
from prep.models.fields import FieldSpecs
from prep.models.fingerprint import Expected, FileDigest, digest_file, text_fingerprint, vae_fingerprint
from prep.models.pipeline import infer_family, latent_factors, prediction_of, text_width
from prep.progress import DeferredTotal, Progress, phase, silent
from prep.recipe.prompts import Prompt
from prep.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRecipe:
    """A recipe, resolved down to the keys of its rows."""

    recipe: Recipe  # with its family, and masks "auto" resolved to sidecar or none
    model: Path
    family: str
    specs: FieldSpecs
    prediction: str  # what the denoiser predicts
    contexts: Contexts
    survey: Ingested
    bucketing: Assignments
    wants: Targets
    file_digest: FileDigest  # of the model's files, remembered for unchanged files

    def expected(self, field: str, name: str) -> Expected:
        """The fingerprint `name` in the context of `field`; the loader of that encoder checks it."""
        return Expected(digest=str(self.contexts.by_field()[field][name]), file_digest=self.file_digest)


def resolve_recipe(recipe: Recipe, model: Path, facts: Memo, prompts: Sequence[Prompt], *, jobs: int,
                   progress: Progress = silent) -> ResolvedRecipe:
    """Resolves `recipe` and `prompts` to keys and rows. Raises `PathError`, `ConfigError`, `ModelError`."""
    family = recipe.model.family or infer_family(model)
    specs = FieldSpecs(family=FAMILIES[family], dtype=recipe.model.dtype,  # type: ignore[arg-type]  # checked there
                       text_width=text_width(model))
    file_digest = remembered_digest(facts)
    with phase(progress, "hashing the model"):
        prediction, contexts = prediction_of(model), contexts_of(recipe, model, specs, file_digest)
    recipe = replace(recipe, model=replace(recipe.model, family=family))
    latent_factors(model, specs.family)  # errors in the model show before all pictures are read
    rules_of(recipe)  # errors in the rules show before all pictures are read
    total = DeferredTotal()
    with progress("reading", total, "pictures") as tick:
        surveyed = ingest(recipe, facts, jobs=jobs, tick=tick, total=total)
    recipe = settle_masks(recipe, surveyed.items)
    if recipe.mask_origin == "none":
        contexts = replace(contexts, mask=None)
    buckets = buckets_for(recipe, surveyed)
    wants = targets_of(recipe, surveyed, buckets, contexts, prompts)
    return ResolvedRecipe(recipe=recipe, model=model, family=family, specs=specs, prediction=prediction,
                          contexts=contexts, file_digest=file_digest, survey=surveyed,
                          bucketing=buckets, wants=wants)


def remembered_digest(facts: Memo) -> FileDigest:
    """`digest_file`, remembered in `facts` for unchanged files."""
    return lambda path: str(facts.get_or_compute(path, "file", lambda: {"digest": digest_file(path)})["digest"])


def contexts_of(recipe: Recipe, model: Path, specs: FieldSpecs, file_digest: FileDigest) -> Contexts:
    """The key contexts of a recipe. Raises `ModelError`."""
    compute, stored = recipe.model.compute or recipe.model.dtype, recipe.model.dtype

    mask = None
    if recipe.mask_origin != "none":
        mask = mask_context(image=POLICY, origin=recipe.mask_origin, factor=specs.family.factor)
    return Contexts(
        latent=latent_context(image=POLICY, vae=vae_fingerprint(model, file_digest), posterior="mean",
                              compute=compute, stored=stored),
        mask=mask,
        text=text_context(text=text_fingerprint(model, file_digest), max_length=specs.family.max_length,
                          layout=specs.family.text_layout, compute=compute, stored=stored),
    )
