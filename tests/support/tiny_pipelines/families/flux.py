"""FLUX.1, FLUX.2, FLUX.3 and the families built like FLUX.1: Chroma, Ovis-Image and LongCat-Image."""

from __future__ import annotations

from typing import Any

import diffusers

from tiny_pipelines import schedulers, text_encoders, tokenizers, vaes
from tiny_pipelines.text_encoders import WIDTH

_untyped: Any = diffusers  # its constructors have no type annotations

# Latents in patches of 2 by 2: 4 x 16 channels. Positions have three axes, whose widths add up to a head's.
_PACKED = {"patch_size": 1, "in_channels": 64, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
           "num_attention_heads": 2, "joint_attention_dim": WIDTH, "axes_dims_rope": (4, 4, 8)}


def flux(guidance: bool = True) -> Any:
    """FLUX.1 dev, which takes the guidance scale as an input; without `guidance` schnell."""
    first, second = tokenizers.clip(), tokenizers.t5()
    return _untyped.FluxPipeline(
        scheduler=schedulers.dynamic_flow(3.0) if guidance else schedulers.flow(1.0), vae=vaes.flux(),
        text_encoder=text_encoders.clip(first), tokenizer=first,
        text_encoder_2=text_encoders.t5(second), tokenizer_2=second,
        transformer=_untyped.FluxTransformer2DModel(
            pooled_projection_dim=WIDTH, guidance_embeds=guidance, **_PACKED
        ),
    )


def flux_kontext() -> Any:
    """FLUX.1 Kontext: dev's parts, in a pipeline that also takes a picture."""
    return _untyped.FluxKontextPipeline(**{name: part for name, part in flux().components.items() if part is not None})


def flux_fill() -> Any:
    """FLUX.1 Fill: dev's parts, whose transformer takes a mask and a masked picture beside the noise."""
    whole = flux()
    transformer = _untyped.FluxTransformer2DModel(
        pooled_projection_dim=WIDTH, guidance_embeds=True, **{**_PACKED, "in_channels": 384}, out_channels=64)
    return _untyped.FluxFillPipeline(**{name: part for name, part in whole.components.items() if part is not None}
                                     | {"transformer": transformer})


def chroma() -> Any:
    """Chroma: T5 alone, with a mask; a small network makes the modulations of all blocks."""
    tokenizer = tokenizers.t5()
    return _untyped.ChromaPipeline(
        scheduler=schedulers.dynamic_flow(3.0), vae=vaes.flux(),
        text_encoder=text_encoders.t5(tokenizer), tokenizer=tokenizer,
        transformer=_untyped.ChromaTransformer2DModel(
            approximator_num_channels=64, approximator_hidden_dim=32, approximator_layers=1, **_PACKED
        ),
    )


def ovis() -> Any:
    """Ovis-Image: Qwen3 alone; rows of padding are zeros, and nothing masks them."""
    tokenizer = tokenizers.qwen3()
    return _untyped.OvisImagePipeline(
        scheduler=schedulers.dynamic_flow(3.0), vae=vaes.flux(),
        text_encoder=text_encoders.qwen3(tokenizer), tokenizer=tokenizer,
        transformer=_untyped.OvisImageTransformer2DModel(out_channels=64, **_PACKED),
    )


def longcat_image() -> Any:
    """LongCat-Image: Qwen2.5-VL alone, whose processor serves to rewrite prompts; nothing masks padding."""
    tokenizer = tokenizers.qwen25_vl()
    return _untyped.LongCatImagePipeline(
        scheduler=schedulers.dynamic_flow(3.0), vae=vaes.flux(),
        text_encoder=text_encoders.qwen25_vl(tokenizer, patch=14), tokenizer=tokenizer,
        text_processor=tokenizers.qwen2_vl_processor(tokenizer),
        transformer=_untyped.LongCatImageTransformer2DModel(pooled_projection_dim=WIDTH, **_PACKED),
    )


def longcat_image_edit() -> Any:
    """LongCat-Image-Edit: the same parts, whose processor shows the text encoder a picture."""
    return _untyped.LongCatImageEditPipeline(**{
        name: part for name, part in longcat_image().components.items() if part is not None})


def flux2() -> Any:
    """FLUX.2 dev: rows of layers 10, 20 and 30 of Mistral side by side, so the text encoder has 31."""
    tokenizer = tokenizers.mistral()
    return _untyped.Flux2Pipeline(
        scheduler=schedulers.dynamic_flow(3.0), vae=vaes.flux2(),
        text_encoder=text_encoders.mistral3(tokenizer, layers=31), tokenizer=tokenizer,
        transformer=_flux2_transformer(guidance=True),
    )


def flux2_klein(distilled: bool = False) -> Any:
    """FLUX.2 klein: rows of layers 9, 18 and 27 of Qwen3; no guidance scale as an input."""
    tokenizer = tokenizers.qwen3()
    return _untyped.Flux2KleinPipeline(
        scheduler=schedulers.dynamic_flow(3.0), vae=vaes.flux2(),
        text_encoder=text_encoders.qwen3_with_head(tokenizer, layers=28), tokenizer=tokenizer,
        transformer=_flux2_transformer(guidance=False), is_distilled=distilled,
    )


def _flux2_transformer(*, guidance: bool) -> Any:
    return _untyped.Flux2Transformer2DModel(
        in_channels=128, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=3 * WIDTH, timestep_guidance_channels=16, axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance,
    )


def flux3(flow_map: bool = False) -> Any:
    """FLUX.3 klein-base: rows of layers 4, 8, … 32 of Qwen3-VL; the transformer has blocks for references. Without the
    prompt upsampler, as its documentation says to leave it out; `flow_map`: klein, which is told where a step ends.
    """
    tokenizer = tokenizers.qwen25_vl()
    kind = _untyped.Flux3DistilledModularPipeline if flow_map else _untyped.Flux3ModularPipeline
    blocks = getattr(_untyped, kind.default_blocks_name)()
    blocks.sub_blocks.pop("prompt_upsampler")
    pipeline = kind(blocks=blocks)
    pipeline.update_components(
        vae=vaes.flux2(), text_encoder=text_encoders.qwen3_vl_with_head(tokenizer, layers=33),
        tokenizer=tokenizers.qwen3_vl_processor(tokenizer), transformer=_untyped.Flux3Transformer2DModel(
            num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=8 * WIDTH, timestep_channels=16, axes_dims_rope=(4, 4, 4, 4), flow_map=flow_map))
    return pipeline
