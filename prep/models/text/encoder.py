"""Encodes captions with the pipeline's own `encode_prompt`, so that training sees what inference sees.

Denoiser and VAE are not loaded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import torch

from prep.errors import ModelError, Problem, first_line
from prep.models.device.compiling import Compiler, is_whole
from prep.models.device.memory import FittingBatches
from prep.models.device.offload import EncoderPlacement
from prep.models.family import ATTENTION_MASK, TOKEN, Family, Shape, TextOptions, TextRow
from prep.models.files import FETCH_AGAIN, Model
from prep.models.fingerprint import Expected, digest_text, text_files
from prep.models.tensors import DTYPES, finite_rows, pick_device, stored
from prep.models.text.pipeline import assemble, encoder_configs, load_encoder, spoken, tokenizers_of
from prep.models.text.quantization import most_captions, require_library
from prep.models.text.swapping import Encoders
from prep.models.text.tokenizer import without_panics

CAPTION = "a caption in the text encoder"  # in messages
TextBatch = tuple[Sequence[str], bool]  # captions, and whether they are negative prompts
Arrays = dict[str, np.ndarray[Any, Any]]  # name of the field's array → one row


class TextEncoder:
    """A pipeline's tokenizers and text encoders; of several encoders one is in memory at a time."""

    def __init__(self, model: Model, family: Family, options: TextOptions, *, device: str, compute: str, dtype: str,
                 expected: Expected | None = None, memory: int | None = None,
                 compiled: bool = False, first: Iterable[TextBatch] = ()) -> None:
        """`memory` limits the bytes of weights on the device; `first` are the batches that will be encoded first.

        Raises `OutOfMemoryError`, `ModelError`, also if the files do not match the `expected` fingerprint, and
        `UsageError` without the library that quantizes.
        """
        require_library(options.quantization)
        self._model, self._family, self._options, self._dtype = model, family, options, dtype
        self._device = pick_device(device)
        self.placement = EncoderPlacement(self._device, memory, compute)
        self.batches = FittingBatches(self._device, compute, most=most_captions(options.quantization))
        self.compiler = Compiler(wanted=compiled and options.quantization == "none")
        self._prepared: set[tuple[tuple[str, ...], bool]] = set()
        files = text_files(model)

        self.loading = 0.0  # seconds that loading encoders has taken so far

        def load(name: str) -> Any:
            begun = time.monotonic()
            self.compiler.release(self._device)
            loaded = load_encoder(model, family, name, files, DTYPES[compute], options.quantization)
            if expected is not None:
                expected.require(digest_text(files, expected.file_digest), f"the text encoder of {model}")
            placed = self.placement.place(loaded, spoken(name))
            if is_whole(placed, self._device):
                self.compiler.apply(placed, f"the {spoken(name)}")
            self.loading += time.monotonic() - begun
            return placed

        configs = encoder_configs(model, family, files) if len(files.encoders) > 1 else {}
        self._encoders = Encoders(list(files.encoders), load, configs, DTYPES[compute], self._device)
        tokenizers = tokenizers_of(model, family, files)
        self._pipeline = assemble(model, family, {**self._encoders.parts, **tokenizers})
        self.shapes: Mapping[str, Shape] = self._probe(model, first)

    def _probe(self, model: Model, first: Iterable[TextBatch]) -> Mapping[str, Shape]:
        """Prepares the batches, and returns the shapes of a row's arrays. Raises as `__init__` does."""
        try:
            with torch.inference_mode(), without_panics(model):
                self.prepare(first)
                row = self.batches.one(self._negative, CAPTION)
        except Problem:
            raise
        except Exception as error:  # some faulty configs fail only here
            raise ModelError(f"the text encoder in {model / 'text_encoder'} cannot encode a caption: "
                             f"{first_line(error)}", hint=FETCH_AGAIN) from None
        return {name: tuple(array.shape) for name, array in row.items()}

    @torch.inference_mode()
    def prepare(self, batches: Iterable[TextBatch]) -> None:
        """Prepares to encode these batches, as many as fit, so that no encoder is loaded for each of them.

        Does nothing if the first one is prepared, or if there is but one encoder.
        """
        if len(self._encoders.names) == 1:
            return
        coming = ((tuple(captions), negative) for captions, negative in batches)
        begin = next(coming, None)
        if begin is None or begin in self._prepared:
            return
        taken: list[tuple[tuple[str, ...], bool] | None] = []  # each work's batch; None before the last of the batch

        def works() -> Iterator[Callable[[], Any]]:
            yield self._call_negative
            for captions, negative in chain([begin], coming):
                parts, call = self.batches.parts(captions), partial(self._call, negative=negative)
                taken.extend([*[None] * (len(parts) - 1), (captions, negative)])
                yield from (partial(self.batches.run, part, call, CAPTION) for part in parts)

        count = self._encoders.prepare(works(), least=2)  # no prompt, and the first batch
        self._prepared = {batch for batch in taken[:count - 1] if batch is not None}

    @torch.inference_mode()
    def encode(self, captions: Sequence[str], tokens: int | None = None, *,
               negative: bool = False) -> list[Arrays | None]:
        """One row per caption, or `negative` prompt; `None` if it is not finite even in float32.

        Trimmed rows are padded with zeros to `tokens`, and have an attention mask: 1 for text, 0 for padding. A batch
        that does not fit into the device's memory is halved. Raises `OutOfMemoryError` if one caption does not fit.
        """
        with without_panics(self._model):
            rows = self.batches.run(list(captions), lambda texts: self._forward(texts, negative, tokens), CAPTION)
        return [self._stored_row(row, tokens)
                or self._again(partial(self._forward, [caption], negative, tokens), tokens)
                for caption, row in zip(captions, rows, strict=True)]

    @torch.inference_mode()
    def encode_seen(self, caption: str | None, pictures: Sequence[Any], tokens: int | None = None) -> Arrays | None:
        """One row, of a caption or no prompt, with the pictures (uint8 [H, W, 3]) that the encoder sees; as above."""
        vision = self._family.text.vision
        assert vision is not None, "other families have no such rows"

        def forward() -> list[TextRow]:
            return _on_host([self._encoders.run(lambda: vision.encode(
                self._pipeline, caption, pictures, self._options, self._device))])

        row = self.batches.one(forward, CAPTION)
        return self._stored_row(row, tokens) or self._again(forward, tokens)

    @torch.inference_mode()
    def unconditional(self, tokens: int | None = None) -> Arrays | None:
        """The row that the pipeline itself uses without a negative prompt; `None` as for captions."""
        row = self.batches.one(self._negative, CAPTION)
        return self._stored_row(row, tokens) or self._again(self._negative, tokens)

    def _again(self, forward: Callable[[], Sequence[TextRow]], tokens: int | None) -> Arrays | None:
        """A row computed in float32."""
        row = self.batches.one(lambda: self._in_float32(forward), f"{CAPTION} in float32")
        return self._stored_row(row, tokens)

    def _in_float32(self, forward: Callable[[], Sequence[TextRow]]) -> Sequence[TextRow]:
        with self._encoders.in_float32():
            return forward()

    def _stored_row(self, row: TextRow, tokens: int | None) -> Arrays | None:
        """The row as stored, or `None` if it is not finite."""
        if not all(finite_rows(value[None], self._dtype)[0] for value in row.values()):
            return None
        if self._family.text.layout == "trimmed":
            return _padded(row, self._family, self._dtype, tokens)
        return {name: stored(value[None], self._dtype)[0] for name, value in row.items()}

    def _forward(self, captions: Sequence[str], negative: bool, tokens: int | None) -> Sequence[TextRow]:
        return _on_host(self._encoders.run(partial(self._call, captions, negative=negative, tokens=tokens)))

    def _negative(self) -> Sequence[TextRow]:
        return _on_host([self._encoders.run(self._call_negative)])

    def _call(self, captions: Sequence[str], *, negative: bool, tokens: int | None = None) -> Sequence[TextRow]:
        options = self._options
        if tokens is not None and self._family.text.padding_masked:  # no caption of the group is longer
            options = replace(options, max_length=min(tokens, options.max_length))
        # A copy, because some pipelines write their template into the list.
        return self._family.text.encode_texts(self._pipeline, list(captions), options, self._device, negative=negative)

    def _call_negative(self) -> TextRow:
        return self._family.text.unconditional(self._pipeline, self._options, self._device)


def _on_host(rows: Sequence[TextRow]) -> list[TextRow]:
    return [{name: value.float().cpu() for name, value in row.items()} for row in rows]


def _padded(row: TextRow, family: Family, dtype: str, tokens: int | None) -> Arrays:
    """A trimmed row as stored: padded with zeros to `tokens`, and its attention mask."""
    arrays: Arrays = {}
    for name, value in row.items():
        axis = family.text.arrays[name].index(TOKEN) if TOKEN in family.text.arrays[name] else None
        if axis is not None:
            length = value.shape[axis]
            target = length if tokens is None else tokens
            assert length <= target, f"{name} has {length} tokens, more than its group's {target}"
            shape = [*value.shape[:axis], target - length, *value.shape[axis + 1:]]
            value = torch.cat([value, value.new_zeros(shape)], dim=axis)
            arrays[ATTENTION_MASK] = (np.arange(target) < length).astype(np.uint8)
        arrays[name] = stored(value[None], dtype)[0]
    return arrays
