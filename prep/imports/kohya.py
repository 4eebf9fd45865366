"""The contents of sd-scripts' caches of latents, and the crops of their pictures; in the terms of its version 0.10.

    STEM_WWWWxHHHH_ARCH.npz   W x H: the picture's size, as stored; for SD 1.5, 2.1 and SDXL, STEM.npz of earlier
                              versions is preferred
    latents                   [C, h, w] a sample of the VAE's posterior; of Flux and Lumina shifted and scaled
    original_size             [2] the picture's width and height
    crop_ltrb                 [4] not the crop, but where the whole picture would lie within the bucket with bars at its
                              sides (`BucketManager.get_crop_ltrb`); exports of `prep` have the crop
    latents_flipped           [C, h, w] of the mirrored picture, where `flip_aug` was on
    alpha_mask                [H, W], where `alpha_mask` was on

Where a file may hold several sizes, all names end with `_{h}x{w}`. Cached pictures are always cropped in the middle:
sd-scripts caches no random crops.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prep.digest import digest_bytes
from prep.export.kohya import ONE_SIZE, crop_ltrb
from prep.fs.memo import Fact
from prep.geometry import Placement, Size, cover, enlarges
from prep.imports.npz import BadNpz, Npz

FACTS = "kohya-npz 1"  # the kind of facts that are remembered; raise the number when `npz_facts` finds something else
MOST_CELLS = 4096  # of a latent's side
MOST_CHANNELS = 128
MOST_NUMBER = 1 << 24  # in original_size and crop_ltrb
_LATENTS = re.compile(r"latents(|_[1-9][0-9]{0,3}x[1-9][0-9]{0,3})")
_NAMED = re.compile(r"(?P<stem>.+)_(?P<width>[0-9]{4,6})x(?P<height>[0-9]{4,6})_(?P<word>[a-z0-9]+)\.npz", re.DOTALL)


def cache_names(stem: str, size: Size, word: str) -> tuple[str, ...]:
    """The names of the cache of the picture with this stem, the preferred one first."""
    named = f"{stem}_{size[0]:04d}x{size[1]:04d}_{word}.npz"
    return (f"{stem}.npz", named) if word in ONE_SIZE else (named,)


def size_in_name(name: str, word: str) -> tuple[str, Size] | None:
    """The picture's stem and size in the name of a cache of this architecture; `None` for another name."""
    match = _NAMED.fullmatch(name)
    if match is None or match["word"] != word:
        return None
    return match["stem"], (int(match["width"]), int(match["height"]))


def npz_facts(data: bytes) -> Fact:
    """The facts of a cache: its digest and `sizes`, a list of suffix, shape, mirrored, masked, original size and crop.

    For a file that cannot be used: its digest, and `code` and `detail` of the finding.
    """
    digest = digest_bytes(data)
    try:
        npz = Npz(data)
        sizes = [_size_facts(npz, match[1]) for match in map(_LATENTS.fullmatch, npz.names) if match]
        if not sizes:
            raise BadNpz("has no array 'latents'")
    except BadNpz as error:
        return {"digest": digest, "code": "bad-latents", "detail": str(error)}
    return {"digest": digest, "sizes": sizes}


def _size_facts(npz: Npz, suffix: str) -> list[Any]:
    header = npz.header(f"latents{suffix}")
    shape = header.shape
    if len(shape) != 3 or header.dtype.kind != "f" or not 1 <= shape[0] <= MOST_CHANNELS or not all(
            1 <= side <= MOST_CELLS for side in shape[1:]):
        raise BadNpz(f"has latents of {header.dtype.name} {list(shape)}, expected floats of channels, height and width")
    if suffix not in ("", f"_{shape[1]}x{shape[2]}"):
        raise BadNpz(f"has 'latents{suffix}' of {list(shape)}, expected that height and width")
    mirrored = f"latents_flipped{suffix}" in npz.names
    if mirrored and npz.header(f"latents_flipped{suffix}") != header:
        raise BadNpz(f"has 'latents_flipped{suffix}' of another shape than 'latents{suffix}'")
    return [suffix, list(shape), mirrored, f"alpha_mask{suffix}" in npz.names,
            _numbers(npz, f"original_size{suffix}", 2), _numbers(npz, f"crop_ltrb{suffix}", 4)]


def _numbers(npz: Npz, name: str, count: int) -> list[float]:
    """A short array of numbers."""
    if npz.header(name).shape != (count,):
        raise BadNpz(f"has '{name}' of {list(npz.header(name).shape)}, expected {count} numbers")
    values = npz.read(name).astype(np.float64)
    if not np.isfinite(values).all() or np.abs(values).max() > MOST_NUMBER:
        raise BadNpz(f"has '{name}' of {values.tolist()}, expected pixels")
    return [float(value) for value in values]


def placement_of(size: Size, bucket: Size, ltrb: Sequence[float], *, unscaled: bool) -> Placement | None:
    """The crop of the picture; `None` if `ltrb` is of no way to crop it to this bucket.

    `unscaled`: sd-scripts did not scale pictures of this size, since `bucket_no_upscale` was set, and they have no more
    pixels than its buckets. Then they are cropped as they are.
    """
    whole = cover(size, bucket)
    if unscaled and not enlarges(size, bucket):
        left, top = ((side - cut) // 2 for side, cut in zip(size, bucket, strict=True))
        whole = Placement(scaled=size, crop=(left, top), bucket=bucket)
    if _near(ltrb, barred(size, bucket)):
        return whole
    left, top = int(ltrb[0]), int(ltrb[1])
    if not (0 <= left <= whole.scaled[0] - bucket[0] and 0 <= top <= whole.scaled[1] - bucket[1]):
        return None
    exported = replace(whole, crop=(left, top))
    earlier = (left, top, left + bucket[0], top + bucket[1])  # as `prep export` spelled it at first
    return exported if _near(ltrb, crop_ltrb(exported)) or _near(ltrb, earlier) else None


def barred(size: Size, bucket: Size) -> tuple[float, float, float, float]:
    """`crop_ltrb` as `BucketManager.get_crop_ltrb` of sd-scripts computes it."""
    aspect = size[0] / size[1]
    if bucket[0] / bucket[1] > aspect:
        wide, high = bucket[1] * aspect, float(bucket[1])
    else:
        wide, high = float(bucket[0]), bucket[0] / aspect
    left, top = (bucket[0] - wide) // 2, (bucket[1] - high) // 2
    return left, top, left + wide, top + high


def _near(seen: Sequence[float], expected: Sequence[float]) -> bool:
    """Whether the values are equal, but for the last digits of another machine's division."""
    return all(abs(value - other) < 1e-3 for value, other in zip(seen, expected, strict=True))
