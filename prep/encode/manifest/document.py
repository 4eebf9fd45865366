"""The parts of a manifest's document: its fixed fields, counts by field and bucket, and prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from prep.batching.split import ROLES
from prep.cache.ledger.ledger import Ledger, StoredRows
from prep.cache.records import RowRef
from prep.digest import digest_bytes
from prep.encode.resolve import ResolvedRecipe
from prep.encode.targets.records import PromptTarget
from prep.errors import PathError
from prep.fs.place import Place, movable_name, relative_name
from prep.geometry import FITS, shape_document
from prep.manifest.document import FORMAT
from prep.manifest.samples import Samples
from prep.models.latents import latent_facts
from prep.models.named import recorded
from prep.parse import KEPT, alpha_of
from prep.recipe.schema import Recipe


def fixed_fields(resolved: ResolvedRecipe, cache: Place, path: Place) -> dict[str, Any]:
    """The parts of the document that do not depend on rows, so that their errors show before anything is encoded.

    Raises `PathError`, `ModelError`.
    """
    family, factors = resolved.specs.family, latent_facts(resolved.model, resolved.specs.family)
    alpha = alpha_of(resolved.recipe.image.alpha)
    return {
        "format": FORMAT, "cache": _cache(cache, path),
        "family": resolved.family,
        "model": _model(resolved, path),
        "latents": {"channels": family.latent_channels, "factor": family.factor,
                    **factors, "alpha": alpha if alpha is None or alpha == KEPT else list(alpha),
                    **_references_of(resolved.recipe),
                    **({} if resolved.latents_from is None else {"imported": resolved.latents_from.described()})},
        "prediction": resolved.prediction,
        "models": {"vae": str(resolved.contexts.latent["vae"]), "text": str(resolved.contexts.text["text"])},
        "sources": [relative_name(source.path, path) for source in resolved.recipe.sources],
        "recipe": None if resolved.recipe.file is None else relative_name(resolved.recipe.file, path),
        "options": [_option(word, path) for word in resolved.recipe.options],
    }


def _references_of(recipe: Recipe) -> dict[str, Any]:
    """How references are fitted, if that was chosen: those of later prompts are, too."""
    chosen = {"fit": recipe.reference_fit, "resolution": recipe.reference_resolution}
    return {} if tuple(chosen.values()) == (FITS[0], 0) else {"references": chosen}


def _model(resolved: ResolvedRecipe, path: Place) -> dict[str, Any]:
    return recorded(resolved.recipe.model.path, lambda what: _place("model", what, path))


def _cache(cache: Place, path: Place) -> str:
    """How the manifest at `path` names its cache: relative to itself, unless only the cache is in a store."""
    return _required("cache", cache, path, movable_name(cache, path))


def _place(what: str, target: Place, path: Place) -> str:
    return _required(what, target, path, relative_name(target, path))


def _required(what: str, target: Place, path: Place, name: str | None) -> str:
    if name is None:
        raise PathError(f"no portable relative path leads from manifest {path} to {what} {target}",
                        hint="keep them on one drive, without backslashes in names")
    return name


def _option(word: str | Place, path: Place) -> str | dict[str, str | None]:
    return {"path": relative_name(word, path)} if isinstance(word, Place) else word


def fields_of(resolved: ResolvedRecipe, used: StoredRows, ledger: Ledger) -> dict[str, Any]:
    """The context, arrays and counts of each field's rows that are `used`."""
    sizes = {shard.digest: shard.bytes for shard in ledger.shards}
    documents: dict[str, Any] = {}
    rows = resolved.targets.rows_by_field()
    for field, context in resolved.contexts.by_field().items():
        own = used.only(rows.get(field, {}))
        shards = own.by_shard()
        documents[field] = {"context": context, "arrays": resolved.specs.as_manifest(field), "rows": len(own),
                            "shards": len(shards), "bytes": sum(sizes[shard] for shard in shards)}
    return documents


def buckets_of(samples: Samples) -> list[dict[str, Any]]:
    """The size of each bucket with samples, the sizes of its references, and its samples by role; sorted."""
    return [{**shape_document(shape), **{role: samples.counts[shape, role] for role in ROLES}}
            for shape in samples.shapes]


def roles_of(buckets: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """The samples of every role in all buckets, also those that none has."""
    return {role: sum(bucket[role] for bucket in buckets) for role in ROLES}


def prompt_document(file: str | None, data: bytes | None, unconditional: str, prompts: Iterable[PromptTarget],
                    refs: Mapping[str, RowRef], numbers: Mapping[str, int]) -> dict[str, Any]:
    """The prompts of a manifest: their file, relative to it, with its bytes; `unconditional` is a key of `refs`."""
    def row(key: str) -> dict[str, int]:
        return {"shard": numbers[refs[key].shard], "row": refs[key].row}

    return {
        "file": file,
        "digest": None if data is None else digest_bytes(data),
        "unconditional": row(unconditional),
        "samples": [prompt.as_document(row) for prompt in prompts],
    }
