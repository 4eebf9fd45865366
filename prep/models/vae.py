"""Latents from pictures, through a pipeline's own `AutoencoderKL`: unscaled means of the posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

from prep.errors import ModelError, first_line
from prep.models.loading import refuse_holes
from prep.models.tensors import DTYPES, finite_rows, pick_device, stored

# Legend: B pictures, H W pixels, h w latent cells, C latent channels.


class VaeEncoder:
    """A VAE on its device; `encode` gives rows ready to be stored."""

    def __init__(self, model: Path, *, device: str, compute: str, dtype: str) -> None:
        self._device, self._dtype = pick_device(device), dtype
        self._vae = _load(model, DTYPES[compute]).to(self._device).eval()
        self._vae.requires_grad_(False)

    @torch.inference_mode()
    def encode(self, pixels_BHW3: np.ndarray[Any, np.dtype[np.uint8]]) -> list[np.ndarray[Any, Any] | None]:
        """One [C, h, w] row per picture, as stored; `None` where it is not finite even in float32.

        A picture that is not finite in the compute dtype is encoded again, alone, in float32.
        """
        rows = self._forward(pixels_BHW3, self._vae.dtype)
        retry = [number for number, fine in enumerate(finite_rows(rows, self._dtype)) if not fine]
        result: list[np.ndarray[Any, Any] | None] = [*stored(rows, self._dtype)]
        for number in retry:
            result[number] = self._again(pixels_BHW3[number:number + 1])
        return result

    def _again(self, pixels_1HW3: np.ndarray[Any, np.dtype[np.uint8]]) -> np.ndarray[Any, Any] | None:
        usual = self._vae.dtype
        self._vae.to(torch.float32)
        row = self._forward(pixels_1HW3, torch.float32)
        self._vae.to(usual)
        return stored(row, self._dtype)[0] if finite_rows(row, self._dtype)[0] else None

    def _forward(self, pixels_BHW3: np.ndarray[Any, np.dtype[np.uint8]], dtype: torch.dtype) -> torch.Tensor:
        image_B3HW = torch.from_numpy(pixels_BHW3).to(self._device).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        posterior = self._vae.encode(image_B3HW.to(dtype)).latent_dist
        mean_BChw: torch.Tensor = posterior.mean.float().cpu()
        return mean_BChw


def _load(model: Path, dtype: torch.dtype) -> Any:
    folder = model / "vae"
    try:
        vae, loaded = AutoencoderKL.from_pretrained(  # type: ignore[no-untyped-call]
            folder, use_safetensors=True, local_files_only=True, low_cpu_mem_usage=False, torch_dtype=dtype,
            output_loading_info=True, ignore_mismatched_sizes=True)
    except Exception as error:  # as for text encoders
        raise ModelError(f"cannot load the VAE in {folder}: {first_line(error)}") from None
    refuse_holes(loaded, folder)
    return vae
