"""Text encoders a few dozen channels wide, with the structure of the published ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import transformers

_untyped: Any = transformers  # older releases lack some of the classes: they are looked up when a pipeline is built

WIDTH = 32  # channels of the hidden states, unless a family needs others


def clip(tokenizer: Any, *, positions: int = 77) -> Any:
    """CLIP's text model, three layers: pipelines take the last but one, or the last."""
    return _untyped.CLIPTextModel(_clip_config(tokenizer, positions))


def projected_clip(tokenizer: Any, *, positions: int = 77, width: int = WIDTH) -> Any:
    """CLIP's text model with the projection of the pooled output, which is as wide as the rest."""
    return _untyped.CLIPTextModelWithProjection(_clip_config(tokenizer, positions, width))


def _clip_config(tokenizer: Any, positions: int, width: int = WIDTH) -> Any:
    return _untyped.CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=width, intermediate_size=2 * width, projection_dim=width,
        num_hidden_layers=3, num_attention_heads=4, max_position_embeddings=positions,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def t5(tokenizer: Any, *, width: int = WIDTH) -> Any:
    """T5's encoder."""
    return _untyped.T5EncoderModel(_untyped.T5Config(**_t5_sizes(tokenizer, width)))


def umt5(tokenizer: Any) -> Any:
    """UMT5's encoder: T5's, with position biases of every layer's own."""
    return _untyped.UMT5EncoderModel(_untyped.UMT5Config(**_t5_sizes(tokenizer, WIDTH)))


def _t5_sizes(tokenizer: Any, width: int) -> dict[str, Any]:
    return {"vocab_size": len(tokenizer), "d_model": width, "d_kv": 8, "d_ff": 2 * width, "num_layers": 2,
            "num_heads": 4, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": False}


def language_model_sizes(tokenizer: Any, *, layers: int) -> dict[str, Any]:
    """What the configs of decoder-only language models have in common."""
    return {"vocab_size": len(tokenizer), "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 2,
            "max_position_embeddings": 8192, "bos_token_id": None, "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id}


def chatglm(tokenizer: Any) -> Any:
    """ChatGLM3, of which diffusers has a model of its own; two groups of keys and values."""
    from diffusers.pipelines.kolors.text_encoder import ChatGLMConfig, ChatGLMModel

    made = ChatGLMModel(ChatGLMConfig(
        num_layers=3, padded_vocab_size=tokenizer.vocab_size, hidden_size=WIDTH, ffn_hidden_size=2 * WIDTH,
        kv_channels=8, num_attention_heads=4, multi_query_attention=True, multi_query_group_num=2, add_qkv_bias=True,
        original_rope=True, seq_length=512, auto_map={"AutoModel": "modeling_chatglm.ChatGLMModel"},
    ), empty_init=False)
    for module in made.modules():
        if hasattr(module, "eps"):  # a norm, whose weights nothing has set
            torch.nn.init.normal_(module.weight, 1.0, 0.1)
    return made


def qwen3(tokenizer: Any, *, layers: int = 3) -> Any:
    """Qwen3 without the head that predicts tokens."""
    return _untyped.Qwen3Model(_untyped.Qwen3Config(head_dim=8, **language_model_sizes(tokenizer, layers=layers)))


def qwen3_with_head(tokenizer: Any, *, layers: int) -> Any:
    """Qwen3 with the head that predicts tokens, as FLUX.2 klein is published."""
    sizes = language_model_sizes(tokenizer, layers=layers)
    return _untyped.Qwen3ForCausalLM(_untyped.Qwen3Config(head_dim=8, **sizes))


def gemma2(tokenizer: Any) -> Any:
    """Gemma 2, which starts texts with <bos>."""
    sizes = language_model_sizes(tokenizer, layers=3) | {"bos_token_id": tokenizer.bos_token_id}
    return _untyped.Gemma2Model(_untyped.Gemma2Config(head_dim=8, query_pre_attn_scalar=8, **sizes))


def llama(tokenizer: Any) -> Any:
    """Llama with the head that predicts tokens, as HiDream loads it."""
    sizes = language_model_sizes(tokenizer, layers=3)
    return _untyped.LlamaForCausalLM(_untyped.LlamaConfig(**sizes))


def glm(tokenizer: Any) -> Any:
    """GLM; its config lists the tokens that end a text."""
    sizes = language_model_sizes(tokenizer, layers=3) | {"eos_token_id": [tokenizer.eos_token_id]}
    return _untyped.GlmModel(_untyped.GlmConfig(head_dim=8, **sizes))


# ---- models that see pictures, too; of these, pipelines from text use the language part --------------------------


def qwen25_vl(tokenizer: Any, *, patch: int = 2) -> Any:
    """Qwen2.5-VL: its positions have three axes, whose sections add up to half the width of a head."""
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 1_000_000.0}
    text = language_model_sizes(tokenizer, layers=2) | {"rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH,
              "patch_size": patch, "fullatt_block_indexes": [0]}
    config = _untyped.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_marks(tokenizer))
    return _untyped.Qwen2_5_VLForConditionalGeneration(config)


def _marks(tokenizer: Any) -> dict[str, int]:
    """The tokens around pictures, if a tokenizer has them."""
    marks = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{word}|>") for name, word in (
        ("image", "image_pad"), ("video", "video_pad"), ("vision_start", "vision_start"), ("vision_end", "vision_end"))}
    return {name: token for name, token in marks.items() if token is not None}


def qwen3_vl(tokenizer: Any) -> Any:
    """Qwen3-VL without its head, six layers: Krea 2 stacks three of them."""
    return _untyped.Qwen3VLModel(_qwen3_vl_config(tokenizer, layers=6, patch=2))


def qwen3_vl_with_head(tokenizer: Any, *, layers: int = 2) -> Any:
    """Qwen3-VL with its head, and with a layer that is given features of pictures, as Qwen-Image-2.1 is published."""
    return _untyped.Qwen3VLForConditionalGeneration(_qwen3_vl_config(tokenizer, layers=layers, patch=16, deep=[0]))


def _qwen3_vl_config(tokenizer: Any, *, layers: int, patch: int, deep: Sequence[int] = ()) -> Any:
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 5_000_000.0}
    text = language_model_sizes(tokenizer, layers=layers) | {"head_dim": 8, "rope_parameters": rope}
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": WIDTH,
              "patch_size": patch, "num_position_embeddings": 16, "deepstack_visual_indexes": [*deep]}
    return _untyped.Qwen3VLConfig(text_config=text, vision_config=vision, **_marks(tokenizer))


def mistral3(tokenizer: Any, *, layers: int) -> Any:
    """Mistral 3 with its head; `.model` is the part without it."""
    text = language_model_sizes(tokenizer, layers=layers)
    text |= {"model_type": "mistral", "head_dim": 8, "sliding_window": None}
    vision = {"model_type": "pixtral", "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
              "num_attention_heads": 2, "head_dim": 8, "image_size": 28, "patch_size": 14}
    config = _untyped.Mistral3Config(text_config=text, vision_config=vision, image_token_index=0)
    return _untyped.Mistral3ForConditionalGeneration(config)
