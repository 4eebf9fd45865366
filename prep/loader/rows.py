"""Reads rows of an index into the buffers of a batch, and checks their shape and dtype.

B samples; no other dimension matters here.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from prep.cache.reader import Reader, RowTargets
from prep.cache.records import RowRef
from prep.cache.remote.quota import NotFetched
from prep.errors import CacheError
from prep.fs.remote.errors import StoreError
from prep.loader.draws import NO_TEXT, BatchRequest, Draw
from prep.loader.index import Index
from prep.manifest.consistency import row_shapes
from prep.models.family import ATTENTION_MASK, TOKEN
from prep.models.fields import STD

DTYPES: Mapping[str, torch.dtype] = {
    "bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class RowPlaces:
    """The places of a batch's rows."""

    latents: Sequence[RowRef]
    texts: Sequence[RowRef]
    masks: Sequence[RowRef | None]  # None: all ones
    drawn: Sequence[RowRef]  # the latents that are drawn from their posterior
    references: Sequence[Sequence[RowRef]] = ()  # the latents of the first reference of each draw, of the second, …

    @property
    def read(self) -> Iterator[RowRef]:
        """All of them."""
        yield from self.latents
        yield from self.texts
        yield from (place for place in self.masks if place is not None)
        for places in self.references:
            yield from places


