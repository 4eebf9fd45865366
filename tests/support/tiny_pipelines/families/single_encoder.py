"""PixArt, SANA, Lumina 2, Qwen-Image, Z-Image and Anima: transformers with one text encoder each."""

from __future__ import annotations

from typing import Any

import diffusers

from tiny_pipelines import schedulers, text_encoders, tokenizers, vaes
from tiny_pipelines.text_encoders import WIDTH

_untyped: Any = diffusers  # its constructors have no type annotations


def pixart_alpha(*, sample_size: int = 128) -> Any:
    """PixArt Alpha at 1024: a `sample_size` of 128 makes size and aspect ratio inputs of the transformer.

    64 is that of the model for 512 pixels.
    """
    tokenizer = tokenizers.t5()
    return _untyped.PixArtAlphaPipeline(
        tokenizer=tokenizer, text_encoder=text_encoders.t5(tokenizer), vae=vaes.stable_diffusion(),
        transformer=_pixart(sample_size=sample_size), scheduler=schedulers.pixart(),
    )


def pixart_sigma() -> Any:
    """PixArt Sigma: without these inputs, with SDXL's VAE."""
    tokenizer = tokenizers.t5()
    return _untyped.PixArtSigmaPipeline(
        tokenizer=tokenizer, text_encoder=text_encoders.t5(tokenizer), vae=vaes.stable_diffusion(0.13025),
        transformer=_pixart(sample_size=128, use_additional_conditions=False), scheduler=schedulers.pixart(),
    )


def _pixart(**options: Any) -> Any:
    """Three heads: size and aspect ratio take a third of the channels each."""
    return _untyped.PixArtTransformer2DModel(
        num_attention_heads=3, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=2,
        cross_attention_dim=24, caption_channels=WIDTH, patch_size=2, **options,
    )


def sana(*, solver: bool = False, timestep_scale: float = 1.0) -> Any:
    """SANA: Gemma 2, and latents of factor 32 without patches; `solver`: with the scheduler that is published."""
    tokenizer = tokenizers.gemma()
    return _untyped.SanaPipeline(
        tokenizer=tokenizer, text_encoder=text_encoders.gemma2(tokenizer), vae=vaes.deep_compression(),
        transformer=_untyped.SanaTransformer2DModel(
            in_channels=32, out_channels=32, num_attention_heads=2, attention_head_dim=8, num_layers=2,
            num_cross_attention_heads=2, cross_attention_head_dim=8, cross_attention_dim=16, caption_channels=WIDTH,
            sample_size=32, patch_size=1, timestep_scale=timestep_scale,
        ),
        scheduler=schedulers.flow_solver(3.0) if solver else schedulers.flow(3.0),
    )


def lumina2() -> Any:
    """Lumina Image 2: Gemma 2, FLUX.1's VAE; three heads of queries for each of keys and values."""
    tokenizer = tokenizers.gemma()
    return _untyped.Lumina2Pipeline(
        transformer=_untyped.Lumina2Transformer2DModel(
            sample_size=8, patch_size=2, in_channels=16, hidden_size=36, num_layers=2, num_refiner_layers=1,
            num_attention_heads=3, num_kv_heads=1, multiple_of=16, axes_dim_rope=(4, 4, 4), axes_lens=(320, 64, 64),
            cap_feat_dim=WIDTH,
        ),
        scheduler=schedulers.flow(6.0), vae=vaes.flux(), text_encoder=text_encoders.gemma2(tokenizer),
        tokenizer=tokenizer,
    )


def qwenimage() -> Any:
    """Qwen-Image: Qwen2.5-VL, of whose rows the template's are cut off; its schedule does not end at 0."""
    tokenizer = tokenizers.qwen()
    return _untyped.QwenImagePipeline(
        scheduler=schedulers.dynamic_flow(
            base_shift=0.5, max_shift=0.9, base_image_seq_len=256, max_image_seq_len=8192, shift_terminal=0.02
        ),
        vae=vaes.qwen_image(), text_encoder=text_encoders.qwen25_vl(tokenizer), tokenizer=tokenizer,
        transformer=_untyped.QwenImageTransformer2DModel(
            patch_size=2, in_channels=64, out_channels=16, num_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=WIDTH, guidance_embeds=False, axes_dims_rope=(4, 4, 8),
        ),
    )


def qwenimage_edit(zero_cond_t: bool = False) -> Any:
    """Qwen-Image-Edit 2509, whose text encoder sees pictures; `zero_cond_t`: 2511, to which they are free of noise."""
    parts, tokenizer = qwenimage().components, tokenizers.qwen25_vl()
    transformer = _untyped.QwenImageTransformer2DModel.from_config(parts["transformer"].config, zero_cond_t=zero_cond_t)
    return _untyped.QwenImageEditPlusPipeline(**parts | {
        "tokenizer": tokenizer, "text_encoder": text_encoders.qwen25_vl(tokenizer, patch=14),
        "processor": tokenizers.qwen2_vl_processor(tokenizer), "transformer": transformer})


def qwenimage21() -> Any:
    """Qwen-Image-2.1: Qwen3-VL sees the pictures, whose latents take the places of what it returns for them."""
    tokenizer = tokenizers.qwen3_vl()
    return _untyped.QwenImage21Pipeline(
        scheduler=schedulers.dynamic_flow(), vae=vaes.qwen_image_21(),
        text_encoder=text_encoders.qwen3_vl_with_head(tokenizer), processor=tokenizers.qwen3_vl_processor(tokenizer),
        transformer=_untyped.QwenImage21Transformer2DModel(
            num_layers=2, attention_head_dim=16, num_attention_heads=2, context_in_dim=WIDTH,
            axes_dims_rope=(4, 6, 6)))


def zimage() -> Any:
    """Z-Image: Qwen3; its transformer takes a list of pictures and a list of texts, and pads both itself."""
    tokenizer = tokenizers.qwen3()
    return _untyped.ZImagePipeline(
        scheduler=schedulers.flow(3.0), vae=vaes.flux(), text_encoder=text_encoders.qwen3(tokenizer),
        tokenizer=tokenizer,
        transformer=_untyped.ZImageTransformer2DModel(
            in_channels=16, dim=32, n_layers=2, n_refiner_layers=1, n_heads=2, n_kv_heads=2, cap_feat_dim=WIDTH,
            axes_dims=[4, 4, 8], axes_lens=[1024, 64, 64],
        ),
    )


def anima() -> Any:
    """Anima: Qwen3 and the numbers of T5's tokens, of which a model of its own makes the transformer's text."""
    tokenizer, t5_tokenizer = tokenizers.qwen3(), tokenizers.t5()
    pipeline = _untyped.AnimaModularPipeline(blocks=_untyped.AnimaAutoBlocks())
    pipeline.update_components(
        scheduler=schedulers.flow(3.0), vae=vaes.qwen_image(), text_encoder=text_encoders.qwen3(tokenizer),
        tokenizer=tokenizer, t5_tokenizer=t5_tokenizer,
        text_conditioner=_untyped.AnimaTextConditioner(
            source_dim=WIDTH, target_dim=24, model_dim=16, num_layers=2, num_attention_heads=2,
            target_vocab_size=len(t5_tokenizer)),
        transformer=_untyped.CosmosTransformer3DModel(
            num_attention_heads=2, attention_head_dim=16, num_layers=2, mlp_ratio=2.0, text_embed_dim=24,
            adaln_lora_dim=8, rope_scale=(1.0, 4.0, 4.0), extra_pos_embed_type=None))
    return pipeline
