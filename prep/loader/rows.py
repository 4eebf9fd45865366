"""Reads rows of an index into the buffers of a batch, and checks their shape and dtype.

B samples; no other dimension matters here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from prep.cache.reader import Reader, Targets
from prep.cache.records import RowRef
from prep.errors import CacheError
from prep.loader.draws import NO_TEXT, BatchRequest, Draw
from prep.loader.index import Index

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8,
}  # fmt: skip


class Rows:
    """The places and values of an index's rows."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.reader = Reader(index.manifest.cache_root)
        self._unconditional = index.manifest.document["prompts"]["unconditional"]

    def latent_ref(self, shot: Draw) -> RowRef:
        """The place of a shot's latent."""
        views = self.index.samples.views
        return self.index.ref(int(views["latent_shard"][shot.view]), int(views["latent_row"][shot.view]))

    def mask_ref(self, shot: Draw) -> RowRef | None:
        """The place of a shot's mask; `None`: all ones."""
        views = self.index.samples.views
        shard = int(views["mask_shard"][shot.view])
        return None if shard < 0 else self.index.ref(shard, int(views["mask_row"][shot.view]))

    def text_ref(self, shot: Draw) -> RowRef:
        """The place of a shot's text."""
        if shot.text == NO_TEXT:
            return self.index.ref(self._unconditional["shard"], self._unconditional["row"])
        texts = self.index.samples.texts
        return self.index.ref(int(texts["shard"][shot.text]), int(texts["row"][shot.text]))

    def fill(self, out: Tensor, field: str, array: str, refs: Sequence[RowRef | None],
             targets: Targets | None = None) -> None:
        """Fills `out` [B, …] from B places; a row without a place is unchanged. `targets` is `split(out)`, if known.

        Raises `CacheError` if a shard's rows differ from `out` in shape or dtype.
        """
        found = [ref for ref in refs if ref is not None]
        for shard in {ref.shard for ref in found}:
            spec, _ = self.reader.array_info(shard, array)
            if spec.shape != tuple(out.shape[1:]) or DTYPES[spec.dtype] != out.dtype:
                wanted = str(out.dtype).removeprefix("torch.")
                raise CacheError(f"shard {shard}, array '{array}' has rows {list(spec.shape)} {spec.dtype}, expected "
                                 f"{field} rows {list(out.shape[1:])} {wanted}",
                                 hint="check the cache: prep verify MANIFEST")
        if targets is None:
            targets = split(out)
        if len(found) < len(refs):
            targets = targets.only(place for place, ref in enumerate(refs) if ref is not None)
        self.reader.read_batch(targets, array, found)

    def text(self, refs: Sequence[RowRef]) -> Tensor:
        """Text rows `[B, L, D]` in new memory, for sampling."""
        dtype = DTYPES[str(self.index.manifest.fields["text"].arrays["hidden"]["dtype"])]
        out = torch.empty((len(refs), *self.index.text_shapes["hidden"]), dtype=dtype)
        self.fill(out, "text", "hidden", refs)
        return out

    def not_finite(self, shots: Iterable[Draw]) -> list[tuple[str, Draw, RowRef]]:
        """The latent and text rows of `shots` with values that are not finite: (field, shot, place)."""
        found: list[tuple[str, Draw, RowRef]] = []
        for shot in shots:
            bucket = int(self.index.samples.bucket[shot.sample])
            for field, array, ref in (("latent", "latent", self.latent_ref(shot)),
                                      ("text", "hidden", self.text_ref(shot))):
                dtype = DTYPES[str(self.index.manifest.fields[field].arrays[array]["dtype"])]
                row = torch.empty((1, *self.index.shape(field, bucket)[array]), dtype=dtype)
                self.fill(row, field, array, [ref])
                if not row.isfinite().all():
                    found.append((field, shot, ref))
        return found

    def advise(self, request: BatchRequest, masked: bool) -> None:
        """Hints to the kernel which rows come soon; ignores missing or damaged rows, which reading will report."""
        with suppress(CacheError):
            self.reader.advise("latent", [self.latent_ref(shot) for shot in request.shots])
            self.reader.advise("hidden", [self.text_ref(shot) for shot in request.shots])
            if masked:
                self.reader.advise("mask", [ref for shot in request.shots if (ref := self.mask_ref(shot))])


def split(out: Tensor) -> Targets:
    """A contiguous CPU tensor [B, …] as targets for the reader."""
    return Targets(out.view(len(out), -1).view(torch.uint8).numpy())
