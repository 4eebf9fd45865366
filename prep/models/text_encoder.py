"""Encodes captions with the pipeline's own `encode_prompt`, so that training sees what inference sees.

Denoiser and VAE are not loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from diffusers import StableDiffusionPipeline

from prep.errors import ModelError, first_line
from prep.models.components import class_of
from prep.models.files import FETCH_AGAIN
from prep.models.fingerprint import Expected, TextFiles, digest_text, text_files
from prep.models.loading import dtype_keyword, load_model, load_tokenizer
from prep.models.pipeline import pipeline_index
from prep.models.tensors import DTYPES, finite_rows, pick_device, stored

Arrays = dict[str, np.ndarray[Any, Any]]  # name of the field's array → one row


class TextEncoder:
    """A pipeline's tokenizer and text encoder on their device."""

    def __init__(self, model: Path, *, device: str, compute: str, dtype: str, expected: Expected | None = None) -> None:
        """Raises `ModelError`, also if the loaded files do not match the `expected` fingerprint."""
        self._device, self._dtype = pick_device(device), dtype
        files = text_files(model)
        self._pipeline = _load(model, files, DTYPES[compute]).to(self._device)
        if expected is not None:
            expected.require(digest_text(files, expected.file_digest), f"the text encoder of {model}")
        self._pipeline.set_progress_bar_config(disable=True)
        try:
            with torch.inference_mode():
                self.shape = tuple(self._negative().shape[1:])  # (tokens, channels) of a row
        except Exception as error:  # some faulty configs fail only here
            raise ModelError(f"the text encoder in {model / 'text_encoder'} cannot encode a caption: "
                             f"{first_line(error)}", hint=FETCH_AGAIN) from None

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[Arrays | None]:
        """One row of `hidden` [token, channel] per caption; `None` if it is not finite even in float32."""
        rows = self._forward(list(captions))
        result: list[Arrays | None] = [{"hidden": row} for row in stored(rows, self._dtype)]
        for number, fine in enumerate(finite_rows(rows, self._dtype)):
            if not fine:
                result[number] = self._again(partial(self._forward, [captions[number]]))
        return result

    @torch.inference_mode()
    def unconditional(self) -> Arrays | None:
        """The row that the pipeline itself uses without a negative prompt; `None` as for captions."""
        return self._kept(self._negative()) or self._again(self._negative)

    def _again(self, forward: Callable[[], torch.Tensor]) -> Arrays | None:
        usual = self._pipeline.text_encoder.dtype
        self._pipeline.text_encoder.to(torch.float32)
        row = forward()
        self._pipeline.text_encoder.to(usual)
        return self._kept(row)

    def _kept(self, row: torch.Tensor) -> Arrays | None:
        return {"hidden": stored(row, self._dtype)[0]} if finite_rows(row, self._dtype)[0] else None

    def _forward(self, captions: list[str]) -> torch.Tensor:
        hidden_BLD, _ = self._pipeline.encode_prompt(captions, self._device, 1, False)
        rows: torch.Tensor = hidden_BLD.float().cpu()
        return rows

    def _negative(self) -> torch.Tensor:
        _, negative_1LD = self._pipeline.encode_prompt("", self._device, 1, True)
        row: torch.Tensor = negative_1LD.float().cpu()
        return row


def _load(model: Path, files: TextFiles, dtype: torch.dtype) -> Any:
    """A pipeline with only text encoder and tokenizer; the encoder in `dtype`, whatever its config.json says."""
    index = pipeline_index(model)
    named = class_of(index, "text_encoder", model)
    if named != ("transformers", "CLIPTextModel"):
        raise ModelError(f"text_encoder in {model / 'model_index.json'} is {named}, expected a CLIPTextModel")
    options: dict[str, Any] = {dtype_keyword(transformers.__version__): dtype}
    encoder = load_model(transformers.CLIPTextModel, files.encoders["text_encoder"], "text encoder",
                         trust_remote_code=False, **options)
    tokenizer = load_tokenizer(class_of(index, "tokenizer", model)[1], files.tokenizers["tokenizer"])
    most, length = encoder.config.max_position_embeddings, tokenizer.model_max_length
    if length > most:
        raise ModelError(f"the tokenizer of {model} takes {length} tokens, its text encoder only {most}",
                         hint="set model_max_length in its tokenizer_config.json")
    return StableDiffusionPipeline(  # type: ignore[no-untyped-call]
        text_encoder=encoder, tokenizer=tokenizer, vae=None, unet=None, scheduler=None, safety_checker=None,
        feature_extractor=None, image_encoder=None, requires_safety_checker=False)
