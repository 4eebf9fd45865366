"""Prepares an encode: what is known, and checked, before the cache is opened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from prep.cache.remote.opening import check_can_encode_to
from prep.dataset.facts import open_facts
from prep.dataset.listing import Listed, list_recipe, picture_places
from prep.dataset.texts import TextReading
from prep.encode.engines.job import RayOptions
from prep.encode.manifest.document import fixed_fields
from prep.encode.manifest.limits import check_manifest_size
from prep.encode.manifest.replaced import prompts_for, read_replaced
from prep.encode.options import EncodeOptions
from prep.encode.plan import PlanPart
from prep.encode.report import errors_of
from prep.encode.resolve import ResolvedModel, ResolvedRecipe, resolve_model, resolve_recipe
from prep.encode.targets.records import LatentSource
from prep.encode.truncation import Truncated, find_truncated
from prep.errors import ConfigError, EmptyPlanError, ModelError, PathError
from prep.findings import Finding
from prep.formatting import counted
from prep.fs.memo import Memo
from prep.fs.paths import NamedPath, check_disjoint, resolve
from prep.fs.place import Place, may_name
from prep.fs.remote.bucket import Bucket
from prep.fs.remote.copies import directory_of
from prep.manifest.document import Manifest, check_manifest_place
from prep.models.files import Model
from prep.models.hub import locate
from prep.models.named import file_of
from prep.models.vision.model import vision_files
from prep.progress import Progress, silent
from prep.recipe.prompts import Prompt
from prep.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class EncodeCall:
    """A call of `prep encode`."""

    recipe: Recipe
    cache: Place
    output: Place
    options: EncodeOptions = field(default_factory=EncodeOptions)
    progress: Progress = silent
    part: PlanPart | None = None  # the share of the plan to encode, without a manifest; None: everything
    ray: RayOptions | None = None  # the cluster that encodes; None: this machine
    latents_from: LatentSource | None = None  # None: the VAE makes latents
    check: Callable[[Prepared], Prepared] | None = None  # what else is done before anything is written

    @property
    def is_plain(self) -> bool:
        """Whether it only encodes what the cache on this computer lacks, so that its manifest follows from its inputs.
        What a store has is asked for on the way to a plan."""
        options = self.options
        others = (self.part, self.ray, self.latents_from, self.check)
        return (all(other is None for other in others) and not isinstance(self.cache, Bucket)
                and not (options.dry_run or options.retry_rejects or options.recheck))


@dataclass(frozen=True, kw_only=True, slots=True)
class Begun:
    """What is known before a picture is read: the model, checked, and the names and stamps of the pictures."""

    call: EncodeCall
    output: Place  # resolved
    model: ResolvedModel
    facts: Memo
    prompts: Sequence[Prompt]
    prompt_bytes: bytes | None
    prompt_folder: Path  # what the references of prompts are relative to
    replaces: Manifest | None  # that the new one replaces
    listed: Listed


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What is known before the cache is opened: the wanted rows, and the manifest but for their places."""

    begun: Begun
    call: EncodeCall  # with the recipe as it was resolved
    resolved: ResolvedRecipe
    frame: Mapping[str, Any]  # of the manifest
    truncated: Truncated
    masks_asked: bool


def begin(call: EncodeCall) -> Begun:
    """Checks everything that needs neither pictures nor a cache, and lists the pictures; writes nothing."""
    # A link is followed once, for the file and for the paths in it. What is in a store has the place of its copy.
    output, cache = resolve(call.output), call.cache
    check_places(call.recipe, cache, output)
    check_can_encode_to(call.cache)
    model, embed = _model(call), call.recipe.embed
    vision = vision_files(embed, download=call.options.download and not call.options.dry_run) if embed else None
    old = read_replaced(output)
    recipe, prompt_bytes, prompts, note = prompts_for(call.recipe, old)
    call = replace(call, recipe=replace(recipe, notes=(*recipe.notes, *([note] if note else []))))
    facts = facts_for(cache, trust=not call.options.rehash)
    resolved = resolve_model(call.recipe, model, facts, call.progress, vision)
    with call.progress("listing", None, "pictures") as tick:
        listed = list_recipe(resolved.recipe, rehash=not facts.trust, stamped=call.is_plain, tick=tick)
    return Begun(call=call, output=output, model=resolved, facts=facts, prompts=prompts, prompt_bytes=prompt_bytes,
                 prompt_folder=_prompt_folder(recipe, old),
                 replaces=old, listed=listed)


def _prompt_folder(recipe: Recipe, old: Manifest | None) -> Path:
    """The directory of the prompt file, also of one that is gone."""
    if recipe.prompts is not None:
        return recipe.prompts.absolute().parent
    named = None if old is None else old.document["prompts"]["file"]
    return Path() if old is None else Path(old.folder, named or "-").parent


