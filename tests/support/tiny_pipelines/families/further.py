"""Families that fewer people train: AuraFlow, CogView4, Krea 2, ERNIE-Image and HiDream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import diffusers

from tiny_pipelines import schedulers, text_encoders, tokenizers, vaes
from tiny_pipelines.text_encoders import WIDTH

_untyped: Any = diffusers  # its constructors have no type annotations


def auraflow() -> Any:
    """AuraFlow: UMT5, SDXL's VAE; rows of padding are zeros, and nothing masks them."""
    tokenizer = tokenizers.t5()
    return _untyped.AuraFlowPipeline(
        tokenizer=tokenizer, text_encoder=text_encoders.umt5(tokenizer), vae=vaes.stable_diffusion(0.13025),
        transformer=_untyped.AuraFlowTransformer2DModel(
            sample_size=8, patch_size=2, in_channels=4, out_channels=4, num_mmdit_layers=1,
            num_single_dit_layers=1, attention_head_dim=8, num_attention_heads=4, joint_attention_dim=WIDTH,
            caption_projection_dim=32, pos_embed_max_size=256,
        ),
        scheduler=schedulers.flow(1.73),
    )


def cogview4() -> Any:
    """CogView4: GLM, padded on the left to a multiple of 16 and not masked; sizes and crops are inputs."""
    tokenizer = tokenizers.glm()
    return _untyped.CogView4Pipeline(
        tokenizer=tokenizer, text_encoder=text_encoders.glm(tokenizer), vae=vaes.sixteen_channels(1.0, 0.0),
        transformer=_untyped.CogView4Transformer2DModel(
            patch_size=2, in_channels=16, out_channels=16, num_layers=2, attention_head_dim=8,
            num_attention_heads=4, text_embed_dim=WIDTH, time_embed_dim=16, condition_dim=8, pos_embed_max_size=64,
            sample_size=8, rope_axes_dim=(64, 64),
        ),
        scheduler=schedulers.dynamic_flow(
            base_shift=0.25, max_shift=0.75, base_image_seq_len=256, time_shift_type="linear"
        ),
    )


def krea2() -> Any:
    """Krea 2: three layers of Qwen3-VL stacked, with a mask; Qwen-Image's VAE.

    The end of its template has five tokens, as with the published tokenizer: the pipeline counts on it.
    """
    tokenizer = tokenizers.qwen((*tokenizers.CHAT, "assistant"), end="<|im_end|>")
    transformer = _untyped.Krea2Transformer2DModel(
        in_channels=64, num_layers=2, attention_head_dim=16, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, timestep_embed_dim=16, text_hidden_dim=WIDTH, num_text_layers=3,
        text_num_attention_heads=2, text_num_key_value_heads=2, text_intermediate_size=32,
        num_layerwise_text_blocks=1, num_refiner_text_blocks=1, axes_dims_rope=(4, 4, 8),
    )
    return _untyped.Krea2Pipeline(
        scheduler=schedulers.dynamic_flow(max_image_seq_len=6400), vae=vaes.qwen_image(),
        text_encoder=text_encoders.qwen3_vl(tokenizer), tokenizer=tokenizer, transformer=transformer,
        text_encoder_select_layers=(2, 4, 6),
    )


def ernie() -> Any:
    """ERNIE-Image: Mistral 3 without its head, FLUX.2's VAE; a list of texts, each of its own length."""
    tokenizer = tokenizers.mistral()
    return _untyped.ErnieImagePipeline(
        transformer=_untyped.ErnieImageTransformer2DModel(
            hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=32, in_channels=128,
            out_channels=128, text_in_dim=WIDTH, rope_axes_dim=(4, 4, 8),
        ),
        vae=vaes.flux2(), text_encoder=text_encoders.mistral3(tokenizer, layers=4).model, tokenizer=tokenizer,
        scheduler=schedulers.flow(3.0),
    )


def hidream(*, layers: Sequence[int] = (0, 1), whole: bool = True) -> Any:
    """HiDream: two CLIPs, T5 and Llama, `layers` of which its transformer's config lists; mixture of experts.

    `whole`: the transformer returns pictures, not patches, also in training.
    """
    first, second, third = tokenizers.clip(), tokenizers.open_clip(), tokenizers.t5()
    fourth = tokenizers.llama()
    transformer = _untyped.HiDreamImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=2, caption_channels=[WIDTH, WIDTH], text_emb_dim=2 * WIDTH, num_routed_experts=2,
        num_activated_experts=1, axes_dims_rope=(8, 4, 4), max_resolution=(16, 16), llama_layers=[*layers],
        force_inference_output=whole,
    )
    return _untyped.HiDreamImagePipeline(
        scheduler=schedulers.flow(3.0), vae=vaes.flux(), transformer=transformer,
        text_encoder=text_encoders.projected_clip(first, positions=248), tokenizer=first,
        text_encoder_2=text_encoders.projected_clip(second, positions=218), tokenizer_2=second,
        text_encoder_3=text_encoders.t5(third), tokenizer_3=third,
        text_encoder_4=text_encoders.llama(fourth), tokenizer_4=fourth,
    )
