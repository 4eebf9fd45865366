"""Resolves a recipe and a model to the inputs of every key, and to the wanted rows."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prep.buckets.assign import Assignments
from prep.dataset.bucketing import buckets_for, reference_rules, require_masks, rules_of
from prep.dataset.ingest import Ingested, ingest
from prep.dataset.listing import Listed
from prep.dataset.prompt_references import prompt_references
from prep.dataset.samples import settle_masks
from prep.dataset.texts import text_options_of
from prep.encode.targets.records import Contexts, LatentSource, Targets
from prep.encode.targets.samples import targets_of
from prep.encode.text_groups import TextGroups
from prep.formatting import printable
from prep.fs.memo import Memo
from prep.images.decode import POLICY
from prep.images.mask import WHITE
from prep.keys import embedding_context, latent_context, mask_context, picture_policy, text_context
from prep.models.configs import Configs
from prep.models.denoiser.trainable import check_sizes, check_widths, missing_files
from prep.models.families.registry import FAMILIES
from prep.models.family import Family, TextOptions
from prep.models.fields import FieldSpecs
from prep.models.files import ComponentFiles, Model
from prep.models.fingerprint import (
    Expected,
    FileDigest,
    RememberedDigest,
    bytes_of,
    text_files,
    text_fingerprint,
    ticking,
    vae_files,
    vae_fingerprint,
)
from prep.models.latents import latent_facts, require_posterior, vae_compute
from prep.models.pipeline import family_of, prediction_of
from prep.models.vision.model import COMPUTE, STORED, VisionModel, vision_model
from prep.parse import alpha_of
from prep.progress import BackgroundTotal, DeferredTotal, Progress, phase, silent
from prep.recipe.prompts import Prompt
from prep.recipe.schema import Recipe

BELONGS = "name a model that makes pictures from text alone, with the encoders that its denoiser was trained with"


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedRecipe:
    """A recipe, resolved down to the keys of its rows."""

    recipe: Recipe  # with its family, and masks "auto" resolved to sidecar or none
    model: Model
    family: str
    specs: FieldSpecs
    prediction: str  # what the denoiser predicts
    contexts: Contexts
    survey: Ingested  # without items, but of latents from elsewhere; its masks are those that the recipe asks for
    bucketing: Assignments  # without pictures
    targets: Targets
    text_options: TextOptions
    text_groups: TextGroups
    latents_from: LatentSource | None  # None: the VAE makes latents
    vision: VisionModel | None = None  # None: no embeddings
    file_digest: FileDigest  # of the model's files, remembered for unchanged files

    def expected(self, field: str, name: str) -> Expected:
        """The fingerprint `name` in the context of `field`; the loader of that encoder checks it."""
        return Expected(digest=str(self.contexts.by_field()[field][name]), file_digest=self.file_digest)

    def group_of(self, field: str, key: str) -> tuple[int, int]:
        """Rows of one field and group have one shape: the bucket, or 0 and the tokens of a trimmed text row.

        Tokens must have been counted by `text_groups`. (0, 0) for text rows that are not trimmed.
        """
        return self.targets.bucket_of(field, key) or (0, self.text_groups.tokens(key) if field == "text" else 0)

    def row_bytes(self, field: str, key: str) -> int:
        """Bytes of a row."""
        bucket = self.targets.bucket_of(field, key)
        return self.specs.row_bytes(field, bucket, None if bucket else self.group_of(field, key)[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolvedModel:
    """A model, checked for a recipe, before any picture is read."""

    recipe: Recipe  # with its family
    model: Model
    specs: FieldSpecs
    options: TextOptions
    prediction: str
    contexts: Contexts  # with one of masks unless the recipe is known to have none
    denoiser: Mapping[str, Any] | None  # its config; None: the directory has only what encodes
    missing: tuple[str, ...]  # what the directory lacks for training
    vision: VisionModel | None  # None: no embeddings
    file_digest: FileDigest


def resolve_model(recipe: Recipe, model: Model, facts: Memo, progress: Progress = silent,
                  vision: ComponentFiles | None = None) -> ResolvedModel:
    """What decides the keys of a recipe's rows, besides its pictures; `vision`: the files of its vision model. Raises
    `PathError`, `ConfigError`, `ModelError`."""
    family = family_of(model, recipe.model.family)
    options = text_options_of(FAMILIES[family], recipe.model, Configs(model))
    seeing = () if vision is None else (vision,)
    specs = FieldSpecs(family=FAMILIES[family], dtype=recipe.model.dtype,  # type: ignore[arg-type]  # checked there
                       text=FAMILIES[family].text.shapes(Configs(model), options),
                       with_std=recipe.model.posterior == "mean+std")
    file_digest = remembered_digest(facts)
    prediction = prediction_of(model, specs.family)
    missing = missing_files(model, specs.family)  # what could not be trained shows before anything is read
    total = BackgroundTotal(lambda: bytes_of([vae_files(model), *text_files(model).encoders.values(), *seeing]))
    with progress("hashing the model", total, "bytes") as tick:
        contexts = contexts_of(recipe, model, specs, options, counted := ticking(file_digest, tick))
        found = None if vision is None else vision_model(vision, counted)
    if found is not None:
        found = replace(found, expected=replace(found.expected, file_digest=file_digest))
        contexts = replace(contexts, embedding=context_of(found))
        specs = replace(specs, embedding=found.width)
    recipe = replace(recipe, model=replace(recipe.model, family=family))
    denoiser = _checked_denoiser(model, specs)  # errors in model and rules show before all pictures are read
    rules_of(recipe)
    require_masks(recipe, specs.family)
    return ResolvedModel(recipe=recipe, model=model, specs=specs, options=options, prediction=prediction,
                         contexts=contexts, denoiser=denoiser, missing=tuple(missing), vision=found,
                         file_digest=file_digest)


def resolve_recipe(base: ResolvedModel, listed: Listed, facts: Memo, prompts: Sequence[Prompt], *,
                   folder: Path = Path(), jobs: int,
                   latents_from: LatentSource | None = None, progress: Progress = silent) -> ResolvedRecipe:
    """Resolves what was listed of a recipe, and `prompts`, to keys and rows; empties the list of items. `folder`: the
    directory that the references of prompts are relative to. Raises `ConfigError`, `ModelError`."""
    recipe, model, specs, contexts = base.recipe, base.model, base.specs, base.contexts
    references = prompt_references(prompts, folder, specs.family, reference_rules(recipe),
                                   alpha_of(recipe.image.alpha), facts)
    total = DeferredTotal()
    with progress("reading", total, "pictures") as tick:
        surveyed = ingest(recipe, facts, jobs=jobs, tick=tick, total=total, listed=listed)
    listed.items.clear()  # what is usable is in the survey
    facts.release()
    with phase(progress, "planning"):
        recipe = settle_masks(recipe, surveyed.items)
        if recipe.mask_origin == "none":
            contexts = replace(contexts, mask=None)
        notes: tuple[str, ...] = ()
        if latents_from is None:
            buckets = buckets_for(recipe, surveyed)
        else:
            contexts = replace(contexts, latent=latents_from.context(contexts.latent))
            surveyed, buckets, notes = latents_from.place(recipe, surveyed, specs.family, facts, jobs)
        if recipe.mask_origin == "alpha":
            surveyed = replace(surveyed, masks=sum(item.has_alpha for item in surveyed.items))
        if latents_from is None:
            surveyed = replace(surveyed, items=list(surveyed.items))
        targets = targets_of(recipe, surveyed, buckets, contexts, prompts, latents_from, references)
        buckets = replace(buckets, pictures=())  # which are samples now
        targets = replace(targets, notices=(*targets.notices, *notes, *_untrainable(model, base.missing)))
    if base.denoiser is not None:
        check_sizes(model, specs.family, base.denoiser, sorted({size for size, _ in targets.samples.shapes}))
    return ResolvedRecipe(recipe=recipe, model=model, family=recipe.model.family, specs=specs,
                          prediction=base.prediction, contexts=contexts, file_digest=base.file_digest, survey=surveyed,
                          vision=base.vision, bucketing=buckets, targets=targets, text_options=base.options,
                          latents_from=latents_from,
                          text_groups=TextGroups(model, specs.family, base.options, targets.texts))


def _untrainable(model: Model, missing: Sequence[str]) -> Iterator[str]:
    """The note on files that training will need, if the directory has only what encodes."""
    if missing:
        yield (f"note: {printable(str(model))} has no {' and no '.join(missing)}: encoding does without, but training "
               f"needs {'it' if len(missing) == 1 else 'them'}")


def _checked_denoiser(model: Model, specs: FieldSpecs) -> Mapping[str, Any] | None:
    """The config of the denoiser, once VAE and denoiser are known to suit these rows; `None` if the directory has only
    what encodes. Raises `ModelError`, `ConfigError`."""
    latent_facts(model, specs.family)
    if specs.with_std:
        require_posterior(model)
    if not os.path.lexists(model / specs.family.denoiser / "config.json"):
        return None
    denoiser = Configs(model)(specs.family.denoiser)
    check_widths(model, specs.family, denoiser, specs.text, BELONGS)
    return denoiser


def remembered_digest(facts: Memo) -> FileDigest:
    """The digest of a file of a model, remembered in `facts` for unchanged files; it can be sent to other processes."""
    return RememberedDigest(facts, "file", "digest")


def contexts_of(recipe: Recipe, model: Model, specs: FieldSpecs, options: TextOptions,
                file_digest: FileDigest) -> Contexts:
    """The key contexts of a recipe. Raises `ModelError`."""
    stored = recipe.model.dtype
    mask = None
    if recipe.mask_origin != "none":
        inpainting = specs.family.inpainting
        mask = mask_context(image=POLICY, origin=recipe.mask_origin, factor=specs.family.factor,
                            cell="" if inpainting is None else f"{inpainting.cell}, white from {WHITE}")
    return Contexts(
        latent=latent_context(image=POLICY, vae=vae_fingerprint(model, file_digest), posterior=recipe.model.posterior,
                              compute=vae_compute(model, specs.family, recipe.model.compute or stored), stored=stored,
                              tile=recipe.model.tile),
        mask=mask,
        text=text_context_of(model, specs.family, options, file_digest, stored=stored,
                             compute=recipe.model.compute or specs.family.text_compute or stored),
    )


def context_of(vision: VisionModel) -> dict[str, Any]:
    """The key context of the embeddings that a model makes."""
    return embedding_context(image=POLICY, model=vision.expected.digest, output=vision.kind.output, compute=COMPUTE,
                             stored=STORED)


def _plain(value: Any) -> str | int:
    """A value of model_index.json as contexts have them: a list is spelled with commas, null is the default."""
    if value is None:
        return "default"
    if isinstance(value, list):
        return ",".join(map(str, value))
    return value if isinstance(value, str) else int(value)


def text_context_of(model: Model, family: Family, options: TextOptions, file_digest: FileDigest, *, compute: str,
                    stored: str) -> dict[str, Any]:
    """The key context of text rows. Raises `ModelError`."""
    return text_context(text=text_fingerprint(model, file_digest), max_length=options.max_length,
                        layout=family.text.layout, compute=compute, stored=stored,
                        more=_more_text(model, family, options))


def _more_text(model: Model, family: Family, options: TextOptions) -> dict[str, Any]:
    """What else decides text rows; empty for a family without options, whose keys are as they were before others."""
    configs = Configs(model)
    values = {name: configs.value(name, "default") for name in family.text.pipeline_options}
    denoiser = {} if family.text.denoiser_config is None else family.text.denoiser_config(configs)
    return {
        **({"clip_skip": options.clip_skip} if options.clip_skip else {}),
        **({"text_windows": options.windows} if options.windows > 1 else {}),
        **({"quantization": options.quantization} if options.quantization != "none" else {}),
        **({"pipeline": {name: _plain(value) for name, value in values.items()}}
           if values else {}),
        **({"denoiser": dict(denoiser)} if denoiser else {}),
        **({} if family.text.negative is None else {"negatives": "own"}),
        **({"constants": dict(family.text.constants)} if family.text.constants else {}),
        **({} if family.text.vision is None else {"image": picture_policy(POLICY)}),
    }
