"""Encodes captions with the pipeline's own `encode_prompt`, so that training sees what inference sees.

Denoiser and VAE are not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from prep.errors import ModelError, OutOfMemoryError, first_line
from prep.models.device.memory import FittingBatches, move
from prep.models.family import ATTENTION_MASK, TOKEN, Family, Shape, TextOptions, TextRow
from prep.models.files import FETCH_AGAIN
from prep.models.fingerprint import Expected, digest_text, text_files
from prep.models.tensors import DTYPES, finite_rows, pick_device, stored
from prep.models.text.pipeline import load_text_pipeline

CAPTION = "a caption in the text encoder"  # in messages
Arrays = dict[str, np.ndarray[Any, Any]]  # name of the field's array → one row


class TextEncoder:
    """A pipeline's tokenizers and text encoders on their device."""

    def __init__(self, model: Path, family: Family, options: TextOptions, *, device: str, compute: str, dtype: str,
                 expected: Expected | None = None) -> None:
        """Raises `OutOfMemoryError`, and `ModelError`, also if the files do not match the `expected` fingerprint."""
        self._family, self._options, self._device, self._dtype = family, options, pick_device(device), dtype
        files = text_files(model)
        self.batches = FittingBatches(self._device, compute)
        loaded = load_text_pipeline(model, family, files, DTYPES[compute])
        self._pipeline = move(loaded, self._device, "the text encoder", compute)
        self._encoders = [getattr(self._pipeline, name) for name in files.encoders]
        if expected is not None:
            expected.require(digest_text(files, expected.file_digest), f"the text encoder of {model}")
        try:
            with torch.inference_mode():
                row = self.batches.one(self._negative, CAPTION)
        except OutOfMemoryError:
            raise
        except Exception as error:  # some faulty configs fail only here
            raise ModelError(f"the text encoder in {model / 'text_encoder'} cannot encode a caption: "
                             f"{first_line(error)}", hint=FETCH_AGAIN) from None
        self.shapes: Mapping[str, Shape] = {name: tuple(array.shape) for name, array in row.items()}

    @torch.inference_mode()
    def encode(self, captions: Sequence[str], tokens: int | None = None, *,
               negative: bool = False) -> list[Arrays | None]:
        """One row per caption, or `negative` prompt; `None` if it is not finite even in float32.

        Trimmed rows are padded with zeros to `tokens`, and have an attention mask: 1 for text, 0 for padding. A batch
        that does not fit into the device's memory is halved. Raises `OutOfMemoryError` if one caption does not fit.
        """
        rows = self.batches.run(list(captions), lambda texts: self._forward(texts, negative), CAPTION)
        return [self._kept(row, tokens) or self._again(partial(self._forward, [caption], negative), tokens)
                for caption, row in zip(captions, rows, strict=True)]

    @torch.inference_mode()
    def unconditional(self, tokens: int | None = None) -> Arrays | None:
        """The row that the pipeline itself uses without a negative prompt; `None` as for captions."""
        row = self.batches.one(self._negative, CAPTION)
        return self._kept(row, tokens) or self._again(self._negative, tokens)

    def _again(self, forward: Callable[[], Sequence[TextRow]], tokens: int | None) -> Arrays | None:
        """A row computed in float32."""
        row = self.batches.one(lambda: self._in_float32(forward), f"{CAPTION} in float32")
        return self._kept(row, tokens)

    def _in_float32(self, forward: Callable[[], Sequence[TextRow]]) -> Sequence[TextRow]:
        usual = [encoder.dtype for encoder in self._encoders]
        try:
            for encoder in self._encoders:
                encoder.to(torch.float32)
            return forward()
        finally:
            for encoder, dtype in zip(self._encoders, usual, strict=True):
                encoder.to(dtype)

    def _kept(self, row: TextRow, tokens: int | None) -> Arrays | None:
        """The row as stored, or `None` if it is not finite."""
        if not all(finite_rows(value[None], self._dtype)[0] for value in row.values()):
            return None
        if self._family.text.layout == "trimmed":
            return _padded(row, self._family, self._dtype, tokens)
        return {name: stored(value[None], self._dtype)[0] for name, value in row.items()}

    def _forward(self, captions: list[str], negative: bool) -> Sequence[TextRow]:
        # A copy, because some pipelines write their template into the list.
        return _on_host(self._family.text.encode_texts(self._pipeline, list(captions), self._options, self._device,
                                                       negative=negative))

    def _negative(self) -> Sequence[TextRow]:
        return _on_host([self._family.text.unconditional(self._pipeline, self._options, self._device)])


def _on_host(rows: Sequence[TextRow]) -> list[TextRow]:
    return [{name: value.float().cpu() for name, value in row.items()} for row in rows]


def _padded(row: TextRow, family: Family, dtype: str, tokens: int | None) -> Arrays:
    """A trimmed row as stored: padded with zeros to `tokens`, and its attention mask."""
    found: Arrays = {}
    for name, value in row.items():
        axis = family.text.arrays[name].index(TOKEN) if TOKEN in family.text.arrays[name] else None
        if axis is not None:
            length = value.shape[axis]
            wanted = length if tokens is None else tokens
            assert length <= wanted, f"{name} has {length} tokens, more than its group's {wanted}"
            shape = [*value.shape[:axis], wanted - length, *value.shape[axis + 1:]]
            value = torch.cat([value, value.new_zeros(shape)], dim=axis)
            found[ATTENTION_MASK] = (np.arange(wanted) < length).astype(np.uint8)
        found[name] = stored(value[None], dtype)[0]
    return found
