"""Writes dataset.toml of an export for sd-scripts, with which it trains on the same pictures as often.

A subset is a directory, with its repeats and role. Masks are pictures in a directory of their own
(`conditioning_data_dir`, read with --masked_loss): that needs one for each picture, no subset of regularization
pictures beside it, and crops in the middle. Else they are in the caches alone (`alpha_mask`), which sd-scripts reads
with --cache_latents_to_disk.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from prep.export.layout import Picture
from prep.export.masks import is_masked
from prep.geometry import Placement, Size

NAME = "dataset.toml"
SMALL = 1.5  # as much smaller is a bucket that was made for pictures which are not enlarged
STEP = 64  # pixels, sd-scripts' default of bucket_reso_steps


@dataclass(frozen=True)
class Plan:
    """How an export's training pictures are given to sd-scripts."""

    pictures: Sequence[Picture]  # also those that are held out

    @cached_property
    def _trained(self) -> list[Picture]:
        return [picture for picture in self.pictures if picture.role != "validation"]

    @cached_property
    def _folders(self) -> dict[str, list[Picture]]:
        found: dict[str, list[Picture]] = {}
        for picture in self._trained:
            found.setdefault(picture.folder, []).append(picture)
        return found

    @cached_property
    def masked(self) -> bool:
        """Whether a picture has a mask."""
        return any(is_masked(picture.first) for picture in self._trained)

    @cached_property
    def as_pictures(self) -> bool:
        """Whether masks are pictures in directories of their own."""
        return self.masked and all(picture.role == "train" and all(map(_is_centred, _placements(picture)))
                                   for picture in self._trained)

    @cached_property
    def _alphas(self) -> set[str]:
        if not self.masked or self.as_pictures:
            return set()
        return {name for name, some in self._folders.items() if any(is_masked(one.first) for one in some)}

    @cached_property
    def _several(self) -> set[str]:
        return {name for name, some in self._folders.items() if any(len(one.first.captions) > 1 for one in some)}

    def alpha(self, picture: Picture) -> bool:
        """Whether its cache has a mask even if the picture has none, since others of its directory have."""
        return picture.folder in self._alphas

    def several(self, picture: Picture) -> bool:
        """Whether a picture of its directory has several captions, of which each showing draws one."""
        return picture.folder in self._several

    def mask_of(self, picture: Picture) -> str | None:
        """The path of its mask below the export, if masks are pictures."""
        if not self.as_pictures or picture.role == "validation":
            return None
        return f"{_masks_at(picture.folder)}{picture.stem.removeprefix(picture.folder)}.png"

    def config(self) -> bytes:
        """dataset.toml."""
        lines = list(self._head())
        for size in sizes_of(self._trained):
            lines += ["[[datasets]]", *_lines(size.options())]
            for name, some in self._folders.items():
                shown = [count for bucket, count in some[0].repeats.items() if bucket in size.buckets]
                if shown:
                    lines += ["  [[datasets.subsets]]", *_lines(self._subset(name, some[0], shown[0]), indent="  ")]
        return "\n".join(lines).rstrip("\n").encode() + b"\n"

    def _subset(self, name: str, picture: Picture, repeats: int) -> dict[str, Any]:
        return {"image_dir": name, "num_repeats": repeats,
                **({"is_reg": True} if picture.role == "prior" else {}),
                **({"conditioning_data_dir": _masks_at(name)} if self.as_pictures else {}),
                **({"alpha_mask": True} if name in self._alphas else {}),
                **({"flip_aug": True} if all(map(_is_mirrored, self._folders[name])) else {}),
                **({"enable_wildcard": True} if name in self._several else {})}

    def _head(self) -> Iterator[str]:
        masks = " --masked_loss" if self.as_pictures else ""
        yield "# Written by prep export. Paths are relative to this directory, so start sd-scripts in it, with"
        yield f"#   --dataset_config dataset.toml --cache_latents --cache_latents_to_disk{masks}"
        shown = sum(sum(one.repeats.values()) for one in self._trained if one.role == "train")
        prior = sum(sum(one.repeats.values()) for one in self._trained if one.role == "prior")
        yield f"# An epoch shows {shown} training and {prior} regularization pictures, counted with repeats."
        if self._alphas:
            yield "# Masks are in the caches alone: without --cache_latents_to_disk, all of each picture trains."
        if any(one.first.facts()["weight"] != 1 for one in self._trained):
            yield "# Pictures have weights here, which sd-scripts does not know."
        yield from ("", "[general]", 'caption_extension = ".txt"', "")


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The buckets of one resolution."""

    buckets: frozenset[Size]
    no_upscale: bool

    def options(self) -> dict[str, Any]:
        """The keys of [[datasets]] with which sd-scripts chooses these buckets."""
        step = math.gcd(STEP, *(side for bucket in self.buckets for side in bucket))
        side = math.sqrt(max(map(_area, self.buckets)))
        side = max(round(side / step), 1) * step
        return {"resolution": side, "enable_bucket": True, "bucket_reso_steps": step,
                "min_bucket_reso": min(side, *(min(bucket) for bucket in self.buckets)),
                "max_bucket_reso": max(side, *(max(bucket) for bucket in self.buckets)),
                "bucket_no_upscale": self.no_upscale}


def sizes_of(pictures: Sequence[Picture]) -> list[Resolution]:
    """The resolutions at which pictures were encoded: as many as the picture with the most samples has. A bucket is of
    that whose area is nearest."""
    most = max((len(picture.samples) for picture in pictures), default=0)
    whole = [sorted(map(_area, picture.repeats)) for picture in pictures if len(picture.samples) == most]
    areas = [max(some[number] for some in whole) for number in range(most)]
    groups: list[set[Size]] = [set() for _ in areas]
    for bucket in {bucket for picture in pictures for bucket in picture.repeats}:
        distances = [abs(math.log(area / _area(bucket))) for area in areas]
        groups[distances.index(min(distances))].add(bucket)
    never = not any(place.scaled[0] > sample.size[0] for picture in pictures for sample in picture.samples
                    for place in [sample.placement(sample.views[0])])
    return [Resolution(buckets=frozenset(some), no_upscale=never and min(map(_area, some)) * SMALL < area)
            for some, area in zip(groups, areas, strict=True)]


def _area(bucket: Size) -> int:
    return bucket[0] * bucket[1]


def _placements(picture: Picture) -> Iterator[Placement]:
    return (sample.placement(view) for sample in picture.samples for view in sample.views)


def _is_centred(place: Placement) -> bool:
    """Whether a crop is the one in the middle, which sd-scripts takes of masks."""
    return all(abs(2 * start + bucket - scaled) <= 2
               for start, bucket, scaled in zip(place.crop, place.bucket, place.scaled, strict=True))


def _is_mirrored(picture: Picture) -> bool:
    """Whether each of its samples has a view, and the same mirrored."""
    for sample in picture.samples:
        views = [sample.placement(view) for view in sample.views]
        if not any(not one.flip and replace(one, flip=True) in views for one in views):
            return False
    return True


def _masks_at(folder: str) -> str:
    return f".masks/{folder.partition('/')[2]}"  # hidden: whoever reads all pictures below the export takes no mask


def _lines(options: dict[str, Any], indent: str = "") -> Iterable[str]:
    return [*(f"{indent}{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in options.items()), ""]
