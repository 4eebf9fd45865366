"""The lists of bucket sizes that a recipe can choose, as (width, height) in pixels; exact integers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import isqrt
from typing import Literal

from prep.errors import ConfigError
from prep.geometry import Size

MOST_RESOLUTION = 1 << 14  # pixels of a side; more than 2^28 are not decoded
MOST_SIDE = 2 * MOST_RESOLUTION  # the longest side of the buckets at that resolution
STEP = 64  # pixels between bucket sides if the model family is unknown: bucket_reso_steps of kohya's sd-scripts
Kind = Literal["step", "sdxl-40", "ratio", "list", "single"]
Upscale = Literal["never", "allow", "reject"] | Fraction  # a number: enlarge at most so many times

# Long sides by short side, both ways up, of the sizes in appendix I of the SDXL paper (arXiv 2307.01952) ...
_SDXL: Mapping[int, tuple[int, ...]] = {
    512: (1856, 1920, 1984, 2048), 576: (1664, 1728, 1792), 640: (1536, 1600), 704: (1408, 1472),
    768: (1280, 1344), 832: (1152, 1216), 896: (1088, 1152), 960: (1024, 1088), 1024: (1024,),
}
_SDXL_WIDE_ONLY: Size = (1344, 704)  # ... of which the paper lists this one only in landscape

# Aspect ratios of the `ratio` buckets, as OneTrainer users know them; each also in portrait.
RATIOS = tuple(Fraction(text) for text in ("1", "5/4", "3/2", "7/4", "2", "5/2", "3", "7/2", "4"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """The rules that decide the bucket of a picture; 0 means the default in the comment."""

    resolution: int  # the buckets' area is about resolution²
    kind: Kind = "step"
    step: int = STEP  # sides are multiples of it; must be a multiple of the family's 8 × patch
    shortest: int = 0  # shortest side of a `step` bucket; default: `default_ends`
    longest: int = 0  # longest side of a `step` bucket, or of one for a small picture; default: `default_ends`
    min_side: int = 0  # pictures with a shorter side are skipped; default: step
    upscale: Upscale = "never"  # see `reach`
    min_bucket: int = 1  # buckets with fewer pictures merge into their nearest neighbor
    sizes: tuple[Size, ...] = ()  # for kind `list`

    @property
    def side_range(self) -> tuple[int, int]:
        """Shortest and longest bucket side, with defaults filled in."""
        shortest, longest = default_ends(self.resolution, self.step)
        return self.shortest or shortest, self.longest or longest

    @property
    def min_picture_side(self) -> int:
        """The shortest side a picture may have, with the default filled in."""
        return self.min_side or self.step

    def max_bucket(self, size: Size) -> Size | None:
        """The largest sides of a bucket for a picture of `size`; `None`: no limit."""
        if self.upscale == "allow":
            return None
        if isinstance(self.upscale, Fraction):
            return int(size[0] * self.upscale), int(size[1] * self.upscale)
        return size


def buckets_of(rules: Rules) -> tuple[Size, ...]:
    """The buckets that `rules` offer, sorted. Raises `ConfigError`."""
    _check(rules)
    makers: Mapping[Kind, Callable[[], Iterable[Size]]] = {
        "step": lambda: step_buckets(rules.resolution, rules.step, *rules.side_range),
        "ratio": lambda: ratio_buckets(rules.resolution, rules.step),
        "sdxl-40": sdxl_buckets,
        "list": lambda: rules.sizes,
        "single": lambda: [(rules.resolution, rules.resolution)],
    }
    buckets = tuple(sorted(set(makers[rules.kind]())))
    for width, height in buckets:
        if width % rules.step or height % rules.step or min(width, height) < 1:
            expected = f"expected sides that are multiples of {rules.step}"
            raise ConfigError(f"bucket {width}x{height} of kind '{rules.kind}' does not fit: {expected}",
                              hint=f"change image.{'sizes' if rules.kind == 'list' else 'resolution'} or image.step")
    return buckets


def default_ends(resolution: int, step: int) -> tuple[int, int]:
    """Shortest and longest side of the step buckets: R/4 (but 256 where that is at most R/2) and 2R.

    At 1024 and 512 these are 256..2048 and 256..1024, the values usually set by hand in kohya's sd-scripts.
    """
    shortest = max(resolution // 4, min(256, resolution // 2))
    return max(step, shortest // step * step), 2 * resolution // step * step


def step_buckets(resolution: int, step: int, shortest: int, longest: int) -> tuple[Size, ...]:
    """Every width from `shortest` to `longest` by `step`, each with the largest height that keeps within the area.

    In landscape and portrait, and the square. The same sizes as kohya's sd-scripts: 41 for 1024 (64, 256..2048), 17 for
    512 (64, 256..1024). Heights stop at `longest`, so the narrowest buckets are smaller than the area allows.
    """
    square = resolution // step * step
    buckets = {(square, square)}
    for width in range(shortest, longest + 1, step):
        height = min(longest, resolution * resolution // width // step * step)
        if height >= shortest:
            buckets |= {(width, height), (height, width)}
    return tuple(sorted(buckets))


def ratio_buckets(resolution: int, step: int) -> tuple[Size, ...]:
    """`RATIOS` at the area of resolution², sides rounded to `step`, landscape and portrait: 17 for 1024 and 64."""
    buckets: set[Size] = set()
    for ratio in RATIOS:
        long, short = _rounded_root(ratio, resolution, step), _rounded_root(1 / ratio, resolution, step)
        buckets |= {(long, short), (short, long)}
    return tuple(sorted(buckets))


def sdxl_buckets() -> tuple[Size, ...]:
    """The 40 sizes that SDXL was trained at."""
    buckets = {_SDXL_WIDE_ONLY}
    for short, longs in _SDXL.items():
        for long in longs:
            buckets |= {(long, short), (short, long)}
    return tuple(sorted(buckets))


def _rounded_root(ratio: Fraction, resolution: int, step: int) -> int:
    """resolution × √ratio, rounded to a multiple of `step` without a float; at least one step."""
    squared = ratio * resolution * resolution / (step * step)
    twice = isqrt(4 * squared.numerator // squared.denominator)  # ⌊2x⌋, so that (⌊2x⌋ + 1) // 2 rounds x half up
    return max(1, (twice + 1) // 2) * step


def _check(rules: Rules) -> None:
    """Raises `ConfigError` for contradictory rules."""
    for name in ("step", "min_bucket"):
        if getattr(rules, name) < 1:
            raise ConfigError(f"image.{name} is {getattr(rules, name)}, expected at least 1")
    for name in ("shortest", "longest", "min_side"):
        if not 0 <= getattr(rules, name) <= MOST_SIDE:
            raise ConfigError(f"image.{name} is {getattr(rules, name)}, expected 0 (the default) to {MOST_SIDE}")
    if rules.resolution > MOST_RESOLUTION:
        raise ConfigError(f"image.resolution is {rules.resolution}, expected at most {MOST_RESOLUTION}")
    if rules.resolution < rules.step:
        raise ConfigError(f"image.resolution is {rules.resolution}, expected at least the step, {rules.step}")
    shortest, longest = rules.side_range
    if rules.kind == "step" and (shortest % rules.step or shortest > longest):
        wanted = f"expected a multiple of {rules.step} up to the longest side, {longest}"
        raise ConfigError(f"image.shortest is {shortest}, {wanted}")
    if rules.kind == "sdxl-40" and rules.resolution != 1024:
        raise ConfigError(f"image.buckets is 'sdxl-40' and image.resolution {rules.resolution}, expected 1024",
                          hint="use image.buckets = 'step' for other resolutions")
    if rules.kind == "list" and not rules.sizes:
        raise ConfigError("image.buckets is 'list' and there are no sizes, expected at least one",
                          hint="name them: image.sizes = [[1024, 1024], [832, 1216]]")
