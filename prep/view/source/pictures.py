"""The pictures of a source for the pages: each is made from the file that was surveyed, or not at all."""

from __future__ import annotations

from prep.fs.blob import Blob
from prep.geometry import Size
from prep.parse import KEPT, REFUSED
from prep.scan.protocol import BlobMessage
from prep.view.memory import Memory
from prep.view.pictures import THUMBNAIL, WHOLE
from prep.view.source.state import SourceSet
from prep.view.source.survey import mask_of
from prep.view.source.worker import MAKE, PAINT, SERVICE, Painted, PictureRequest
from prep.workers.pool import WorkerLost, WorkerPool
from prep.workers.service import DECODING


class SourcePictures:
    """The pictures of a source's samples. Threads may share it."""

    def __init__(self, source: SourceSet, memory: Memory) -> None:
        self._source, self._memory = source, memory
        self._pool = WorkerPool(SERVICE)

    def close(self) -> None:
        """Ends the workers."""
        self._pool.close()

    def thumbnail(self, sample: int, reference: int | None = None) -> bytes | None:
        """A small JPEG of the whole picture, or of a reference, or `UNDECODABLE`; `None` if it is missing or has
        changed."""
        return self._small(sample, reference, THUMBNAIL)

    def whole(self, sample: int, reference: int | None = None) -> bytes | None:
        """A JPEG of the whole picture, or of a reference, of at most `WHOLE` pixels a side; `UNDECODABLE` or `None` as
        above."""
        return self._small(sample, reference, WHOLE)

    def view(self, sample: int, view: int) -> bytes | None:
        """The bucket's pixels as training would see them, a PNG; `UNDECODABLE` or `None` as above."""
        item = self._source.state.seats[sample].item
        return self._placed("view", sample, view, item.item.picture, item.picture)

    def mask(self, sample: int, view: int, *, shade: bool) -> bytes | None:
        """A view's mask in pixels of the bucket; `shade`: red where nothing trains, else clear. `None` for a view
        without a mask, and for one that is missing, has changed or cannot be decoded."""
        state = self._source.state
        item = state.seats[sample].item
        blob = mask_of(state.survey.recipe, item)
        what = "shade" if shade else "cells"
        if blob is None and state.survey.recipe.draws_mask(item.item.source):
            return self._placed(f"drawn {what}", sample, view, item.item.picture, item.picture)
        return None if blob is None else self._placed(what, sample, view, blob, item.mask or item.picture)

    def painted(self, sample: int, side: int) -> bytes | None:
        """The whole mask, a gray PNG of at most `side` pixels a side; `None` as in `mask`."""
        state = self._source.state
        item = state.seats[sample].item
        blob = mask_of(state.survey.recipe, item)
        if blob is None or item.mask is None:
            return None
        return self._made(PictureRequest("paint", BlobMessage.of(blob), item.mask, side=side))

    def mask_file(self, data: bytes, size: Size) -> bytes | None:
        """A painted mask as a gray PNG of the picture's size; `None` if it is no PNG of that shape."""
        try:
            (made,) = self._pool.ask(PAINT, Painted(data, size), DECODING)
        except WorkerLost:
            return None
        return made or None

    def _small(self, sample: int, reference: int | None, side: int) -> bytes | None:
        item = self._source.state.seats[sample].item
        blob, digest = item.item.picture, item.picture
        if reference is not None:
            blob, digest = item.references[reference].blob, item.references[reference].picture
        return self._made(PictureRequest("small", BlobMessage.of(blob), digest, self._alpha, side))

    def _placed(self, what: str, sample: int, view: int, blob: Blob, digest: str) -> bytes | None:
        place = self._source.state.seats[sample].views[view]
        transparency = self._source.state.survey.recipe.mask_origin == "alpha"
        return self._made(PictureRequest(what, BlobMessage.of(blob), digest, self._alpha, 0, place.scaled, place.crop,
                                         place.bucket, place.flip, transparency))

    @property
    def _alpha(self) -> str:
        alpha = self._source.state.survey.recipe.image.alpha
        return "white" if alpha in (KEPT, REFUSED) else alpha

    def _made(self, wanted: PictureRequest) -> bytes | None:
        def make() -> bytes | None:
            try:
                (made,) = self._pool.ask(MAKE, wanted, DECODING)
                return made or None
            except WorkerLost:
                return None

        return self._memory.get(wanted, make)
