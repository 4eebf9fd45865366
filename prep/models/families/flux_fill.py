"""FLUX.1 Fill: FLUX.1 dev, told by a mask what to paint, and shown the picture with that part hidden.

Sources: `FluxFillPipeline` in diffusers 0.42. A token of the transformer's input has the numbers of the noise (64), of
the masked picture's latent (64), and of the mask (256: of each of its 2 × 2 latent cells all 8 × 8 pixels, row by row);
in_channels is 384. Mask and picture are treated as by `sd15_inpaint`'s pipeline, but the mask keeps its pixels.
Transformer, VAE and text rows are FLUX.1 dev's otherwise. Its guidance is 30 in the pipeline's default.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from prep.models.denoiser import packing
from prep.models.families import flux, flux_kontext
from prep.models.family import Conditions, Inpainting

if TYPE_CHECKING:
    from torch import Tensor


def join(patches_BNP: Tensor, mask_BMhw: Tensor, masked_BChw: Tensor) -> Tensor:
    """[B, N, 2P + 4M]: the patches of noise, of the masked latent, and of the mask."""
    masked, mask = packing.pack(masked_BChw), packing.pack(mask_BMhw)
    width = patches_BNP.shape[-1]
    whole = patches_BNP.new_empty((*patches_BNP.shape[:-1], 2 * width + mask.shape[-1]))
    whole[..., :width], whole[..., width:2 * width], whole[..., 2 * width:] = patches_BNP, masked, mask
    return whole


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked."""
    (masked_BChw,), mask_BMhw = conditions.references, conditions.inpaint_mask
    assert mask_BMhw is not None, "samples of a family that inpaints have a mask"
    given = {"hidden_states": join(packing.pack(noised_BChw), mask_BMhw, masked_BChw),
             "img_ids": packing.positions(noised_BChw)}
    return flux.answer(transformer, given, noised_BChw, sigma_B, conditions)


FAMILY = replace(
    flux.FAMILY, name="flux_fill", models=("FLUX.1 Fill dev",), pipelines=("FluxFillPipeline",), predict=predict,
    inpainting=Inpainting(cell="all", join=join),
    # Its own insists on pictures, which it would mask and encode again. Kontext's does without, and has the same loop:
    # it gives every scheduler sigmas, unlike FLUX.1's.
    sampling=replace(flux_kontext.FAMILY.sampling, pipeline=flux_kontext.FAMILY.pipelines[0], guidance=30.0),
)