def complete(begun: Begun) -> Prepared:
    """Reads pictures and captions, and resolves the recipe; writes nothing."""
    call, facts = begun.call, begun.facts
    resolved = resolve_recipe(begun.model, begun.listed, facts, begun.prompts, folder=begun.prompt_folder,
                              jobs=call.options.jobs,
                              latents_from=call.latents_from, progress=call.progress)
    masks_asked = call.recipe.mask_origin != "none"
    call = replace(call, recipe=resolved.recipe)
    frame = fixed_fields(resolved, call.cache, begun.output)
    _require_samples(call, resolved)
    check_manifest_size(resolved, frame, begun.output)
    reading = TextReading(model=resolved.model, family=resolved.specs.family, options=resolved.text_options)
    truncated = find_truncated(resolved.targets, reading, facts, call.progress)
    targets = replace(resolved.targets, findings=(*resolved.targets.findings, *truncated.findings))
    resolved = replace(resolved, targets=targets)
    return Prepared(begun=begun, call=call, resolved=resolved, frame=frame, truncated=truncated,
                    masks_asked=masks_asked)


def prepare(call: EncodeCall) -> Prepared:
    """Resolves the recipe, reads pictures and captions, checks everything that needs no cache; writes nothing."""
    return complete(begin(call))


def facts_for(cache: Place, *, trust: bool) -> Memo:
    """What this user's earlier runs read from files for the cache at this path. Raises `PathError`."""
    return open_facts(str(resolve(directory_of(cache))), trust=trust)


def check_places(recipe: Recipe, cache: Place, output: Place | None) -> None:
    """Raises `PathError` if sources, masks, cache and manifest overlap; before anything is written. `output` None: no
    manifest will be."""
    pictures = picture_places(recipe)
    places = [place for place in pictures if place.role != "references"]  # which may be pictures of a source, too
    places += [NamedPath(role="masks", path=folder) for folder in recipe.mask_folders]
    places += [NamedPath(role="edits", path=folder) for folder in (recipe.edits,) if folder is not None]
    written = [NamedPath(role="cache", path=cache),
               *([] if output is None else [NamedPath(role="manifest", path=output)])]
    check_disjoint([*places, *written])
    for place in (place for place in pictures if place.role == "references"):
        check_disjoint([place, *written])
    file = file_of(recipe.model.path)
    named = {"recipe": recipe.file, "prompts": recipe.prompts, "vision model": Path(recipe.embed or "-"),
             "model": Path(recipe.model.path or "-") if file is None else file.path}
    for role, path in named.items():
        if path is not None and path.exists():
            for target in written:
                check_disjoint([NamedPath(role=role, path=path), target])
    if output is None:
        return
    if not may_name(output, cache):
        raise PathError(f"the manifest {output} would lie in another place than its cache, {cache}",
                        hint="name a cache in the same bucket; or encode on this computer, and upload the result: prep "
                        "push MANIFEST URL")
    check_manifest_place(output)


def _require_samples(call: EncodeCall, resolved: ResolvedRecipe) -> None:
    if not resolved.targets.samples:
        named = ", ".join(str(source.path) for source in call.recipe.sources)
        errors = errors_of(resolved.targets.findings)
        first = f", the first, {errors[0].path}, {errors[0].detail}" if errors else ""
        unusable = f"; {counted(len(errors), 'picture')} cannot be used{first}" if errors else ""
        raise EmptyPlanError(f"no pictures to encode in {named}{unusable}",
                             hint=_why(errors[0]) if errors else "name a directory with pictures, or tar files")
    if call.recipe.mask_origin != "none" and not resolved.targets.masks:
        count, masks = len(resolved.targets.samples), map(call.recipe.mask_of, range(len(call.recipe.sources)))
        named = ", ".join(dict.fromkeys(str(mask) for mask in masks if mask != "none"))
        raise ConfigError(f"masks are requested ({named}), but none of {counted(count, 'picture')} has one",
                          hint="a mask is NAME-masklabel.png beside its picture, or in the directory of --mask; "
                          "--mask none encodes without masks")


def _why(error: Finding) -> str:
    """What helps against the first of the errors that leave no picture."""
    if "latents" in error.code:  # of an import: the pictures may be sound
        return "let sd-scripts make its caches again, or make latents of the pictures: prep encode SOURCE"
    if "reference" in error.code:  # of a model or a pair, of which a scan knows nothing
        return "prep view SOURCE shows the pictures left out, with the reason for each"
    return "prep scan SOURCE gives the reason for each"


def _model(call: EncodeCall) -> Model:
    if not call.recipe.model.path:
        raise ModelError("no model is named, so the encoders are unknown",
                         hint="add --model MODEL, or set path in [model] of the recipe")
    return locate(call.recipe.model.path, download=call.options.download and not call.options.dry_run)
