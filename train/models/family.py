"""What a family's denoiser needs in a step and for sample pictures, as a record.

B samples, C latent channels, h w latent cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from train.models.naming import Kohya, Rule
from train.models.samplers import Solvers

if TYPE_CHECKING:  # train check reads these facts, and imports no torch
    from torch import Tensor

GUIDANCE = 3.5  # the number in training that diffusers' example for FLUX.1 has

TextArrays = Mapping[str, "Tensor"]  # the arrays of text rows, [B, …] each


@dataclass(frozen=True, kw_only=True, slots=True)
class Conditions:
    """What a denoiser is given besides the noisy latent and the time."""

    text: TextArrays
    sizes_B6: Tensor  # original height and width, top and left of the crop, height and width of the bucket, in pixels
    schedule: Mapping[str, Any] = field(default_factory=dict)  # the scheduler's config; empty: that of published models
    guidance: float = GUIDANCE  # the number that a denoiser is given whose config has guidance_embeds


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompted:
    """What a pipeline is given for one sample picture."""

    positive: TextArrays  # of one row
    negative: TextArrays
    latent_1Chw: Tensor  # noise
    size: Size  # of the picture, in pixels
    guidance: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DenoiserFamily:
    """How a family's denoiser is called in training, and its pipeline for sample pictures."""

    # The prediction [B, C, h, w] of the model for a noisy latent [B, C, h, w] at a time [B]: the timestep of a
    # diffusion model, the sigma (0 to 1) of a flow. For a flow the prediction is that of noise - latent.
    predict: Callable[[Any, Tensor, Tensor, Conditions], Tensor]
    # Arguments of the pipeline's __call__: embeddings, latents as it expects them, guidance.
    call: Callable[[Any, Prompted], Mapping[str, Any]]
    unpack: Callable[[Any, Tensor, Size], Tensor]  # model, the pipeline's latents, size → latents [1, C, h, w]
    sampler: str  # diffusers class of the scheduler for sample pictures
    sampler_options: Mapping[str, Any]  # overrides of the model's own scheduler config
    solvers: Solvers = field(default_factory=dict)  # other schedulers that the pipeline of a flow works with
    guidance: float  # usual guidance scale
    takes_guidance: bool = False  # whether `predict` gives the denoiser a number, if its config has guidance_embeds
    vae: Callable[[Any], Any] | None = None  # by the denoiser: what the pipeline takes for a VAE; None: it needs none
    # The timesteps' shift by a picture's tokens and the scheduler's config, if that has dynamic shifting; None: FLUX's.
    shift: Callable[[int, Mapping[str, Any]], float] | None = None
    prepare: Callable[[Any, Size], None] | None = None  # changes the pipeline for sample pictures of this size
    presets: Mapping[str, tuple[str, ...]]  # suffixes of layer names, by the value of lora.targets
    kohya: Kohya | None  # kohya's names of tensors; None: not known, or nothing proves them
    further: tuple[Rule, ...] = ()  # this and the next as in `Naming`
    original: Callable[[Iterable[str]], tuple[Rule, ...]] | None = None
    in_comfyui: bool = True  # whether ComfyUI 0.29 reads diffusers' names of tensors, all or some
