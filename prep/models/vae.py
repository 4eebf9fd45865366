"""Encodes pictures to latents with the pipeline's own `AutoencoderKL`: unscaled means of the posterior."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL

from prep.errors import ModelError, first_line
from prep.models.files import FETCH_AGAIN
from prep.models.fingerprint import Expected, digest_vae, vae_files
from prep.models.loading import load_model
from prep.models.tensors import DTYPES, finite_rows, pick_device, stored

PROBE = 64  # pixels; side of the picture that a VAE is tested with

# Legend: B pictures, H W pixels, h w latent cells, C latent channels.


class VaeEncoder:
    """A VAE on its device; `encode` returns rows ready to store."""

    def __init__(self, model: Path, *, device: str, compute: str, dtype: str, expected: Expected | None = None) -> None:
        """Raises `ModelError`, also if the loaded files do not match the `expected` fingerprint."""
        self._device, self._dtype = pick_device(device), dtype
        self._vae = load_vae(model, DTYPES[compute], expected).to(self._device).eval()
        self._vae.requires_grad_(False)
        try:
            self.encode(np.zeros((1, PROBE, PROBE, 3), np.uint8))
        except Exception as error:  # some faulty configs fail only here
            raise ModelError(f"the VAE in {model / 'vae'} cannot encode a picture: {first_line(error)}",
                             hint=FETCH_AGAIN) from None

    @torch.inference_mode()
    def encode(self, pixels_BHW3: np.ndarray[Any, np.dtype[np.uint8]]) -> list[np.ndarray[Any, Any] | None]:
        """One [C, h, w] row per picture, as stored; `None` if it is not finite even in float32.

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


def load_vae(model: Path, dtype: torch.dtype, expected: Expected | None = None) -> Any:
    """Loads the `AutoencoderKL` of the pipeline directory `model` into CPU memory. Raises `ModelError`."""
    files = vae_files(model)
    vae = load_model(AutoencoderKL, files, "VAE", low_cpu_mem_usage=False, torch_dtype=dtype)
    if expected is not None:
        expected.require(digest_vae(files, expected.file_digest), f"the VAE of {model}")
    return vae
