"""Encodes pictures to latents with the pipeline's own VAE: the posterior's mean, and its standard deviation if wanted.

Both are unscaled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import diffusers
import numpy as np
import torch

from prep.errors import ModelError, OutOfMemoryError, first_line
from prep.models.components import class_of
from prep.models.device.memory import FittingBatches, move
from prep.models.fields import STD
from prep.models.files import FETCH_AGAIN
from prep.models.fingerprint import Expected, digest_vae, vae_files
from prep.models.latents import GEOMETRIES
from prep.models.loading import load_model
from prep.models.pipeline import pipeline_index
from prep.models.tensors import DTYPES, finite_rows, pick_device, stored

PROBE = 64  # pixels; side of the picture that a VAE is tested with

# Legend: B pictures, H W pixels, h w latent cells, C latent channels.

Arrays = dict[str, np.ndarray[Any, Any]]  # name of the field's array → one row


class Posterior(NamedTuple):
    """What a VAE says of pictures: a normal distribution for each number of their latents, unscaled."""

    mean_BChw: torch.Tensor
    std_BChw: torch.Tensor


class VaeEncoder:
    """A VAE on its device; `encode` returns rows ready to store."""

    def __init__(self, model: Path, *, device: str, compute: str, dtype: str, with_std: bool = False, tile: int = 0,
                 expected: Expected | None = None) -> None:
        """Raises `OutOfMemoryError`, and `ModelError`, also if the files do not match the `expected` fingerprint."""
        self._device, self._dtype, self._with_std = pick_device(device), dtype, with_std
        self.batches = FittingBatches(self._device, compute)
        self._vae = move(load_vae(model, DTYPES[compute], expected), self._device, "the VAE", compute).eval()
        self._vae.requires_grad_(False)
        if tile:
            encode_in_tiles(self._vae, tile)
        try:
            self.encode(np.zeros((1, PROBE, PROBE, 3), np.uint8))
        except OutOfMemoryError:
            raise
        except Exception as error:  # some faulty configs fail only here
            raise ModelError(f"the VAE in {model / 'vae'} cannot encode a picture: {first_line(error)}",
                             hint=FETCH_AGAIN) from None

    def encode(self, pixels_BHW3: np.ndarray[Any, np.dtype[np.uint8]]) -> list[Arrays | None]:
        """One row per picture, arrays of [C, h, w] as stored; `None` if it is not finite even in float32.

        A picture that is not finite in the compute dtype is encoded again, alone, in float32. A batch that does not fit
        into the device's memory is halved. Raises `OutOfMemoryError` if one picture does not fit.
        """
        _, height, width, _ = pixels_BHW3.shape
        return self.batches.run(pixels_BHW3, self._rows, f"a picture of {width}x{height} pixels")

    @torch.inference_mode()
    def _rows(self, pixels_BHW3: np.ndarray[Any, np.dtype[np.uint8]]) -> list[Arrays | None]:
        rows = self._kept(self._forward(pixels_BHW3, self._vae.dtype))
        return [row if row is not None else self._again(pixels_BHW3[number:number + 1])
                for number, row in enumerate(rows)]

    def _again(self, pixels_1HW3: np.ndarray[Any, np.dtype[np.uint8]]) -> Arrays | None:
        usual = self._vae.dtype
        try:
            self._vae.to(torch.float32)
            arrays = self._forward(pixels_1HW3, torch.float32)
        finally:
            self._vae.to(usual)
        return self._kept(arrays)[0]

    def _forward(self, pixels_BHW3: np.ndarray[Any, np.dtype[np.uint8]], dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The field's arrays, [B, C, h, w] each, float32."""
        image_B3HW = torch.from_numpy(pixels_BHW3).to(self._device).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        found = posterior(self._vae, image_B3HW.to(dtype))
        wanted = {"latent": found.mean_BChw, **({STD: found.std_BChw} if self._with_std else {})}
        return {name: each.float().cpu() for name, each in wanted.items()}

    def _kept(self, arrays: dict[str, torch.Tensor]) -> list[Arrays | None]:
        """A row per picture, as stored; `None` where one is not finite."""
        finite = [all(fine) for fine in zip(*(finite_rows(each, self._dtype) for each in arrays.values()), strict=True)]
        split = {name: stored(each, self._dtype) for name, each in arrays.items()}
        return [{name: each[number] for name, each in split.items()} if fine else None
                for number, fine in enumerate(finite)]


def encode_in_tiles(vae: Any, side: int) -> None:
    """Makes `vae` encode pictures with a longer side than `side` pixels in tiles that overlap by a quarter.

    Tiles and their blending are diffusers' own; only their size is not that of the VAE's config.
    """
    if hasattr(vae, "tile_sample_min_size"):
        vae.enable_tiling()
        vae.tile_sample_min_size, vae.tile_overlap_factor = side, 0.25
        vae.tile_latent_min_size = side >> (len(vae.config.block_out_channels) - 1)
    else:
        vae.enable_tiling(tile_sample_min_height=side, tile_sample_min_width=side,
                          tile_sample_stride_height=side * 3 // 4, tile_sample_stride_width=side * 3 // 4)


# VAEs of video, for which a picture is a clip of one frame: [B, C, 1, H, W].
OF_VIDEO = frozenset({"AutoencoderKLQwenImage"})


def posterior(vae: Any, image_B3HW: torch.Tensor) -> Posterior:
    """The posterior of pictures from -1 to 1; of an autoencoder without one, its latent and a deviation of 0."""
    if type(vae).__name__ in OF_VIDEO:
        clip = vae.encode(image_B3HW[:, :, None]).latent_dist
        return Posterior(clip.mean[:, :, 0], clip.std[:, :, 0])
    made = vae.encode(image_B3HW)
    if not GEOMETRIES[type(vae).__name__].posterior:
        return Posterior(made.latent, torch.zeros_like(made.latent))
    return Posterior(made.latent_dist.mean, made.latent_dist.std)


def decode(vae: Any, latent_BChw: torch.Tensor) -> torch.Tensor:
    """Pictures from -1 to 1, [B, 3, H, W], of unscaled latents."""
    if type(vae).__name__ in OF_VIDEO:
        clip_B31HW: torch.Tensor = vae.decode(latent_BChw[:, :, None]).sample
        return clip_B31HW[:, :, 0]
    image_B3HW: torch.Tensor = vae.decode(latent_BChw).sample
    return image_B3HW


def load_vae(model: Path, dtype: torch.dtype, expected: Expected | None = None) -> Any:
    """Loads the VAE of the pipeline directory `model` into CPU memory. Raises `ModelError`."""
    files = vae_files(model)
    kind = getattr(diffusers, class_of(pipeline_index(model), "vae", model)[1])
    vae = load_model(kind, files, "VAE", low_cpu_mem_usage=False, torch_dtype=dtype)
    if expected is not None:
        expected.require(digest_vae(files, expected.file_digest), f"the VAE of {model}")
    return vae
