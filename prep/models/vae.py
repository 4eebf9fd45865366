"""Encodes pictures to latents with the pipeline's own VAE: the posterior's mean, and its standard deviation if wanted.

Both are unscaled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import diffusers
import numpy as np
import torch
from torch.nn import functional

from prep.errors import ModelError, OutOfMemoryError, first_line
from prep.models.components import class_of
from prep.models.configs import pipeline_index
from prep.models.device.compiling import Compiler
from prep.models.device.memory import FittingBatches, free_memory, is_out_of_memory, move, too_little_memory
from prep.models.fields import STD
from prep.models.files import FETCH_AGAIN, Model
from prep.models.fingerprint import Expected, digest_vae, vae_files
from prep.models.latents import GEOMETRIES
from prep.models.loading import Form, load_diffusers
from prep.models.tensors import DTYPES, finite_rows, pick_device, stored
from prep.runtime import killable

PROBE = 64  # pixels; side of the picture that a VAE is tested with
TILE = 512  # pixels; side of the tiles in which a picture is decoded that memory does not hold whole

# Legend: B pictures, H W pixels, h w latent cells, C latent channels.

Arrays = dict[str, np.ndarray[Any, Any]]  # name of the field's array → one row
Pixels = np.ndarray[Any, np.dtype[np.uint8]]


class Posterior(NamedTuple):
    """What a VAE says of pictures: a normal distribution for each number of their latents, unscaled."""

    mean_BChw: torch.Tensor
    std_BChw: torch.Tensor


class VaeEncoder:
    """A VAE on its device; `encode` returns rows ready to store."""

    def __init__(self, model: Model, *, device: str, compute: str, dtype: str, with_std: bool = False, tile: int = 0,
                 expected: Expected | None = None, compiled: bool = False) -> None:
        """Raises `OutOfMemoryError`, and `ModelError`, also if the files do not match the `expected` fingerprint."""
        self._device, self._dtype, self._with_std = pick_device(device), dtype, with_std
        self.batches = FittingBatches(self._device, compute)
        self.ahead = 1 if self._device.type == "cuda" else 0  # batches to begin before the rows of one are asked for
        self._vae = move(load_vae(model, DTYPES[compute], expected), self._device, "the VAE", compute).eval()
        self._vae.requires_grad_(False)
        if self._device.type == "cuda":
            # Pixels come with channels last, and so convolutions compute: with such weights, they need not convert
            # them for each batch. On a CPU that changes no bit and gains nothing: 4.94 and 5.02 CPU seconds for four
            # pictures of 512x512 with the small VAE of `make bench`, where channels first would take 5.44.
            self._vae.to(memory_format=torch.channels_last)
        self.compiler = Compiler(wanted=compiled)
        if type(self._vae).__name__ not in OF_VIDEO:  # whose encoders keep frames in lists
            self.compiler.apply(self._vae.encoder, "the VAE")
        if tile:
            use_tiles(self._vae, tile)
        try:
            self.encode(np.zeros((1, PROBE, PROBE, 3), np.uint8))
        except OutOfMemoryError:
            raise
        except Exception as error:  # some faulty configs fail only here
            raise ModelError(f"the VAE in {model / 'vae'} cannot encode a picture: {first_line(error)}",
                             hint=FETCH_AGAIN) from None

    def encode(self, pixels_BHW3: Pixels) -> list[Arrays | None]:
        """One row per picture, arrays of [C, h, w] as stored; `None` if it is not finite even in float32. The fourth
        channel of pictures, if any, is their opacity for a VAE that takes it. For another, pixels where that is 0 are
        halfway between black and white, which no byte says.

        A picture that is not finite in the compute dtype is encoded again, alone, in float32. A batch that does not fit
        into the device's memory is halved. Raises `OutOfMemoryError` if one picture does not fit.
        """
        return self.begin(pixels_BHW3)()

    def begin(self, pixels_BHW3: Pixels) -> Callable[[], list[Arrays | None]]:
        """Begins what `encode` does; the result waits for the end, and returns the rows.

        On a CPU all is done when this returns. A GPU then has its work in a queue, copies to and from pinned memory
        included: who begins the next batch before asking for the rows of this one never lets it wait. There is one
        queue and no stream for copies: a picture of 512x512 has 0.8 MB, tens of microseconds on a bus where a VAE takes
        milliseconds. Our tests have run this on CPUs only.
        """
        _, height, width, _ = pixels_BHW3.shape
        rows = self.batches.run(pixels_BHW3, self._begun, f"a picture of {width}x{height} pixels")
        return lambda: [row() for row in rows]

    @torch.inference_mode()
    def _begun(self, pixels_BHW3: Pixels) -> list[Callable[[], Arrays | None]]:
        """A function for each picture that waits for its row."""
        arrays = self._forward(pixels_BHW3, self._vae.dtype)
        wait = arrival(self._device)

        @cache
        def rows() -> list[Arrays | None]:
            wait()
            return [row if row is not None else self._again(pixels_BHW3[number:number + 1])
                    for number, row in enumerate(self._kept(arrays))]

        return [partial(lambda number: rows()[number], number) for number in range(len(pixels_BHW3))]

    def _again(self, pixels_1HW3: Pixels) -> Arrays | None:
        _, height, width, _ = pixels_1HW3.shape
        return self.batches.one(lambda: [self._in_float32(pixels_1HW3)],
                                f"a picture of {width}x{height} pixels in float32")

    @torch.inference_mode()
    def _in_float32(self, pixels_1HW3: Pixels) -> Arrays | None:
        usual = self._vae.dtype
        try:
            self._vae.to(torch.float32)
            arrays = self._forward(pixels_1HW3, torch.float32)
            arrival(self._device)()
        finally:
            self._vae.to(usual)
        return self._kept(arrays)[0]

    def _forward(self, pixels_BHW3: Pixels, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The field's arrays, [B, C, h, w] each, float32, in host memory; from a GPU, they are on their way."""
        given = torch.from_numpy(pixels_BHW3)
        pinned = given.pin_memory() if self._device.type == "cuda" else given
        image_BCHW = pinned.to(self._device, non_blocking=True).permute(0, 3, 1, 2).float().div_(127.5).sub_(1)
        if image_BCHW.shape[1] == 4 and not takes_alpha(self._vae):  # 0, mid-gray, where the fourth channel is 0
            image_BCHW = image_BCHW[:, :3] * (image_BCHW[:, 3:] > 0)
        found = posterior(self._vae, image_BCHW.to(dtype))
        wanted = {"latent": found.mean_BChw, **({STD: found.std_BChw} if self._with_std else {})}
        return {name: each.float().to("cpu", non_blocking=self._device.type == "cuda")
                for name, each in wanted.items()}

    def _kept(self, arrays: dict[str, torch.Tensor]) -> list[Arrays | None]:
        """A row per picture, as stored; `None` where one is not finite."""
        finite = [all(fine) for fine in zip(*(finite_rows(each, self._dtype) for each in arrays.values()), strict=True)]
        split = {name: stored(each, self._dtype) for name, each in arrays.items()}
        return [{name: each[number] for name, each in split.items()} if fine else None
                for number, fine in enumerate(finite)]


