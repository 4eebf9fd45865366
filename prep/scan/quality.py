"""Judges a decoded picture: notes on what a user may not want to train on. None of them keeps a picture from use.

The list of properties, and the limits of brightness and information, are those of CleanVision
(https://github.com/cleanlab/cleanvision). All but compression is measured on a copy whose longer side has `SIDE` pixels
at most: what a picture loses when it is shrunk to a bucket does not matter.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from prep.images.decode import Picture, Pixels
from prep.images.formats.jpeg import luminance_table
from prep.images.formats.parts import Note
from prep.images.thumbnail import small_copies

SIDE = 512
DARK = 0.32  # brightness, of 1, that 99 % of the pixels stay below (CleanVision)
LIGHT = 0.95  # brightness that 95 % of the pixels exceed (CleanVision)
INFORMATION = 3.0  # bits of entropy of the gray levels, of 8 (CleanVision)
BLUR = 0.5  # of 1. 63 sharp photos have 0.13 to 0.41; blurred with a sigma of 4 pixels in 1024, 0.51 to 0.72
NARROW = 128  # pixels of the copy's shorter side below which the filter takes too much of it
QUALITY = 50  # of a JPEG: that of the tables in Annex K of the standard, which are meant for good pictures
BORDER = 0.05  # share of the picture that plain bars take

_BLUR_WIDTH = 11  # pixels of the averaging filter, from the paper
_PLAIN, _JUMP = 8, 16  # levels of 255: within a bar, and from a bar to the picture beside it
_ACROSS = 0.75  # share of the line beside a bar that has other levels
_HSP = (0.241, 0.691, 0.068)  # weights of red, green and blue in perceived brightness (HSP color model, CleanVision)

_ANNEX_K_MEAN = 57.625  # of the 64 divisors of luminance in Table K.1 of ISO/IEC 10918-1

Levels = np.ndarray[Any, np.dtype[np.int16]]


def quality_notes(data: bytes, picture: Picture) -> Iterator[Note]:
    """Notes (code, what was seen) on `picture` (RGB), decoded from `data`, whose pixels are not all the same."""
    colors, gray = small_copies(picture, SIDE)
    yield from _brightness_notes(np.asarray(colors))
    bits = gray.entropy()
    if bits < INFORMATION:
        yield "low-information", f"{bits:.1f} bits of information in its gray levels, expected at least {INFORMATION:g}"
    elif _can_judge_blur(gray) and (blur := blurriness(np.asarray(gray))) > BLUR:  # without information, no edges
        yield "blurred", f"blur is {blur:.2f} of 1, expected at most {BLUR:g}"
    bars = plain_bars(np.asarray(gray))
    if sum(bars.values()) > BORDER:
        yield "plain-border", "plain bars: " + ", ".join(f"{side} {share:.0%}" for side, share in bars.items() if share)
    quality = jpeg_quality(data)
    if quality is not None and quality < QUALITY:
        yield "heavy-compression", f"JPEG of quality {quality}, expected at least {QUALITY}"


def _can_judge_blur(gray: Picture) -> bool:
    """Whether the limit holds: it was found on copies of `SIDE` pixels, and says nothing about smaller pictures."""
    return max(gray.size) == SIDE and min(gray.size) >= NARROW


def _brightness_notes(pixels: Pixels) -> Iterator[Note]:
    brightness = np.sqrt(np.square(pixels.astype(np.float32)) @ np.array(_HSP, np.float32)) / 255
    low, high = np.percentile(brightness, [5, 99])
    if high < DARK:
        yield "dark", f"99 % of its pixels are darker than {high:.2f} of 1, expected {DARK:g} or more"
    elif low > LIGHT:
        yield "light", f"95 % of its pixels are brighter than {low:.2f} of 1, expected {LIGHT:g} or less"


def blurriness(gray: Pixels) -> float:
    """How blurred a picture (uint8 [H, W]) is: 0 for the sharpest, 1 for one without any detail.

    The measure of Crete et al., "The Blur Effect: Perception and Estimation with a New No-reference Perceptual Blur
    Metric" (SPIE 2007): the share of the differences between neighbors that remains when the picture is blurred.
    """
    levels = gray.astype(np.int16)
    return max(_remaining(levels), _remaining(levels.T))


def _remaining(levels: Levels) -> float:
    """The share of the differences between neighbors in a column that remains when the columns are averaged.

    Two neighbors among sliding means differ by what comes in and what goes out: no mean is computed.
    """
    before, half = len(levels) - 1, _BLUR_WIDTH // 2
    padded = np.pad(levels, ((half, half), (0, 0)), mode="edge")
    differences = np.abs(np.diff(levels, axis=0)) * np.int16(_BLUR_WIDTH)
    remaining = np.abs(padded[_BLUR_WIDTH:] - padded[:before])
    whole = int(differences.sum(dtype=np.int64))
    return 1.0 if whole == 0 else int(np.minimum(remaining, differences).sum(dtype=np.int64)) / whole


def plain_bars(gray: Pixels) -> dict[str, float]:
    """The share of a picture (uint8 [H, W]) that a bar of one level takes at each side: top, bottom, left, right.

    A bar ends where most of the next line has other levels, so that a plain background is none.
    """
    return {"top": _bar(gray), "bottom": _bar(gray[::-1]), "left": _bar(gray.T), "right": _bar(gray.T[::-1])}


def _bar(lines: Pixels) -> float:
    if int(lines[0].max()) - int(lines[0].min()) > _PLAIN:
        return 0.0
    plain = lines.max(axis=1).astype(int) - lines.min(axis=1) <= _PLAIN
    level = float(lines[0].mean())
    plain &= np.abs(lines.mean(axis=1) - level) <= _PLAIN
    count = len(lines) if plain.all() else int(np.argmin(plain))
    if not 0 < count < len(lines):
        return 0.0
    beyond = lines[min(count + 1, len(lines) - 1)]  # the first line may be a mixture of both
    return count / len(lines) if float((np.abs(beyond - level) > _JUMP).mean()) >= _ACROSS else 0.0


def jpeg_quality(data: bytes) -> int | None:
    """About the setting of libjpeg's scale, 1 to 100, that a JPEG was saved with; `None` for another format.

    From the mean of its luminance table: libjpeg's `jpeg_quality_scaling` multiplies Annex K's by 5000 / quality
    percent below 50, and by 200 - 2 * quality percent from there on.
    """
    table = luminance_table(data)
    if not table:
        return None
    percent = 100 * (sum(table) / len(table)) / _ANNEX_K_MEAN
    return max(1, min(100, round(5000 / percent if percent > 100 else (200 - percent) / 2)))


# ---- captions --------------------------------------------------------------------------------------------------------

FEWEST = 20  # captions from which lengths can be compared
FENCE = 3.0  # interquartile ranges outside the quartiles: Tukey's outer fences, "Exploratory Data Analysis" (1977)
FACTOR = 4.0  # how often longer or shorter than the median it must be, too


def odd_lengths(lengths: Sequence[int]) -> Iterator[tuple[int, str]]:
    """(index, what was seen) of each length of a caption, in characters, that is far from those of the others."""
    if len(lengths) < FEWEST:
        return
    logs = np.log(np.maximum(np.asarray(lengths, np.float64), 1))
    first, median, third = np.percentile(logs, [25, 50, 75])
    reach = FENCE * (third - first)
    low = min(first - reach, median - math.log(FACTOR))
    high = max(third + reach, median + math.log(FACTOR))
    usual = f"half of all have {round(math.exp(first))} to {round(math.exp(third))}"
    for index in np.flatnonzero((logs < low) | (logs > high)).tolist():
        yield index, f"{lengths[index]} characters; {usual}"
