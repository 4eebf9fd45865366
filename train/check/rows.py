"""Whether a model takes the rows of a manifest, by its configs."""

from __future__ import annotations

from prep.errors import ModelError
from prep.loader.index import Index
from prep.manifest.document import Manifest
from prep.models.denoiser.trainable import check_sizes, check_widths
from prep.models.families.registry import FAMILIES
from prep.models.files import Model
from prep.models.pipeline import infer_family, weighted_files

_TRAIN = "train the model that the cache was made for, or run prep encode with this one"


def check_rows(model: Model, manifest: Manifest, index: Index | None, hint: str = "") -> None:
    """Raises `ModelError` for a model of another family than the manifest's, or whose denoiser takes other rows or
    smaller pictures. `hint`: if not that for a model that is trained."""
    named = infer_family(model, manifest.family)
    if named != manifest.family:
        raise ModelError(f"model {model} is of family '{named}', but the manifest is of family '{manifest.family}'",
                         hint=hint or f"{_TRAIN}: it reuses rows that both have in common")
    family = FAMILIES[named]
    config = weighted_files(model, family.denoiser).config
    check_widths(model, family, config, index.text_shapes if index is not None else {}, hint or _TRAIN)
    check_sizes(model, family, config, manifest.buckets)