class VaeDecoder:
    """A VAE on its device that decodes stored latents, one at a time, in float32."""

    def __init__(self, model: Model, *, device: str) -> None:
        """Raises `OutOfMemoryError`, `ModelError`."""
        self._device = pick_device(device)
        self._model = model
        self._vae = move(load_vae(model, torch.float32), self._device, "the VAE", "float32").eval()

    @killable()
    @torch.inference_mode()
    def decode(self, latent_Chw: np.ndarray[Any, Any]) -> Pixels:
        """The picture of an unscaled latent, uint8 [H, W, 3], over white if it has transparency. Raises `ModelError`,
        `OutOfMemoryError`."""
        try:
            latent_1Chw = torch.from_numpy(np.ascontiguousarray(latent_Chw))[None]
            image_3HW = _over_white(decode(self._vae, latent_1Chw.to(self._device)))[0]
            levels = ((image_3HW + 1) * 127.5).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0)
            pixels: Pixels = levels.cpu().numpy()
        except Exception as error:
            if is_out_of_memory(error):
                raise too_little_memory(self._device, "decoding a latent", "float32") from None
            raise ModelError(f"the VAE in {self._model / 'vae'} cannot decode a latent of this cache: "
                             f"{first_line(error)}", hint="name the model that made the cache: --model") from None
        return np.ascontiguousarray(pixels)


