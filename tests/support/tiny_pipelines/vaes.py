"""VAEs with the factor, the channels and the latent statistics of the published ones, and eight channels inside.

So latent sizes, packing and bucket steps in tests are the real ones.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch

_untyped: Any = diffusers  # its constructors have no type annotations


def stable_diffusion(scaling: float = 0.18215) -> Any:
    """SD's VAE: factor 8, four channels. `scaling` 0.13025 is SDXL's, which PixArt Sigma and AuraFlow use too."""
    return _untyped.AutoencoderKL(latent_channels=4, scaling_factor=scaling, **_levels())


def sdxl() -> Any:
    """SDXL's: in float16 it overflows, and its config says so."""
    return _untyped.AutoencoderKL(latent_channels=4, scaling_factor=0.13025, force_upcast=True, **_levels())


def sixteen_channels(scaling: float, shift: float) -> Any:
    """Factor 8, sixteen channels, and no convolutions around the latents: SD3's and CogView4's."""
    return _untyped.AutoencoderKL(latent_channels=16, scaling_factor=scaling, shift_factor=shift,
                                  use_quant_conv=False, use_post_quant_conv=False, **_levels())


def flux() -> Any:
    """FLUX.1's, which half of the later families use."""
    return sixteen_channels(0.3611, 0.1159)


def flux2() -> Any:
    """FLUX.2's: factor 8, 32 channels, normalized in patches of 2 by 2 with the statistics of a batch norm.

    A new batch norm changes nothing: a test could not tell whether it was applied.
    """
    vae = _untyped.AutoencoderKLFlux2(latent_channels=32, **_levels())
    with torch.no_grad():
        vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, 128))
        vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, 128))
    return vae


def qwen_image() -> Any:
    """Qwen-Image's: of a video VAE, so latents have a time axis; sixteen channels, each with a mean and a deviation."""
    return _untyped.AutoencoderKLQwenImage(
        base_dim=8, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def qwen_image_21() -> Any:
    """Qwen-Image-2.1's: factor 16, 64 channels, each with a mean and a deviation; pictures have transparency."""
    return _untyped.AutoencoderKLQwenImage21(
        base_dim=4, decoder_base_dim=4, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1)


def deep_compression() -> Any:
    """SANA's: factor 32, 32 channels, six stages of which the last has attention."""
    blocks, channels, scales = ("ResBlock",) * 5 + ("EfficientViTBlock",), (8,) * 5 + (32,), ((),) * 5 + ((5,),)
    return _untyped.AutoencoderDC(
        latent_channels=32, attention_head_dim=4, scaling_factor=0.41407,
        encoder_block_types=blocks, encoder_block_out_channels=channels, encoder_layers_per_block=(1,) * 6,
        encoder_qkv_multiscales=scales, downsample_block_type="Conv",
        decoder_block_types=blocks, decoder_block_out_channels=channels, decoder_layers_per_block=(1,) * 6,
        decoder_qkv_multiscales=scales, upsample_block_type="interpolate",
    )


def _levels() -> dict[str, Any]:
    """Four levels, of which all but the last halve the sides: factor 8."""
    return {"block_out_channels": (8,) * 4, "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 64,
            "down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
