"""Spells samples as sd-scripts (kohya) caches latents: one `.npz` beside each picture.

`STEM_WWWWxHHHH_ARCH.npz` has the whole picture's size in its name and, stored without pickles:

    latents          float32 [C, h, w]: as the VAE makes them, for the families in `NORMALIZED` as their denoiser takes
                     them, since sd-scripts' own VAE of these families shifts and scales in `encode`
    original_size    int64 [2]: width, height of the picture
    crop_ltrb        int64 [4]: left and top of what was encoded, in the scaled picture; right and bottom such that
                     width - right is the left of the mirrored picture, which is all that sd-scripts reads them for
    latents_flipped  float32 [C, h, w], where a mirrored view of the same crop was encoded
    alpha_mask       float32 [H, W] in pixels, 0 to 1, where there is a mask

Where a picture may be cached at several sizes, each name ends with `_{h}x{w}`, the latent's size: for all but SD 1.5,
2.1 and SDXL. Pictures and captions (`STEM.txt`, one a line) are written along, since sd-scripts lists pictures;
`prep.export.kohya_config` writes dataset.toml, and says where masks are. Its own text caches are left to itself: they
depend on its training options.
"""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from prep.cache.values import Values
from prep.errors import UsageError
from prep.export import folder
from prep.export.kohya_config import KohyaPlan
from prep.export.layout import Picture
from prep.export.masks import plain_view, whole_mask
from prep.export.sample import ExportSample
from prep.formatting import join_names
from prep.geometry import Placement

ARCHITECTURES = {"sd15": "sd", "sd21": "sd", "sdxl": "sdxl", "sd3": "sd3", "flux": "flux", "lumina2": "lumina"}
ONE_SIZE = ("sd", "sdxl")
NORMALIZED = ("flux", "lumina")
READ = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".avif", ".jxl")  # the last two with their plugins
SAVED = (1980, 1, 1, 0, 0, 0)  # the earliest time that a zip can name


def architecture(family: str) -> str:
    """The word in the names of caches. Raises `UsageError` for a family that sd-scripts does not train."""
    if family not in ARCHITECTURES:
        raise UsageError(f"the family is '{family}', expected one that sd-scripts caches latents of: "
                         f"{', '.join(ARCHITECTURES)}", hint="--to safetensors and webdataset take any family")
    return ARCHITECTURES[family]


def check(pictures: Iterable[Picture], family: str, *, referring: bool = False) -> None:
    """Raises `UsageError` for samples that sd-scripts cannot read, as those with references, if any is `referring`."""
    word, odd = architecture(family), []
    if referring:
        raise UsageError("samples have references, for which sd-scripts has no caches",
                         hint="--to folder, safetensors and webdataset have references")
    for picture in pictures:
        if word in ONE_SIZE and len(picture.samples) > 1:
            raise UsageError(f"'{picture.first.name}' was encoded at {len(picture.samples)} sizes, but a cache of "
                             f"'{word}' has one", hint="encode with one --resolution")
        if picture.suffix not in READ:
            odd.append(picture.first.name)
    if odd:
        raise UsageError(f"sd-scripts skips pictures in formats that it does not read ({len(odd)}): "
                         f"{join_names(odd, 8)}", hint="convert them to PNG, and encode again; --to folder takes any")


def files(picture: Picture, plan: KohyaPlan) -> dict[str, folder.Make]:
    """The files of one picture by name, each with the function that makes its bytes."""
    word = architecture(picture.first.of.manifest.document["family"])
    width, height = picture.first.size
    makers = folder.plain_files(picture)
    if plan.several(picture):
        makers[f"{picture.stem}.txt"] = partial(wildcard_lines, picture.first)
    makers[f"{picture.stem}_{width:04d}x{height:04d}_{word}.npz"] = partial(
        _spell, picture.samples, word in ONE_SIZE, alpha=plan.alpha(picture))
    if (mask := plan.mask_of(picture)) is not None:
        makers[mask] = partial(whole_mask, folder.largest(picture))
    return makers


def wildcard_lines(sample: ExportSample) -> bytes:
    """The captions for `enable_wildcard`, which draws a line, and takes braces for alternatives unless they are double.
    """
    return folder.caption_lines(sample).replace(b"{", b"{{").replace(b"}", b"}}")


def _spell(samples: Sequence[ExportSample], one_size: bool, *, alpha: bool) -> bytes:
    """The cache of one picture."""
    arrays: dict[str, Values] = {}
    for sample in samples:
        spelled = _arrays(sample, alpha=alpha)
        rows, columns = spelled["latents"].shape[1:]
        ending = "" if one_size else f"_{rows}x{columns}"
        arrays |= {f"{name}{ending}": values for name, values in spelled.items()}
    return npz(arrays)


def _arrays(sample: ExportSample, *, alpha: bool) -> dict[str, Values]:
    """The arrays of the first view, and of a mirrored view of the same crop. `alpha`: with a mask in any case."""
    views = list(sample.views)
    placed = {view: sample.placement(view) for view in views}
    first = plain_view(sample)
    width, height = sample.bucket
    arrays = {"latents": _normalized(sample, first), "original_size": np.array(sample.size),
              "crop_ltrb": np.array(crop_ltrb(placed[first]))}
    for view in views:
        if not placed[first].flip and placed[view] == replace(placed[first], flip=True):
            arrays["latents_flipped"] = _normalized(sample, view)
    if (mask := sample.mask(first)) is not None:
        cells = mask.values()[0].astype(np.float32) / 255
        arrays["alpha_mask"] = cells.repeat(height // cells.shape[0], 0).repeat(width // cells.shape[1], 1)
    elif alpha:
        arrays["alpha_mask"] = np.ones((height, width), np.float32)
    return arrays


def crop_ltrb(placement: Placement) -> tuple[int, int, int, int]:
    """The `crop_ltrb` in the caches of a picture with this placement."""
    (left, top), (width, height) = placement.crop, placement.bucket
    return left, top, 2 * width + left - placement.scaled[0], 2 * height + top - placement.scaled[1]


def _normalized(sample: ExportSample, view: int) -> Values:
    """The latent of a view, as sd-scripts' VAE of the family makes it."""
    document = sample.of.manifest.document
    values, facts = sample.latent(view)["latent"].values(), document["latents"]
    if architecture(document["family"]) not in NORMALIZED:
        return values
    return (values - np.float32(facts["shift_factor"])) * np.float32(facts["scaling_factor"])


def npz(arrays: dict[str, Values]) -> bytes:
    """A zip of `.npy` files, as `numpy.savez` makes it, but with one date: the same arrays make the same bytes."""
    spelled = io.BytesIO()
    with zipfile.ZipFile(spelled, "w", zipfile.ZIP_STORED) as archive:
        for name, values in arrays.items():
            member = io.BytesIO()
            np.save(member, np.ascontiguousarray(values), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy", SAVED), member.getvalue())
    return spelled.getvalue()
