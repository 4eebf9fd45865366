"""The pictures of a recipe with the keys of their embeddings: those of the samples that `prep encode` would make."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from prep.batching.split import Role
from prep.dataset.bucketing import buckets_for, rules_of
from prep.dataset.ingest import ingest
from prep.dataset.samples import placed_items, roles_of, settle_masks
from prep.encode.resolve import context_of, remembered_digest
from prep.encode.targets.keys import embedding_target
from prep.encode.targets.records import PictureTargets, Targets
from prep.errors import ModelError
from prep.findings import Finding
from prep.fs.memo import Memo
from prep.geometry import Size
from prep.keys import EmbeddingKeys
from prep.manifest.samples import Sample, Samples
from prep.models.fields import embedding_arrays
from prep.models.fingerprint import bytes_of, ticking
from prep.models.vision.model import EXAMPLES, VisionModel, vision_files, vision_model
from prep.parse import alpha_of
from prep.progress import BackgroundTotal, DeferredTotal, Progress, phase, silent
from prep.recipe.options import without_caption_stop
from prep.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class EmbeddedPicture:
    """A picture of a recipe in one of its buckets, and the key of its embedding."""

    label: str  # its name in findings
    name: str
    source: int
    role: Role
    size: Size  # pixels, after orientation
    picture: str  # SHA-256 of its file
    key: str
    captions: tuple[str, ...]  # each that training may see


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """The pictures of a recipe, in the order of source and name; wanted rows as `prep.encode.plan` has them."""

    pictures: tuple[EmbeddedPicture, ...]
    vision: VisionModel
    targets: Targets
    text_groups: None = None

    def group_of(self, _field: str, _key: str) -> tuple[int, int]:
        """All rows have one shape."""
        return 0, 0

    def row_bytes(self, _field: str, _key: str) -> int:
        """Bytes of a row."""
        return sum(spec.row_bytes for spec in embedding_arrays(self.vision.width))

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was found on pictures, also on those that cannot be used."""
        return self.targets.findings


def open_vision(named: str, facts: Memo, progress: Progress = silent, *, download: bool = False) -> VisionModel:
    """The vision model of a recipe, a directory or a Hub id. Raises `ModelError`."""
    if not named:
        raise ModelError("no vision model is named, so nothing makes embeddings",
                         hint=f"add --model MODEL, or set model in [embed] of the recipe: {EXAMPLES}")
    files, digest = vision_files(named, download=download), remembered_digest(facts)
    with progress("hashing the model", BackgroundTotal(lambda: bytes_of([files])), "bytes") as tick:
        vision_model(files, ticking(digest, tick))
    return vision_model(files, digest)


def survey(recipe: Recipe, vision: VisionModel, facts: Memo, *, jobs: int, progress: Progress = silent) -> Survey:
    """Reads the names, sizes and digests of a recipe's pictures, and crops them as `prep encode` does. Raises
    `PathError`, `ConfigError`."""
    recipe = without_caption_stop(recipe)
    rules_of(recipe)  # reports wrong rules before reading all pictures
    with progress("reading", total := DeferredTotal(), "pictures") as tick:
        surveyed = ingest(recipe, facts, jobs=jobs, tick=tick, total=total)
    with phase(progress, "planning"):
        recipe = settle_masks(recipe, surveyed.items)
        buckets, roles = buckets_for(recipe, surveyed), roles_of(recipe, surveyed.items)[0]
        keys, alpha, rows = EmbeddingKeys(context_of(vision)), alpha_of(recipe.image.alpha), PictureTargets()
        samples = Samples()

        def pictures() -> Iterator[EmbeddedPicture]:
            for seat in placed_items(recipe, surveyed.items, roles, buckets):
                item, target = seat.item.item, embedding_target(seat.item, seat.views[0], keys, alpha)
                rows.add(target)
                samples.add(Sample(id=seat.id, name=item.name, source=item.source, role=seat.role,
                                   picture=seat.item.picture, size=seat.item.size, bucket=seat.bucket, views=(),
                                   texts=(), embedding=target.key))
                yield EmbeddedPicture(item.label, item.name, item.source, seat.role, seat.item.size, seat.item.picture,
                                      target.key, tuple(caption for caption, _ in seat.item.captions))

        seen = tuple(pictures())
    targets = Targets(samples=samples, labels=tuple(picture.label for picture in seen), prompts=(), unconditional="",
                      latents={}, masks={}, texts={}, embeddings=rows,
                      findings=(*surveyed.findings, *buckets.findings))
    return Survey(pictures=seen, vision=vision, targets=targets)
