"""Makes the pictures of the pages: thumbnails, what training sees, masks and latent channels. None is read by a path.

A sample's number leads to its original, which counts only if its bytes have the digest of the manifest. Every picture
is made anew from pixels, so no byte of a foreign file reaches the browser.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from prep.cache.reader import Reader
from prep.cache.values import read_values
from prep.images.decode import encode_png, scale_and_crop
from prep.images.mask import mask_picture
from prep.images.thumbnail import encode_jpeg, encode_shade, shrink
from prep.manifest.describe import describe
from prep.manifest.opened import OpenedManifest
from prep.pages.cards import references_of
from prep.pages.originals import Originals
from prep.view.memory import Memory

THUMBNAIL, WHOLE = 320, 1280  # pixels of the longer side
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Channel:
    """Statistics of one channel of a latent, as stored; NaN and infinities are left out, and counted."""

    low: float
    high: float
    mean: float
    std: float
    bad: int


class Pictures:
    """The pictures of one manifest's samples. Threads may share it."""

    def __init__(self, opened: OpenedManifest, memory: Memory | None = None) -> None:
        self._opened = opened
        self._originals = Originals(opened)
        self._reader = Reader(opened.cache)
        self._memory = memory or Memory()

    def close(self) -> None:
        """Closes the cache's files."""
        self._reader.close()

    @property
    def channels(self) -> int:
        """The number of channels of a latent."""
        return int(self._opened.manifest.document["latents"]["channels"])

    def describe(self, sample: int) -> dict[str, Any]:
        """The sample as a document, without keys."""
        return describe(self._opened, sample)

    def thumbnail(self, sample: int, reference: int | None = None) -> bytes | None:
        """A small JPEG of the whole picture, or of a reference; `None` if the original is missing, has changed, or
        cannot be decoded."""
        return self._memory.get(("thumbnail", sample, reference), lambda: self._small(sample, reference, THUMBNAIL))

    def whole(self, sample: int, reference: int | None = None) -> bytes | None:
        """A JPEG of the whole picture, or of a reference, of at most `WHOLE` pixels a side; `None` as above."""
        return self._memory.get(("whole", sample, reference), lambda: self._small(sample, reference, WHOLE))

    def view(self, sample: int, view: int) -> bytes | None:
        """The bucket's pixels as training sees them, a PNG; `None` as above."""
        def make() -> bytes | None:
            row = self.describe(sample)
            picture = self._originals.picture(row)
            if picture is None:
                return None
            samples = self._opened.samples
            place = samples.placement(int(samples.view_offsets[sample]) + view, tuple(row["bucket"]))
            return encode_png(scale_and_crop(picture, place))

        return self._memory.get(("view", sample, view), make)

    def mask(self, sample: int, view: int, *, shade: bool) -> bytes | None:
        """A view's mask as it is stored, a gray PNG of latent cells, or of their pixels; `shade`: red where nothing
        trains, else clear.

        `None` for a view without a mask, or with one that cannot be read.
        """
        def make() -> bytes | None:
            row = read_values(self._reader, self.describe(sample)["views"][view]["mask"], "mask")
            if row is None:
                return None
            cells = mask_picture(row)
            return encode_shade(cells) if shade else encode_png(cells)

        return self._memory.get(("mask", sample, view, shade), make)

    def channel(self, sample: int, view: int, channel: int) -> bytes | None:
        """One channel of a view's latent as a gray PNG, from its lowest value (black) to its highest (white)."""
        def make() -> bytes | None:
            latent = self.latent(sample, view)
            return None if latent is None or channel >= len(latent) else encode_png(_gray(latent[channel]))

        return self._memory.get(("latent", sample, view, channel), make)

    def decoded(self, sample: int, view: int, reference: int | None, decode: Callable[[Array], bytes]) -> bytes | None:
        """The picture that `decode` makes of the latent of a view, or of a reference of it; `None` if the latent cannot
        be read."""
        def make() -> bytes | None:
            latent = self.latent(sample, view, reference)
            return None if latent is None else decode(latent)

        return self._memory.get(("decoded", sample, view, reference), make)

    def latent(self, sample: int, view: int, reference: int | None = None) -> Array | None:
        """float32 [C, h, w], as stored; `None` if it cannot be read (`prep verify` says why)."""
        described = self.describe(sample)["views"][view]
        row = described if reference is None else described["references"][reference]
        return read_values(self._reader, row["latent"], "latent")

    def _small(self, sample: int, reference: int | None, side: int) -> bytes | None:
        row = self.describe(sample)
        picture = self._originals.picture(row, reference=None if reference is None else references_of(row)[reference])
        return None if picture is None else encode_jpeg(shrink(picture, side))


def statistics(latent_Chw: Array) -> list[Channel]:
    """Each channel's range, mean and standard deviation."""
    channels = []
    for channel in latent_Chw.astype(np.float64):
        good = channel[np.isfinite(channel)]
        low, high, mean, std = (good.min(), good.max(), good.mean(), good.std()) if len(good) else (np.nan,) * 4
        channels.append(Channel(low=float(low), high=float(high), mean=float(mean), std=float(std),
                                bad=channel.size - len(good)))
    return channels


def _gray(channel_hw: Array) -> Array:
    """uint8 [h, w]: the lowest finite value is 0, the highest 255; what is not finite is 0."""
    finite = np.isfinite(channel_hw)
    low, high = (channel_hw[finite].min(), channel_hw[finite].max()) if finite.any() else (0.0, 0.0)
    scaled = (np.where(finite, channel_hw, low).astype(np.float64) - low) * (255 / (high - low) if high > low else 0)
    return np.rint(scaled).astype(np.uint8)
