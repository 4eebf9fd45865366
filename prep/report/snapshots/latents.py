"""The parts of a page about latents: a table of channels, the samples that differ from most, and decoded latents.

C channels, h w latent cells, H W pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from prep.cache.reader import Reader
from prep.cache.values import Values, read_values
from prep.geometry import Size
from prep.images.decode import Picture, Pixels, scale_and_crop
from prep.images.thumbnail import small_jpeg
from prep.manifest.describe import describe
from prep.manifest.opened import OpenedManifest
from prep.manifest.statistics import FEWEST, NOTABLE, LatentStatistics, Outlier
from prep.pages.cards import SIDE
from prep.pages.originals import Originals
from prep.pages.parts import Column, Table, plural
from prep.progress import Tick
from prep.report.snapshots.gallery import Decoded, spread

ROWS = 50  # outliers in a table
EXPLAINED = ("Mean and range are those of the numbers in the cache. As trained, latents are shifted and scaled: a mean "
             "near 0 and a deviation near 1 are usual.")
Decode = Callable[[Values], Pixels]  # a latent as stored, float32 [C, h, w] → uint8 [H, W, 3]


def channels_table(statistics: LatentStatistics) -> Table:
    """Mean, deviation and range of each channel."""
    trained = statistics.trained_mean_C is not None and statistics.trained_std_C is not None
    rows = []
    for number in range(len(statistics.mean_C)):
        numbers = [column_C[number] for column_C in (
            statistics.mean_C, statistics.std_C, statistics.least_C, statistics.most_C)]
        if statistics.trained_mean_C is not None and statistics.trained_std_C is not None:
            numbers += [statistics.trained_mean_C[number], statistics.trained_std_C[number]]
        rows.append((f"{number}", *(_spelled(value) for value in numbers)))
    heads = ("mean", "deviation", "min", "max", *(("mean as trained", "deviation as trained") if trained else ()))
    return Table(caption="Latents by channel", rows=tuple(rows), columns=(
        Column(head="channel", kind="number"), *(Column(head=head, kind="number") for head in heads)))


def outliers_table(audit: OpenedManifest, outliers: Sequence[Outlier]) -> Table:
    """The samples that differ from most, the farthest first."""
    rows = tuple((audit.samples.name(outlier.sample), f"{outlier.channel}", outlier.what, _spelled(outlier.value),
                  _spelled(outlier.usual), f"{outlier.score:+.1f}") for outlier in outliers[:ROWS])
    return Table(caption="Latents that differ from most", rows=rows, more=max(0, len(outliers) - ROWS), elsewhere="",
                 columns=(Column(head="file", kind="name"), Column(head="channel", kind="number"),
                          Column(head="statistic", kind="code"), Column(head="value", kind="number"),
                          Column(head="usual", kind="number"), Column(head="score", kind="number")))


def latents_note(audit: OpenedManifest, statistics: LatentStatistics | None, unusual: int) -> str:
    """A note on what the tables are about and leave out; `unusual` samples differ from most."""
    if statistics is None:
        return "No latent was read: none is finite, or the shards are in a store (prep pull fetches them)."
    count, read = len(audit.samples), len(statistics.samples)
    parts = [EXPLAINED]
    if read + len(statistics.not_finite) + len(statistics.unreadable) < count:
        parts.append(f"Of {read:,} of {count:,} samples, evenly spread.")
    if statistics.not_finite:
        parts.append(f"{plural(len(statistics.not_finite), 'latent has', 'latents have')} NaN or infinity, first that "
                     f"of {audit.samples.name(statistics.not_finite[0])}.")
    if statistics.unreadable:
        parts.append(f"{plural(len(statistics.unreadable), 'latent')} cannot be read; prep verify says why.")
    if read < FEWEST:
        parts.append(f"None is told from the others: there are fewer than {FEWEST}.")
    else:
        how_many = plural(unusual, "sample has", "samples have") if unusual else "No sample has"
        parts.append(f"{how_many} a modified z-score beyond {NOTABLE} in some channel's mean or deviation "
                     "(Iglewicz and Hoaglin, 1993)"
                     + (": often flat, very dark or bright, or noisy pictures." if unusual else "."))
    return " ".join(parts)


def _spelled(value: float) -> str:
    return f"{value:.4g}"


def to_decode(count: int, most: int, unusual: Sequence[int]) -> list[int]:
    """The numbers of up to `most` of so many samples: the most unusual ones as up to a half, others evenly spread."""
    first = list(unusual[: most // 2])
    others = [number for number in spread(count, most) if number not in set(first)]
    rest = [others[place] for place in spread(len(others), max(0, most - len(first)))]
    return sorted({*first, *rest})


def decode_samples(audit: OpenedManifest, numbers: Iterable[int], decode: Decode, tick: Tick) -> dict[int, Decoded]:
    """The first view of each sample, decoded, with its PSNR if the original is still there; ticks once for each.

    Damaged rows are left out (`prep verify` names them).
    """
    originals, reader, decoded = Originals(audit), Reader(audit.cache), {}
    for number in numbers:
        sample = describe(audit, number)
        latent = read_values(reader, sample["views"][0]["latent"], "latent")
        if latent is not None and np.isfinite(latent).all():
            made = decode(latent)
            crop = _crop(audit, originals.picture(sample), number, tuple(sample["bucket"]))
            known = None if crop is None or crop.shape != made.shape else psnr(crop, made)
            decoded[number] = Decoded(picture=small_jpeg(made, SIDE), psnr=known)
        tick(1)
    reader.close()
    return decoded


def psnr(picture: Pixels, other: Pixels) -> float:
    """The peak signal-to-noise ratio in dB of two pictures, uint8 [H, W, 3]: 10 log10(255² / MSE), over all channels.

    Infinite for equal pictures. As in Huynh-Thu and Ghanbari, Scope of validity of PSNR in image/video quality
    assessment, Electronics Letters 44(13), 2008, and as peak_signal_noise_ratio of scikit-image computes it.
    """
    error = float(np.mean((picture.astype(np.float64) - other) ** 2))
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def _crop(audit: OpenedManifest, picture: Picture | None, number: int, bucket: Size) -> Pixels | None:
    """The pixels of a sample's first view that were encoded; `None` without the original."""
    if picture is None:
        return None
    return scale_and_crop(picture, audit.samples.placement(int(audit.samples.view_offsets[number]), bucket))