def arrival(device: torch.device) -> Callable[[], object]:
    """A function that waits until what `device` has been asked for so far is done, copies included."""
    if device.type != "cuda":
        return lambda: None
    kind: Any = torch.cuda.Event
    event = kind()
    event.record(torch.cuda.current_stream(device))
    wait: Callable[[], object] = event.synchronize
    return wait


def use_tiles(vae: Any, side: int) -> None:
    """Makes `vae` take pictures with a longer side than `side` pixels in tiles that overlap by a quarter.

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
OF_VIDEO = frozenset({"AutoencoderKLQwenImage", "AutoencoderKLQwenImage21"})


def takes_alpha(vae: Any) -> bool:
    """Whether the VAE takes pictures with a fourth channel: -1 where they are transparent, 1 where they are opaque."""
    return type(vae).__name__ in OF_VIDEO and getattr(vae.config, "in_channels", 3) == 4


def posterior(vae: Any, image_BCHW: torch.Tensor) -> Posterior:
    """The posterior of pictures from -1 to 1, opaque without a fourth channel; of an autoencoder without one, its
    latent and a deviation of 0."""
    if takes_alpha(vae) and image_BCHW.shape[1] == 3:
        image_BCHW = functional.pad(image_BCHW, (0, 0, 0, 0, 0, 1), value=1.0)
    if type(vae).__name__ in OF_VIDEO:
        clip = vae.encode(image_BCHW[:, :, None]).latent_dist
        return Posterior(clip.mean[:, :, 0], clip.std[:, :, 0])
    made = vae.encode(image_BCHW)
    if not GEOMETRIES[type(vae).__name__].posterior:
        return Posterior(made.latent, torch.zeros_like(made.latent))
    return Posterior(made.latent_dist.mean, made.latent_dist.std)


def decode(vae: Any, latent_BChw: torch.Tensor) -> torch.Tensor:
    """Pictures from -1 to 1, [B, C, H, W], of unscaled latents; the fourth of four channels is their opacity.

    If memory does not suffice for whole ones, these and all later ones are decoded in tiles, whose seams are blended.
    """
    try:
        return _decoded(vae, latent_BChw)
    except Exception as error:  # its frames hold tensors: they are gone after this block
        if vae.use_tiling or not is_out_of_memory(error):
            raise
    free_memory(latent_BChw.device)
    use_tiles(vae, TILE)
    return _decoded(vae, latent_BChw)


def _decoded(vae: Any, latent_BChw: torch.Tensor) -> torch.Tensor:
    if type(vae).__name__ in OF_VIDEO:
        clip_BC1HW: torch.Tensor = vae.decode(latent_BChw[:, :, None]).sample
        return clip_BC1HW[:, :, 0]
    image_BCHW: torch.Tensor = vae.decode(latent_BChw).sample
    return image_BCHW


def _over_white(image_BCHW: torch.Tensor) -> torch.Tensor:
    """[B, 3, H, W] of pictures from -1 to 1 that may have a channel for opacity."""
    opacity_B1HW = (image_BCHW[:, 3:] + 1) / 2
    return image_BCHW if image_BCHW.shape[1] == 3 else 1 - opacity_B1HW * (1 - image_BCHW[:, :3])


def load_vae(model: Model, dtype: torch.dtype, expected: Expected | None = None) -> Any:
    """Loads the VAE of the pipeline directory `model` into CPU memory. Raises `ModelError`."""
    files = vae_files(model)
    kind = getattr(diffusers, class_of(pipeline_index(model), "vae", model)[1])
    vae = load_diffusers(kind, files, "VAE", Form(dtype=dtype))
    if expected is not None:
        expected.require(digest_vae(files, expected.file_digest), f"the VAE of {model}")
    return vae
