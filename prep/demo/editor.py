"""A tiny FLUX.1 Kontext pipeline for the demo of pairs: a transformer that has learned nothing, beside the VAE and the
CLIP text encoder of the demo's shipped model.

The transformer's weights are random, but for what takes long to learn: half of its attention heads look at the same
place of the reference, as many do in trained models, and no layer's input is scaled or shifted yet (adaLN-zero, but
with open gates).
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from torch import Tensor

from prep.demo.shipped import SHIPPED
from prep.demo.tiny_model import forget_origin, load_parts
from prep.demo.vocabulary import COLORS, MAX_TOKENS

_untyped: Any = diffusers  # its constructors have no type annotations
_texts: Any = transformers

CHANNELS, LIVE = 16, 4  # of latents: those of the family, and those that the shipped VAE has
HEADS, WIDTH = 4, 32  # attention heads, and the numbers of one
LOOKING = 2  # of these heads
AXES = (8, 12, 12)  # numbers of a head by axis of positions: which picture, row, column
SHARPNESS = 1.5  # of where they look
_WORDS = ("paint", "it", *COLORS, "a", "the", "shape", "background", "as", "is", "keep")


def write_editor(out: Path, seed: int = 0) -> None:
    """Writes `out` as a diffusers directory; the same weights for the same seed and torch."""
    parts, tokenizer = load_parts(SHIPPED), _t5_tokenizer()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        pipeline = _untyped.FluxKontextPipeline(
            scheduler=_untyped.FlowMatchEulerDiscreteScheduler(), vae=_widened(parts.vae),
            text_encoder=parts.text, tokenizer=_texts.CLIPTokenizer.from_pretrained(SHIPPED / "tokenizer"),
            text_encoder_2=_t5(len(tokenizer)), tokenizer_2=tokenizer,
            transformer=_transformer(parts.text.config.hidden_size))
    pipeline.save_pretrained(out)
    for config in out.glob("*/config.json"):
        forget_origin(config)


def _widened(vae: Any) -> Any:
    """`vae` with `CHANNELS` channels in its latents: all after its own are zero, and nothing reads them."""
    wide = _untyped.AutoencoderKL(**{**vae.config, "latent_channels": CHANNELS, "shift_factor": 0.0})
    weights = wide.state_dict()
    for name, value in vae.state_dict().items():
        weights[name] = _filled(torch.zeros_like(weights[name]), value)
    weights["quant_conv.bias"][CHANNELS + LIVE:] = -20.0  # log of the variance
    wide.load_state_dict(weights)
    return wide


def _filled(wide: Tensor, value: Tensor) -> Tensor:
    """`wide` with `value` in its first channels: where it has both means and variances, in the first of each."""
    rows, columns = (_channels(wide.shape, value.shape, axis) for axis in (0, 1))
    if value.ndim == 1:
        wide[rows] = value
    else:
        wide[rows[:, None], columns[None]] = value
    return wide


def _channels(wide: tuple[int, ...], value: tuple[int, ...], axis: int) -> Tensor:
    """Where the channels of `value` on an axis are among those of `wide`."""
    if axis >= len(value):
        return torch.arange(0)
    places = torch.arange(value[axis])
    return torch.where(places < LIVE, places, places + CHANNELS - LIVE) if (
        value[axis] == 2 * LIVE and wide[axis] == 2 * CHANNELS) else places


def _t5_tokenizer() -> Any:
    """The words of the captions, and single characters for all others."""
    scored = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -10.0), ("\u2581", -4.0)]
    scored += [(f"\u2581{word}", -1.0) for word in _WORDS] + [(chr(code), -8.0) for code in range(33, 127)]
    return _texts.T5Tokenizer(vocab=scored, extra_ids=0, model_max_length=MAX_TOKENS)


def _t5(tokens: int) -> Any:
    """One layer of T5's encoder."""
    return _texts.T5EncoderModel(_texts.T5Config(
        vocab_size=tokens, d_model=WIDTH, d_kv=8, d_ff=2 * WIDTH, num_layers=1, num_heads=4,
        feed_forward_proj="gated-gelu", is_encoder_decoder=False))


def _transformer(pooled: int) -> Any:
    """A double and a single block, about 0.9 million weights; `pooled`: the numbers of CLIP's vector."""
    model = _untyped.FluxTransformer2DModel(
        patch_size=1, in_channels=4 * CHANNELS, num_layers=1, num_single_layers=1, attention_head_dim=WIDTH,
        num_attention_heads=HEADS, joint_attention_dim=WIDTH, pooled_projection_dim=pooled, axes_dims_rope=AXES,
        guidance_embeds=False)
    with torch.no_grad():
        for block in model.transformer_blocks:
            _open(block.norm1.linear, gates=(2, 5), of=6)
            _open(block.norm1_context.linear, gates=(2, 5), of=6)
            _look(block.attn)
        for block in model.single_transformer_blocks:
            _open(block.norm.linear, gates=(2,), of=3)
            _look(block.attn)
        model.norm_out.linear.weight.zero_()
        model.norm_out.linear.bias.zero_()
    return model


def _open(modulation: Any, *, gates: tuple[int, ...], of: int) -> None:
    """Lets a block pass on what it computes, whatever timestep and text are."""
    modulation.weight.zero_()
    modulation.bias.zero_()
    modulation.bias.view(of, -1)[list(gates)] = 1.0


def _look(attention: Any) -> None:
    """Turns the first heads to the token at the same row and column, one further on the axis of pictures.

    Rotary positions turn the pairs of numbers of queries and keys by angles that grow with the position, the first pair
    of each axis by 1 for each step. Where these are constant, their product depends on the distance alone, and is
    largest where the keys' angle less the queries' is that between the constants: 1 for pictures, 0 for rows, columns.
    """
    for layer, angle in ((attention.to_q, 1.0), (attention.to_k, 0.0)):
        layer.weight[:LOOKING * WIDTH] *= 0.1
        bias_HD = layer.bias.view(HEADS, WIDTH)[:LOOKING]
        bias_HD.zero_()
        bias_HD[:, 0], bias_HD[:, 1] = math.cos(angle), math.sin(angle)
        bias_HD[:, AXES[0]] = bias_HD[:, AXES[0] + AXES[1]] = 1.0
    attention.norm_q.weight.fill_(SHARPNESS)
    attention.norm_k.weight.fill_(SHARPNESS)
