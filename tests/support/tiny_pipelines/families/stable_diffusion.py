"""Stable Diffusion 1.5 to 3.5, SDXL, and Kolors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers

from tiny_pipelines import schedulers, text_encoders, tokenizers, vaes
from tiny_pipelines.text_encoders import WIDTH

_untyped: Any = diffusers  # its constructors have no type annotations


def sd15() -> Any:
    """Stable Diffusion 1.5: the same number of attention heads in every level."""
    return _stable_diffusion(tokenizers.clip(), _unet(WIDTH, attention_head_dim=2), "epsilon")


def sd21(prediction: str = "v_prediction") -> Any:
    """Stable Diffusion 2.1: OpenCLIP, heads of the same width in every level; base: `prediction="epsilon"`."""
    unet = _unet(WIDTH, attention_head_dim=(2, 4), use_linear_projection=True)
    return _stable_diffusion(tokenizers.open_clip(), unet, prediction)


def sd15_inpaint() -> Any:
    """Stable Diffusion 1.5 for inpainting: the mask and the masked picture beside the noise."""
    unet = _unet(WIDTH, attention_head_dim=2, in_channels=9)
    return _inpainting(_untyped.StableDiffusionInpaintPipeline, sd15(), unet, safety_checker=None,
                       feature_extractor=None, requires_safety_checker=False)


def sd21_inpaint() -> Any:
    """Stable Diffusion 2 for inpainting: as "base", which predicts noise."""
    whole = sd21("epsilon")
    unet = _untyped.UNet2DConditionModel.from_config({**whole.unet.config, "in_channels": 9})
    return _inpainting(_untyped.StableDiffusionInpaintPipeline, whole, unet, safety_checker=None,
                       feature_extractor=None, requires_safety_checker=False)


def sdxl_inpaint() -> Any:
    """SDXL for inpainting."""
    whole = sdxl()
    unet = _untyped.UNet2DConditionModel.from_config({**whole.unet.config, "in_channels": 9})
    return _inpainting(_untyped.StableDiffusionXLInpaintPipeline, whole, unet, add_watermarker=False)


def _inpainting(kind: Any, whole: Any, unet: Any, **options: Any) -> Any:
    parts = {name: part for name, part in whole.components.items() if part is not None} | {"unet": unet}
    return kind(**parts, **options)


def _stable_diffusion(tokenizer: Any, unet: Any, prediction: str) -> Any:
    return _untyped.StableDiffusionPipeline(
        vae=vaes.stable_diffusion(), text_encoder=text_encoders.clip(tokenizer), tokenizer=tokenizer, unet=unet,
        scheduler=schedulers.ddim(prediction), safety_checker=None, feature_extractor=None,
        requires_safety_checker=False,
    )


def sdxl(second_width: int = WIDTH) -> Any:
    """SDXL: the text rows of two encoders side by side, and six numbers about size and crop.

    diffusers tells the encoders of a single file apart by their width, so tests of that make them differ.
    """
    first, second = tokenizers.clip(), tokenizers.open_clip()
    unet = _unet(
        WIDTH + second_width, attention_head_dim=(2, 4), use_linear_projection=True,
        transformer_layers_per_block=(1, 2),
        addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + second_width,
    )
    return _untyped.StableDiffusionXLPipeline(
        vae=vaes.sdxl(), text_encoder=text_encoders.clip(first), tokenizer=first,
        text_encoder_2=text_encoders.projected_clip(second, width=second_width), tokenizer_2=second, unet=unet,
        scheduler=schedulers.ddim(), force_zeros_for_empty_prompt=True, add_watermarker=False,
    )


def kolors() -> Any:
    """Kolors: SDXL's UNet, which projects the states of ChatGLM, and another schedule."""
    tokenizer = tokenizers.chatglm()
    unet = _unet(
        24, attention_head_dim=(2, 4), use_linear_projection=True, transformer_layers_per_block=(1, 2),
        encoder_hid_dim=WIDTH, encoder_hid_dim_type="text_proj", addition_embed_type="text_time",
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + WIDTH,
    )
    return _untyped.KolorsPipeline(
        vae=vaes.sdxl(), text_encoder=text_encoders.chatglm(tokenizer), tokenizer=tokenizer, unet=unet,
        scheduler=schedulers.kolors(),
    )


def _unet(text_channels: int, in_channels: int = 4, **options: Any) -> Any:
    return _untyped.UNet2DConditionModel(
        sample_size=8, in_channels=in_channels, out_channels=4, block_out_channels=(16, 16), layers_per_block=1,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        norm_num_groups=4, cross_attention_dim=text_channels, **options,
    )


def sd3(qk_norm: str | None = None, dual: Sequence[int] = (), without_t5: bool = False) -> Any:
    """Stable Diffusion 3; with `qk_norm="rms_norm"` 3.5 large, with `dual=(0,)` as well 3.5 medium.

    `without_t5`: many load it so to save memory; the pipeline then has zeros where T5's rows would be.
    """
    first, second, third = tokenizers.clip(), tokenizers.open_clip(), None if without_t5 else tokenizers.t5()
    joint = 3 * WIDTH  # T5's width in this model; the rows of both CLIPs are padded to it
    transformer = _untyped.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=joint, caption_projection_dim=32, pooled_projection_dim=2 * WIDTH,
        pos_embed_max_size=24, qk_norm=qk_norm, dual_attention_layers=tuple(dual),
    )
    return _untyped.StableDiffusion3Pipeline(
        transformer=transformer, scheduler=schedulers.flow(3.0), vae=vaes.sixteen_channels(1.5305, 0.0609),
        text_encoder=text_encoders.projected_clip(first), tokenizer=first,
        text_encoder_2=text_encoders.projected_clip(second), tokenizer_2=second,
        text_encoder_3=None if third is None else text_encoders.t5(third, width=joint), tokenizer_3=third,
    )
