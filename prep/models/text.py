"""Text rows through the pipeline's own `encode_prompt`, loaded without denoiser and VAE: training sees what inference
sees.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import StableDiffusionPipeline

from prep.errors import ModelError, first_line
from prep.models.arrays import DTYPES, finite_rows, stored
from prep.models.device import pick_device

Arrays = dict[str, np.ndarray[Any, Any]]  # name of the field's array → one row


class TextEncoder:
    """A pipeline's tokenizer and text encoder on their device."""

    def __init__(self, model: Path, *, device: str, compute: str, dtype: str) -> None:
        self._device, self._dtype = pick_device(device), dtype
        self._pipeline = _load(model).to(self._device, DTYPES[compute])
        self._pipeline.set_progress_bar_config(disable=True)

    @torch.inference_mode()
    def encode(self, captions: Sequence[str]) -> list[Arrays | None]:
        """One row of `hidden` [token, channel] per caption; `None` where it is not finite even in float32."""
        rows = self._forward(list(captions))
        result: list[Arrays | None] = [{"hidden": row} for row in stored(rows, self._dtype)]
        for number, fine in enumerate(finite_rows(rows, self._dtype)):
            if not fine:
                result[number] = self._again(captions[number])
        return result

    @torch.inference_mode()
    def unconditional(self) -> Arrays:
        """The row that the pipeline itself takes when it is given no negative prompt."""
        _, negative = self._pipeline.encode_prompt("", self._device, 1, True)
        return {"hidden": stored(negative.float().cpu(), self._dtype)[0]}

    def _again(self, caption: str) -> Arrays | None:
        usual = self._pipeline.text_encoder.dtype
        self._pipeline.text_encoder.to(torch.float32)
        row = self._forward([caption])
        self._pipeline.text_encoder.to(usual)
        return {"hidden": stored(row, self._dtype)[0]} if finite_rows(row, self._dtype)[0] else None

    def _forward(self, captions: list[str]) -> torch.Tensor:
        hidden_BLD, _ = self._pipeline.encode_prompt(captions, self._device, 1, False)
        rows: torch.Tensor = hidden_BLD.float().cpu()
        return rows


def _load(model: Path) -> Any:
    try:
        return StableDiffusionPipeline.from_pretrained(  # type: ignore[no-untyped-call]
            model, vae=None, unet=None, safety_checker=None, feature_extractor=None, image_encoder=None,
            requires_safety_checker=False, use_safetensors=True, local_files_only=True,
            low_cpu_mem_usage=False)
    except Exception as error:  # broken files make the libraries raise nearly everything, SafetensorError for one
        raise ModelError(f"cannot load tokenizer and text encoder of {model}: {first_line(error)}") from None
