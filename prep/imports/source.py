"""Latents that sd-scripts cached beside pictures, as a source of rows for `prep.encode`."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from prep.arrays import DType
from prep.buckets.assign import Assignment, Assignments
from prep.cache.records import Reject
from prep.cache.values import Values, stored_values
from prep.dataset.bucketing import rules_of
from prep.dataset.ingest import Ingested, KnownItem
from prep.digest import digest_bytes
from prep.encode.targets.records import Made, PictureTarget
from prep.errors import ConfigError
from prep.export.kohya import NORMALIZED, ONE_SIZE, architecture
from prep.findings import Finding
from prep.formatting import printable_name
from prep.fs.blob import error_code, read_blob
from prep.fs.memo import Memo
from prep.fs.place import is_directory
from prep.geometry import Placement
from prep.imports.npz import BadNpz, Npz
from prep.imports.search import CachedLatents, Search, caches_of, notices, twins
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
            latent = Npz(data).read(name if self.one_size else f"{name}_{height}x{width}").astype(np.float32)
        if (self.shift, self.scale) == (0.0, 1.0):
            return latent
        return latent / np.float32(self.scale) + np.float32(self.shift)

    def row(self, target: PictureTarget) -> Made:
        """The row of a cache, or the reason why it has none."""
        try:
            data = read_blob(target.blob)
            if digest_bytes(data) != target.digest:
                return Finding(path=target.name, code="changed-meanwhile", severity="error",
                               detail=f"{target.file} changed while it was being imported; run the command again")
            stored = stored_values(self.values(data, target.placement), self.dtype)
        except BadNpz as error:
            return Reject(key=target.key, code="bad-latents",
                          detail=f"its latents {printable_name(target.blob.name)}: {error}")
        except OSError as error:
            return Finding(path=target.name, code=error_code(error), severity="error",
                           detail=f"{target.file} cannot be read: {error.strerror or error}")
        if stored is None:
            return Reject(key=target.key, code="not-finite", detail=f"its latents {printable_name(target.blob.name)}: "
                          f"NaN or infinity, as {self.dtype}")
        return {"latent": stored}


class KohyaLatents:
    """The caches of a recipe's pictures: `place` finds them, then pictures have targets."""

    def __init__(self, *, no_upscale: bool) -> None:
        """`no_upscale`: sd-scripts had `bucket_no_upscale`."""
        self._no_upscale = no_upscale
        self._caches: dict[str, CachedLatents] = {}  # by the picture's label

    def context(self, usual: Mapping[str, Any]) -> dict[str, Any]:
        """The key context of imported latents, from that of encoded ones."""
        return imported_context(origin=ORIGIN, vae=usual["vae"], stored=usual["stored"])

    def described(self) -> dict[str, Any]:
        """The facts of the import in a manifest, before anything was compared."""
        return {"from": ORIGIN, "verified": 0, "options": [OPTION] if self._no_upscale else []}

    def rows(self, family: Family, dtype: DType, latents: Mapping[str, Any]) -> NpzRows:
        """The maker of the rows; `latents` says how the model's VAE normalizes them."""
        word = architecture(family.name)
        normal = {"shift": float(latents["shift_factor"]), "scale": float(latents["scaling_factor"])}
        return NpzRows(one_size=word in ONE_SIZE, factor=family.factor, dtype=dtype,
                       **(normal if word in NORMALIZED else {}))

    def target(self, item: KnownItem, placement: Placement, keys: ImportedLatentKeys) -> PictureTarget:
        """The target of a placed picture's latent."""
        cached, name = self._caches[item.item.label], item.item.label
        return PictureTarget(key=keys.key(item.picture, cached.digest, placement), name=name,
                             file=f"{name}: its latents {printable_name(cached.blob.name)}", blob=cached.blob,
                             digest=cached.digest, placement=placement)

    def place(self, recipe: Recipe, surveyed: Ingested, family: Family, facts: Memo, jobs: int
              ) -> tuple[Ingested, Assignments, tuple[str, ...]]:
        """The pictures that have a cache, their buckets, and notes; other pictures become findings.

        Raises `ConfigError`, `UsageError`.
        """
        _check_recipe(recipe)
        if family.inpainting is not None:
            raise ConfigError(f"family '{family.name}' learns from latents of masked pictures, too, which sd-scripts' "
                              "caches do not hold", hint="prep encode makes all of them")
        if any(item.references for item in surveyed.items):
            raise ConfigError("pictures have references, which sd-scripts' caches do not hold",
                              hint="--references none imports the latents of the pictures alone")
        largest = max(recipe.image.resolutions) ** 2 if self._no_upscale else 0
        word = architecture(family.name)
        search = Search(word=word, family=family, unscaled=largest, caches=caches_of(surveyed.items, word),
                        flip=recipe.image.flip)  # type: ignore[arg-type]  # parsed
        with ThreadPoolExecutor(jobs) as pool:
            results = list(pool.map(partial(search, facts=facts), surveyed.items, twins(surveyed.items)))
        pairs = [(item, cache) for item, (cache, _, _) in zip(surveyed.items, results, strict=True)
                 if cache is not None]
        self._caches = {item.item.label: cache for item, cache in pairs}
        rules = rules_of(recipe)
        pictures = tuple(Assignment(index=number, name=item.item.label, size=item.size, views=views,
                                    resolution=rules[0].resolution)
                         for number, (item, cache) in enumerate(pairs) for views in cache.views)
        findings = (*surveyed.findings, *(finding for _, own, _ in results for finding in own))
        buckets = tuple(sorted({picture.placement.bucket for picture in pictures}))
        return (replace(surveyed, items=tuple(item for item, _ in pairs), findings=findings),
                Assignments(rules=rules, buckets=buckets, pictures=pictures, findings=(), merges=()),
                tuple(notices(word for _, _, names in results for word in names)))


def _check_recipe(recipe: Recipe) -> None:
    """Raises `ConfigError` for settings that caches of sd-scripts cannot follow."""
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
