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
from prep.models.family import ATTENTION_MASK, TOKEN
from prep.models.fields import STD

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
                  targets: Mapping[str, Targets] | None = None) -> None:
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

    def text_dtype(self, array: str) -> torch.dtype:
        """The dtype of an array of text."""
        return DTYPES[str(self.index.manifest.fields["text"].arrays[array]["dtype"])]

    def not_finite(self, shots: Iterable[Draw]) -> list[tuple[str, Draw, RowRef]]:
        """The latent and text rows of `shots` with values that are not finite: (field, shot, place)."""
        found: list[tuple[str, Draw, RowRef]] = []
        for shot in shots:
            bucket = int(self.index.samples.bucket[shot.sample])
            dtype = DTYPES[str(self.index.manifest.fields["latent"].arrays["latent"]["dtype"])]
            place = self.latent_ref(shot)
            for array, shape in self.index.shape("latent", bucket).items():
                row = torch.empty((1, *shape), dtype=dtype)
                self.fill(row, "latent", array, [place])
                if not row.isfinite().all():
                    found.append(("latent", shot, place))
                    break
            text = self.text([self.text_ref(shot)])
            if not all(each.isfinite().all() for each in text.values()):
                found.append(("text", shot, self.text_ref(shot)))
        return found

    def shards_of(self, request: BatchRequest, masked: bool) -> set[str]:
        """The shards that have a request's rows."""
        places: list[RowRef | None] = [*map(self.latent_ref, request.shots), *map(self.text_ref, request.shots)]
        return {ref.shard for ref in (*places, *(map(self.mask_ref, request.shots) if masked else ())) if ref}

    def advise(self, request: BatchRequest, masked: bool) -> None:
        """Hints to the kernel which rows come soon; ignores missing or damaged rows, which reading will report."""
        with suppress(CacheError):
            drawn = [shot for shot in request.shots if shot.posterior is not None]
            self.reader.advise("latent", [self.latent_ref(shot) for shot in request.shots])
            self.reader.advise(STD, [self.latent_ref(shot) for shot in drawn])
            for name in self.index.text_shapes:
                self.reader.advise(name, [self.text_ref(shot) for shot in request.shots])
            if masked:
                self.reader.advise("mask", [ref for shot in request.shots if (ref := self.mask_ref(shot))])


def split(out: Tensor) -> Targets:
    """A contiguous CPU tensor [B, …] as targets for the reader."""
    return Targets(out.view(len(out), -1).view(torch.uint8).numpy())