class Rows:
    """The places and values of an index's rows."""

    def __init__(self, index: Index) -> None:
        self.index = index
        self.reader = Reader(index.cache)

    def until(self, stop: threading.Event) -> Rows:
        """The same rows, read by `Reader.until`."""
        same = copy.copy(self)
        same.reader = self.reader.until(stop)
        return same

    def places(self, draws: Sequence[Draw], *, masked: bool) -> RowPlaces:
        """The places of the rows of `draws`; without masks, unless `masked` or the model is given them."""
        samples, view = self.index.samples, np.array([draw.view for draw in draws], np.int64)
        views, latents = samples.views, self.index.refs(samples.views["latent_shard"][view],
                                                        samples.views["latent_row"][view])
        masks: list[RowRef | None] = []
        if masked or self.index.inpaints:
            shards = views["mask_shard"][view]
            mask_refs = iter(self.index.refs(shards[shards >= 0], views["mask_row"][view][shards >= 0]))
            masks = [next(mask_refs) if has else None for has in (shards >= 0).tolist()]
        text = np.array([draw.text for draw in draws], np.int64)
        empty = text == NO_TEXT
        texts = self.index.refs(samples.texts["shard"][text], samples.texts["row"][text])
        for place in np.flatnonzero(empty).tolist():
            texts[place] = self.index.unconditional(draws[place].sample)
        shown = np.array([draw.references for draw in draws], np.int64)  # [B, R]: a batch has as many for each draw
        references = [self.index.refs(samples.references["latent_shard"][column],
                                      samples.references["latent_row"][column]) for column in shown.T]
        return RowPlaces(latents=latents, texts=texts, masks=masks, references=references,
                         drawn=[ref for draw, ref in zip(draws, latents, strict=True) if draw.posterior is not None])

    def reference_shapes(self, draw: Draw) -> list[tuple[int, ...]]:
        """The shape of the latent of each reference that a draw is shown with."""
        index = self.index
        sizes = index.manifest.shapes[int(index.samples.bucket[draw.sample])][1]
        return [row_shapes(index.manifest, index.shards, "latent", sizes[place])["latent"] for place in draw.kept]

    def fill(self, out: Tensor, field: str, array: str, refs: Sequence[RowRef | None],
             targets: RowTargets | None = None) -> None:
        """Fills `out` [B, …] from B places; a row without a place is unchanged. `targets` is `split(out)`, if known.

        Raises `CacheError` if a shard's rows differ from `out` in shape or dtype.
        """
        present = [ref for ref in refs if ref is not None]
        for shard in {ref.shard for ref in present}:
            spec, _ = self.reader.array_info(shard, array)
            if spec.shape != tuple(out.shape[1:]) or DTYPES[spec.dtype] != out.dtype:
                expected = str(out.dtype).removeprefix("torch.")
                raise CacheError(f"shard {shard}, array '{array}' has rows {list(spec.shape)} {spec.dtype}, expected "
                                 f"{field} rows {list(out.shape[1:])} {expected}",
                                 hint="check the cache: prep verify MANIFEST")
        if targets is None:
            targets = split(out)
        if len(present) < len(refs):
            targets = targets.only(place for place, ref in enumerate(refs) if ref is not None)
        self.reader.read_batch(targets, array, present)

    def tokens(self, refs: Iterable[RowRef]) -> list[int] | None:
        """The tokens of each text row; `None` if all rows of the family have the same. Raises `CacheError`."""
        if ATTENTION_MASK not in self.index.manifest.fields["text"].arrays:
            return None
        return [self.reader.array_info(ref.shard, ATTENTION_MASK)[0].shape[0] for ref in refs]

    def text_shapes(self, tokens: Sequence[int] | None) -> dict[str, tuple[int, ...]]:
        """The shape of each array of text for rows with so many tokens: that of the longest of them."""
        shapes = dict(self.index.text_shapes)
        if tokens is None:
            return shapes
        arrays = self.index.manifest.fields["text"].arrays
        return {name: tuple(max(tokens) if dim == TOKEN else side
                            for dim, side in zip(arrays[name]["dims"], shape, strict=True))
                for name, shape in shapes.items()}

    def fill_text(self, out: Mapping[str, Tensor], refs: Sequence[RowRef], tokens: Sequence[int] | None,
                  targets: Mapping[str, RowTargets] | None = None) -> None:
        """Fills every array of text [B, …] from B places. Shorter rows are padded with zeros, also in their mask.

        `tokens` is `self.tokens(refs)`. Raises `CacheError`.
        """
        for name, tensor in out.items():
            split_into = split(tensor) if targets is None else targets[name]
            dims = self.index.manifest.fields["text"].arrays[name]["dims"]
            if tokens is None or TOKEN not in dims or len(set(tokens)) == 1:
                self.fill(tensor, "text", name, refs, split_into)
                continue
            assert dims[0] == TOKEN, "a row's tokens are its first dimension, so a shorter row is a prefix"
            tensor.zero_()
            token_bytes = tensor[0, 0].numel() * tensor.itemsize
            self.reader.read_batch(split_into.cut([count * token_bytes for count in tokens]), name, refs)

    def text(self, refs: Sequence[RowRef]) -> dict[str, Tensor]:
        """The arrays of text rows, `[B, …]` each, in new memory, for sampling."""
        tokens = self.tokens(refs)
        out = {name: torch.empty((len(refs), *shape), dtype=self.text_dtype(name))
               for name, shape in self.text_shapes(tokens).items()}
        self.fill_text(out, refs, tokens)
        return out

    def latent(self, ref: RowRef) -> Tensor:
        """A latent `[1, C, h, w]` as it is stored, in new memory, for sampling. Raises `CacheError`."""
        spec, _ = self.reader.array_info(ref.shard, "latent")
        row = torch.empty((1, *spec.shape), dtype=DTYPES[spec.dtype])
        self.fill(row, "latent", "latent", [ref])
        return row

    def mask(self, ref: RowRef) -> Tensor:
        """A mask `[1, M, h, w]`, uint8, in new memory, for sampling. Raises `CacheError`."""
        spec, _ = self.reader.array_info(ref.shard, "mask")
        row = torch.empty((1, *spec.shape), dtype=DTYPES[spec.dtype])
        self.fill(row, "mask", "mask", [ref])
        return row

    def text_dtype(self, array: str) -> torch.dtype:
        """The dtype of an array of text."""
        return DTYPES[str(self.index.manifest.fields["text"].arrays[array]["dtype"])]

    def not_finite(self, draws: Iterable[Draw]) -> list[tuple[str, Draw, RowRef]]:
        """The latent and text rows of `draws` with values that are not finite: (field, draw, place)."""
        faulty: list[tuple[str, Draw, RowRef]] = []
        for draw in draws:
            bucket = int(self.index.samples.bucket[draw.sample])
            dtype = DTYPES[str(self.index.manifest.fields["latent"].arrays["latent"]["dtype"])]
            places = self.places([draw], masked=False)
            place, of_text = places.latents[0], places.texts[0]
            shown = [(place, array, shape) for array, shape in self.index.shape("latent", bucket).items()]
            shown += [(of_reference, "latent", shape) for (of_reference,), shape in zip(
                places.references, self.reference_shapes(draw), strict=True)]
            for at, array, shape in shown:
                row = torch.empty((1, *shape), dtype=dtype)
                self.fill(row, "latent", array, [at])
                if not row.isfinite().all():
                    faulty.append(("latent", draw, at))
                    break
            text = self.text([of_text])
            if not all(each.isfinite().all() for each in text.values()):
                faulty.append(("text", draw, of_text))
        return faulty

    def shards_of(self, request: BatchRequest, masked: bool) -> set[str]:
        """The shards that have a request's rows."""
        places = self.places(request.draws, masked=masked)
        return {ref.shard for ref in places.read}

    def advise(self, places: RowPlaces) -> None:
        """Hints to the kernel which rows come soon; ignores missing or damaged rows, which reading will report.

        Raises `StoreError` and `NotFetched` for shards that have no copy here and get none.
        """
        try:
            for latents in (places.latents, *places.references):
                self.reader.advise("latent", latents)
            self.reader.advise(STD, places.drawn)
            for name in self.index.text_shapes:
                self.reader.advise(name, places.texts)
            self.reader.advise("mask", [ref for ref in places.masks if ref is not None])
        except (StoreError, NotFetched):  # another try would wait as long as this one
            raise
        except CacheError:
            pass


def split(out: Tensor) -> RowTargets:
    """A contiguous CPU tensor [B, …] as targets for the reader."""
    return RowTargets(out.view(len(out), -1).view(torch.uint8).numpy())
