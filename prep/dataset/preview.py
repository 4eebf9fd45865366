"""Previews one epoch: buckets, scales, crops, and the names of samples that are dropped or repeated.

The names are those of epoch 0 with the given seed; other epochs drop other samples, as many.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prep.batching.plan import Indices, StepPlan, step_plan
from prep.batching.policy import Underfill
from prep.buckets.assign import Assignment, Assignments
from prep.buckets.suggest import Sizes
from prep.dataset.ingest import KnownItem
from prep.dataset.prior import balance_prior
from prep.dataset.samples import placed_items, roles_of
from prep.findings import Finding
from prep.geometry import BucketShape, Size, shape_document
from prep.recipe.schema import Recipe


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainSample:
    """A sample that training shows `repeats` times per epoch."""

    id: str
    name: str
    bucket: Size
    repeats: int
    views: int = 1
    references: tuple[Size, ...] = ()  # of their latents' pictures

    @property
    def shape(self) -> BucketShape:
        """The bucket, and the sizes of the references."""
        return self.bucket, self.references


@dataclass(frozen=True, kw_only=True)
class EpochPreview:
    """A bucketing and the step plan over its training samples."""

    bucketing: Assignments
    shapes: tuple[BucketShape, ...]  # of the buckets
    showings: tuple[tuple[TrainSample, ...], ...]  # by bucket, sorted by id as `train` counts them
    plan: StepPlan
    world: int  # ranks

    @property
    def left_out(self) -> list[str]:
        """Names that epoch 0 drops, sorted, once for each lost showing."""
        return self._names(self.plan.left_out(0))

    @property
    def repeated(self) -> list[str]:
        """Names that epoch 0 repeats to fill batches, sorted, once for each extra showing."""
        return self._names(self.plan.repeated(0))

    @property
    def idle_ranks(self) -> int:
        """Ranks that have no micro-batch even in a full step."""
        return max(0, self.world - self.plan.per_step)

    def _names(self, by_bucket: Mapping[int, Indices]) -> list[str]:
        names: list[str] = []
        for bucket, occurrences in by_bucket.items():
            members = self.showings[bucket]
            ends = np.cumsum([member.repeats for member in members])
            names += [members[place].name for place in np.searchsorted(ends, occurrences, side="right")]
        return sorted(names)


def train_samples(recipe: Recipe, items: Sequence[KnownItem], bucketing: Assignments) -> tuple[TrainSample, ...]:
    """The training samples that `encode` will make of a bucketing of `items`, with the same ids."""
    seats = placed_items(recipe, items, roles_of(recipe, items)[0], bucketing)
    return tuple(TrainSample(id=seat.id, name=seat.item.item.label, bucket=seat.bucket,
                             repeats=seat.repeats, views=len(seat.views),
                             references=tuple(place.bucket for place in seat.references[0]) if seat.references else ())
                 for seat in seats if seat.role != "validation")  # fmt: skip


def flag_extremes(bucketing: Assignments, *, crop: float | None, upscale: float | None) -> Assignments:
    """`bucketing` with a finding for each picture cropped by more than `crop` percent or enlarged over `upscale` times.

    `None`: no such limit.
    """
    findings = list(bucketing.findings)
    for assignment in bucketing.pictures:
        bucket = f"for bucket {assignment.placement.bucket[0]}x{assignment.placement.bucket[1]}"
        if crop is not None and assignment.crop_loss > crop:
            detail = f"{assignment.crop_loss:.1f} % of it is cropped {bucket}, expected at most {crop:g} %"
            findings.append(Finding(path=assignment.name, code="heavy-crop", severity="warning", detail=detail))
        if upscale is not None and assignment.scale > upscale:
            detail = f"it is enlarged {assignment.scale:.2f} times {bucket}, expected at most {upscale:g} times"
            findings.append(Finding(path=assignment.name, code="heavy-upscale", severity="warning", detail=detail))
    return replace(bucketing, findings=tuple(findings))


def preview_epoch(
    bucketing: Assignments,
    showings: Iterable[TrainSample],
    *,
    batch_size: int,
    micro_batch: int | None = None,
    underfill: Underfill = "partial",
    seed: int = 0,
    world: int = 1,
) -> EpochPreview:
    """The preview of training on `showings`. Raises `ConfigError` for sizes that make no steps."""
    by_bucket: dict[BucketShape, list[TrainSample]] = defaultdict(list)
    for showing in showings:
        by_bucket[showing.shape].append(showing)
    shapes = bucketing.shapes
    members = tuple(tuple(sorted(by_bucket[shape], key=lambda sample: sample.id)) for shape in shapes)
    counts = [sum(member.repeats for member in inside) for inside in members]
    plan = step_plan(counts, seed=seed, batch_size=batch_size, micro_batch=micro_batch, underfill=underfill)
    return EpochPreview(bucketing=bucketing, shapes=shapes, showings=members, plan=plan, world=world)


def preview_as_json(preview: EpochPreview) -> dict[str, Any]:
    """The document of `prep bucket --json`; scales are factors, crop losses percent of the area."""
    return {**summary_as_json(preview), "pictures": [_picture(each) for each in preview.bucketing.pictures]}


def summary_as_json(preview: EpochPreview) -> dict[str, Any]:
    """That document without the pictures, each of which takes a kB of memory."""
    plan, bucketing = preview.plan, preview.bucketing
    inside: dict[BucketShape, list[Assignment]] = defaultdict(list)
    counts = Counter(assignment.resolution for assignment in bucketing.pictures)
    for assignment in bucketing.pictures:
        inside[assignment.shape].append(assignment)
    return {
        "format": "latentry/bucket", "version": 1,
        "buckets": [
            {**shape_document(shape), "samples": len(members), "views": sum(member.views for member in members),
             "showings": count, "batches": batches, **_summary(inside[shape])}
            for shape, members, count, batches
            in zip(preview.shapes, preview.showings, plan.counts, plan.batches, strict=True)
        ],
        "resolutions": [{"resolution": rules.resolution, "pictures": counts[rules.resolution]}
                        for rules in bucketing.rules],
        "steps_per_epoch": plan.steps_per_epoch, "batch_size": plan.batch_size, "micro_batch": plan.micro_batch,
        "underfill": plan.underfill, "world": preview.world, "idle_ranks": preview.idle_ranks,
        "left_out": preview.left_out, "repeated": preview.repeated,
        "merges": [{"bucket": list(merge.bucket), "into": list(merge.into), "pictures": merge.pictures,
                    "crop_loss": {"before": round(merge.before, 2), "after": round(merge.after, 2)}}
                   for merge in bucketing.merges],
        "findings": [finding.as_json() for finding in bucketing.findings],
    }


def _summary(inside: Sequence[Assignment]) -> dict[str, Any]:
    losses, scales = [assignment.crop_loss for assignment in inside], [assignment.scale for assignment in inside]
    return {"pictures": len(inside), "upscaled": sum(assignment.upscaled for assignment in inside),
            "scale": [round(min(scales), 4), round(max(scales), 4)],
            "crop_loss": {"mean": round(sum(losses) / len(losses), 2), "worst": round(max(losses), 2)}}


def _picture(assignment: Assignment) -> dict[str, Any]:
    bucket = shape_document(assignment.shape)
    return {"name": assignment.name, "size": list(assignment.size), "resolution": assignment.resolution,
            "bucket": bucket.pop("size"), **bucket,
            "scaled": list(assignment.placement.scaled), "crop": list(assignment.placement.crop),
            "views": [{"crop": list(view.crop), "flip": view.flip} for view in assignment.views],
            "scale": round(assignment.scale, 4), "crop_loss": round(assignment.crop_loss, 2),
            "upscaled": assignment.upscaled}


def sizes_of(recipe: Recipe, items: Sequence[KnownItem]) -> Sizes:
    """The numbers of pictures and showings of each size in a recipe."""
    counts: dict[Size, tuple[int, int]] = {}
    roles = roles_of(recipe, items)[0]
    shown = balance_prior([(role, recipe.sources[item.item.source].repeats)
                           for item, role in zip(items, roles, strict=True)])
    for item, role, repeats in zip(items, roles, shown, strict=True):
        pictures, showings = counts.get(item.size, (0, 0))
        counts[item.size] = pictures + bool(repeats), showings + (0 if role == "validation" else repeats)
    return counts
