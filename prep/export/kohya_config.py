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

from prep.buckets.sizes import step_buckets
from prep.export.layout import Picture
from prep.export.masks import is_masked
from prep.formatting import counted
from prep.geometry import Placement, Size

NAME = "dataset.toml"
SMALL = 1.5  # as much smaller is a bucket that was made for pictures which are not enlarged
STEP = 64  # pixels, sd-scripts' default of bucket_reso_steps
# What its trainers demand bucket_reso_steps to be a multiple of, by family.
LEAST_STEP = {"sd15": 64, "sd21": 64, "sdxl": 32, "sd3": 32, "flux": 32, "lumina2": 16}


@dataclass(frozen=True)
class KohyaPlan:
    """The form in which sd-scripts gets an export's training pictures."""

    pictures: Sequence[Picture]  # also those that are held out

    @cached_property
    def _trained(self) -> list[Picture]:
        return [picture for picture in self.pictures if picture.role != "validation"]

    @cached_property
    def _folders(self) -> dict[str, list[Picture]]:
        folders: dict[str, list[Picture]] = {}
        for picture in self._trained:
            folders.setdefault(picture.folder, []).append(picture)
        return folders

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
        return {name for name, pictures in self._folders.items()
                if any(is_masked(picture.first) for picture in pictures)}

    @cached_property
    def _several(self) -> set[str]:
        return {name for name, pictures in self._folders.items()
                if any(len(picture.first.captions) > 1 for picture in pictures)}

    def alpha(self, picture: Picture) -> bool:
        """Whether a picture's cache has a mask even if the picture has none, since others of its directory have."""
        return picture.folder in self._alphas

    def several(self, picture: Picture) -> bool:
        """Whether a picture of the same directory has several captions, one of which each showing draws."""
        return picture.folder in self._several

    def mask_of(self, picture: Picture) -> str | None:
        """The path of a picture's mask below the export, if masks are pictures."""
        if not self.as_pictures or picture.role == "validation":
            return None
        return f"{_masks_at(picture.folder)}{picture.stem.removeprefix(picture.folder)}.png"

    def config(self) -> bytes:
        """dataset.toml."""
        sizes = sizes_of(self._trained)
        lines = list(self._head(sizes))
        for size in sizes:
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
                **({"flip_aug": True} if all(map(is_mirrored, self._folders[name])) else {}),
                **({"enable_wildcard": True} if name in self._several else {})}

    def _head(self, sizes: Sequence[Resolution]) -> Iterator[str]:
        masks = " --masked_loss" if self.as_pictures else ""
        yield "# Written by prep export. Paths are relative to this directory, so start sd-scripts in it, with"
        yield f"#   --dataset_config dataset.toml --cache_latents --cache_latents_to_disk{masks}"
        shown = sum(sum(picture.repeats.values()) for picture in self._trained if picture.role == "train")
        prior = sum(sum(picture.repeats.values()) for picture in self._trained if picture.role == "prior")
        yield f"# An epoch shows {shown} training and {prior} regularization pictures, counted with repeats."
        if self._alphas:
            yield "# Masks are in the caches alone: without --cache_latents_to_disk, all of each picture trains."
        if any(picture.first.facts()["weight"] != 1 for picture in self._trained):
            yield "# Pictures have weights here, which sd-scripts does not know."
        yield from self._differences(sizes)
        yield from ("", "[general]", 'caption_extension = ".txt"', "")

    def _differences(self, sizes: Sequence[Resolution]) -> Iterator[str]:
        """Yields comments on what sd-scripts would refuse, or do otherwise than the caches say."""
        least = LEAST_STEP[self._trained[0].first.of.manifest.document["family"]] if self._trained else 1
        if steps := sorted({size.step for size in sizes if size.step % least}):
            yield (f"# sd-scripts trains this family with bucket_reso_steps of {least} or its multiples only, not "
                   f"{steps[0]}: encode with --step {least}.")
        other = [picture.name for picture in self._trained
                 if any(size.chosen(picture.first.size) != bucket for size in sizes
                        for bucket in picture.repeats.keys() & size.buckets)]
        if other:
            yield f"# sd-scripts would choose other buckets for {counted(len(other), 'picture')}, like {other[0]}:"
            yield "# delete their .npz files, so that it encodes them itself, or keep batch_size at 1."


@dataclass(frozen=True, kw_only=True)
class Resolution:
    """The buckets of one resolution."""

    buckets: frozenset[Size]
    no_upscale: bool

    @cached_property
    def step(self) -> int:
        """Pixels between sides of buckets."""
        return math.gcd(STEP, *(side for bucket in self.buckets for side in bucket))

    @cached_property
    def side(self) -> int:
        """The side of a square with about the area of the largest bucket, in whole steps."""
        side = math.sqrt(max(map(_area, self.buckets)))
        return max(round(side / self.step), 1) * self.step

    @cached_property
    def _offered(self) -> Sequence[Size]:
        """The buckets that sd-scripts makes of these options for pictures that it may enlarge."""
        options = self.options()
        return step_buckets(self.side, self.step, options["min_bucket_reso"], options["max_bucket_reso"])

    def chosen(self, size: Size) -> Size:
        """The bucket that sd-scripts chooses for a picture of this size with these options (`BucketManager`): that of
        the nearest quotient of sides, where Latentry compares logarithms, and enlarged to it."""
        if self.no_upscale:
            return self._cut(size)
        aspect = size[0] / size[1]
        return size if size in self._offered else min(self._offered, key=lambda each: abs(each[0] / each[1] - aspect))

    def _cut(self, size: Size) -> Size:
        """The bucket with bucket_no_upscale: the picture, made smaller to the area if it is larger, cut to whole steps.
        """
        (width, height), aspect, side = size, size[0] / size[1], self.side
        if width * height > side * side:
            wide, high = self._whole(side * math.sqrt(aspect)), self._whole(side / math.sqrt(aspect))
            by_width, by_height = (wide, self._whole(wide / aspect)), (self._whole(high * aspect), high)
            nearer = min((by_height, by_width), key=lambda each: abs(each[0] / max(each[1], 1) - aspect))
            width, height = ((wide, int(wide / aspect + 0.5)) if nearer is by_width else
                             (int(high * aspect + 0.5), high))
        return self._whole(width), self._whole(height)

    def _whole(self, pixels: float) -> int:
        rounded = int(pixels + 0.5)
        return rounded - rounded % self.step

    def options(self) -> dict[str, Any]:
        """The keys of [[datasets]] with which sd-scripts chooses these buckets."""
        return {"resolution": self.side, "enable_bucket": True, "bucket_reso_steps": self.step,
                "min_bucket_reso": min(self.side, *(min(bucket) for bucket in self.buckets)),
                "max_bucket_reso": max(self.side, *(max(bucket) for bucket in self.buckets)),
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


def is_mirrored(picture: Picture) -> bool:
    """Whether each of its samples has a view, and the same mirrored."""
    for sample in picture.samples:
        views = [sample.placement(view) for view in sample.views]
        if not any(not view.flip and replace(view, flip=True) in views for view in views):
            return False
    return True


def _masks_at(folder: str) -> str:
    return f".masks/{folder.partition('/')[2]}"  # hidden: whoever reads all pictures below the export takes no mask


def _lines(options: dict[str, Any], indent: str = "") -> Iterable[str]:
    return [*(f"{indent}{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in options.items()), ""]
