"""Latents that sd-scripts cached beside pictures, as a source of rows for `prep.encode`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prep.arrays import DType
from prep.buckets.assign import Assignment, Assignments
from prep.cache.records import Reject
from prep.cache.values import Values, stored_values
from prep.dataset.bucketing import rules_of
from prep.dataset.ingest import Ingested, KnownItem
from prep.digest import digest_bytes
from prep.encode.targets import Made, PictureTarget
from prep.errors import ConfigError
from prep.export.kohya import NORMALIZED, ONE_SIZE, architecture
from prep.findings import Finding
from prep.formatting import printable_name
from prep.fs.blob import error_code, read_blob
from prep.fs.memo import Memo
from prep.fs.place import is_directory
from prep.geometry import Placement
from prep.imports.npz import BadNpz, Npz
from prep.imports.search import Found, Search, caches_of, notices, twins
from prep.keys import ImportedLatentKeys, imported_context
from prep.models.family import Family
from prep.recipe.schema import Recipe

ORIGIN = "kohya-npz"
OPTION = "--bucket-no-upscale"


@dataclass(frozen=True, kw_only=True, slots=True)
class NpzRows:
    """Makes rows of caches; small, so that it can be sent to other processes."""

    one_size: bool  # whether the names in a cache are without the latent's size
    factor: int  # pixels of a latent cell's side
    dtype: DType  # of stored rows
    shift: float = 0.0  # of the latents in caches, which are (latent - shift) * scale
    scale: float = 1.0

    def values(self, data: bytes, placement: Placement) -> Values:
        """The latent at `placement` in the bytes of a cache, as the VAE makes it: float32 [C, h, w]. Raises `BadNpz`.
        """
        width, height = (side // self.factor for side in placement.bucket)
        name = "latents_flipped" if placement.flip else "latents"
        with np.errstate(over="ignore"):  # float64 may be more than float32 holds, which is not finite then
            found = Npz(data).read(name if self.one_size else f"{name}_{height}x{width}").astype(np.float32)
        if (self.shift, self.scale) == (0.0, 1.0):
            return found
        return found / np.float32(self.scale) + np.float32(self.shift)

    def row(self, target: PictureTarget) -> Made:
        """The row of a cache, or why there is none."""
        try:
            data = read_blob(target.blob)
            if digest_bytes(data) != target.digest:
                return Finding(path=target.name, code="changed-meanwhile", severity="error",
                               detail=f"{target.file} changed while it was being imported; run the command again")
            kept = stored_values(self.values(data, target.placement), self.dtype)
        except BadNpz as error:
            return Reject(key=target.key, code="bad-latents",
                          detail=f"its latents {printable_name(target.blob.name)}: {error}")
        except OSError as error:
            return Finding(path=target.name, code=error_code(error), severity="error",
                           detail=f"{target.file} cannot be read: {error.strerror or error}")
        if kept is None:
            return Reject(key=target.key, code="not-finite", detail=f"its latents {printable_name(target.blob.name)}: "
                          f"NaN or infinity, as {self.dtype}")
        return {"latent": kept}


class KohyaLatents:
    """The caches of a recipe's pictures: `place` finds them, then pictures have targets."""

    def __init__(self, *, no_upscale: bool) -> None:
        """`no_upscale`: sd-scripts had `bucket_no_upscale`."""
        self._no_upscale = no_upscale
        self._found: dict[str, Found] = {}  # by the picture's label

    def context(self, usual: Mapping[str, Any]) -> dict[str, Any]:
        """The key context of imported latents, from that of encoded ones."""
        return imported_context(origin=ORIGIN, vae=usual["vae"], stored=usual["stored"])

    def described(self) -> dict[str, Any]:
        """What a manifest says of the import, before anything was compared."""
        return {"from": ORIGIN, "verified": 0, "options": [OPTION] if self._no_upscale else []}

    def rows(self, family: Family, dtype: DType, latents: Mapping[str, Any]) -> NpzRows:
        """What makes the rows; `latents` says how the model's VAE has them normalized."""
        word = architecture(family.name)
        normal = {"shift": float(latents["shift_factor"]), "scale": float(latents["scaling_factor"])}
        return NpzRows(one_size=word in ONE_SIZE, factor=family.factor, dtype=dtype,
                       **(normal if word in NORMALIZED else {}))

    def target(self, item: KnownItem, placement: Placement, keys: ImportedLatentKeys) -> PictureTarget:
        """The target of a placed picture's latent."""
        found, name = self._found[item.item.label], item.item.label
        return PictureTarget(key=keys.key(item.picture, found.digest, placement), name=name,
                             file=f"{name}: its latents {printable_name(found.blob.name)}", blob=found.blob,
                             digest=found.digest, placement=placement)

    def place(self, recipe: Recipe, surveyed: Ingested, family: Family, facts: Memo, jobs: int
              ) -> tuple[Ingested, Assignments, tuple[str, ...]]:
        """The pictures that have a cache, their buckets, and notes; other pictures become findings.

        Raises `ConfigError`, `UsageError`.
        """
        _check_recipe(recipe)
        largest = max(recipe.image.resolutions) ** 2 if self._no_upscale else 0
        word = architecture(family.name)
        search = Search(word=word, family=family, unscaled=largest, caches=caches_of(surveyed.items, word),
                        flip=recipe.image.flip)  # type: ignore[arg-type]  # parsed
        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(lambda one, twin: search(one, twin, facts), surveyed.items, twins(surveyed.items)))
        kept = [(item, found) for item, (found, _, _) in zip(surveyed.items, results, strict=True) if found is not None]
        self._found = {item.item.label: found for item, found in kept}
        rules = rules_of(recipe)
        pictures = tuple(Assignment(index=number, name=item.item.label, size=item.size, views=views,
                                    resolution=rules[0].resolution)
                         for number, (item, found) in enumerate(kept) for views in found.views)
        findings = (*surveyed.findings, *(one for _, told, _ in results for one in told))
        buckets = tuple(sorted({one.placement.bucket for one in pictures}))
        return (replace(surveyed, items=tuple(item for item, _ in kept), findings=findings),
                Assignments(rules=rules, buckets=buckets, pictures=pictures, findings=(), merges=()),
                tuple(notices(word for _, _, left in results for word in left)))


def _check_recipe(recipe: Recipe) -> None:
    """Raises `ConfigError` for what caches of sd-scripts do not have."""
    if recipe.image.crop != "centre" or recipe.image.views > 1:
        raise ConfigError(f"image.crop is '{recipe.image.crop}' with {recipe.image.views} views, expected 'center' and "
                          "1: sd-scripts caches the middle of each picture",
                          hint="leave crop and views out of the recipe; prep encode makes other crops")
    if recipe.model.posterior != "mean":
        raise ConfigError(f"model.posterior is '{recipe.model.posterior}', but sd-scripts caches one sample of it",
                          hint="leave posterior out of the recipe; prep encode stores it")
    for source in recipe.sources:
        if not is_directory(source.path):
            raise ConfigError(f"{source.path} is not a directory on this computer, expected one of pictures "
                              "with sd-scripts' caches beside them", hint="download the pictures with their .npz files")
