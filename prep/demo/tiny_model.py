"""A complete, tiny Stable Diffusion 1.5 pipeline: VAE of factor 8, CLIP text encoder, two-level UNet, DDIM.

The demo ships a trained one (`pretrain.py`); tests make one with random weights in well under a second.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from safetensors.torch import load_file, save_file
from transformers import CLIPTextConfig, CLIPTextModel

from prep.demo.vocabulary import END, MAX_TOKENS, START, vocabulary, write_tokenizer

_untyped: Any = diffusers  # its constructors have no type annotations

_COMPONENTS: dict[str, Any] = {
    "feature_extractor": [None, None],
    "requires_safety_checker": False,
    "safety_checker": [None, None],
    "scheduler": ["diffusers", "DDIMScheduler"],
    "text_encoder": ["transformers", "CLIPTextModel"],
    "tokenizer": ["transformers", "CLIPTokenizer"],
    "unet": ["diffusers", "UNet2DConditionModel"],
    "vae": ["diffusers", "AutoencoderKL"],
}  # what StableDiffusionPipeline.save_pretrained writes into model_index.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Widths of the networks. Everything else is as in SD 1.5."""

    vae: tuple[int, int, int, int]  # channels of the VAE's four levels
    vae_layers: int  # residual blocks per level
    hidden: int  # width of the text encoder
    text_layers: int
    unet: tuple[int, int]  # channels of the UNet's two levels
    heads: int  # attention heads, in the UNet and in the text encoder
    groups: int  # groups of every group norm


RANDOM = Sizes(vae=(8, 8, 8, 8), vae_layers=1, hidden=32, text_layers=1, unet=(8, 16), heads=2, groups=4)
TINY = Sizes(vae=(16, 16, 24, 32), vae_layers=1, hidden=48, text_layers=2, unet=(32, 48), heads=4, groups=8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Networks:
    """The networks of one pipeline."""

    vae: Any
    text: Any
    unet: Any


def build_random(out: Path, seed: int = 0, *, sizes: Sizes = RANDOM) -> None:
    """Writes a pipeline with random weights that loads like any other: for tests, about 120,000 parameters."""
    write_pipeline(out, make_parts(sizes, seed=seed), dtype=torch.float32)


def make_parts(sizes: Sizes, *, seed: int) -> Networks:
    """Freshly initialized networks; the same for the same seed. Does not change the caller's random state."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return Networks(vae=_vae(sizes), text=_text(sizes), unet=_unet(sizes))


def write_pipeline(out: Path, parts: Networks, *, dtype: torch.dtype) -> None:
    """Writes `out` as a diffusers directory: weights stored as `dtype`, configs that request float32."""
    write_tokenizer(out / "tokenizer")
    scheduler().save_pretrained(out / "scheduler")
    for name, part in (("vae", parts.vae), ("text_encoder", parts.text), ("unet", parts.unet)):
        part.save_pretrained(out / name)
        _store_as(out / name, dtype)
        forget_origin(out / name / "config.json")
    index = {"_class_name": "StableDiffusionPipeline", "_diffusers_version": diffusers.__version__, **_COMPONENTS}
    (out / "model_index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _store_as(folder: Path, dtype: torch.dtype) -> None:
    """Rewrites the weights below `folder` as `dtype`, but not the config: transformers would then load them as `dtype`.

    The text encoder's tensors get the names that Stable Diffusion was published with: every transformers reads them.
    """
    prefix = "text_model." if folder.name == "text_encoder" else ""
    for path in folder.glob("*.safetensors"):
        weights = {prefix + name.removeprefix(prefix): value.to(dtype) for name, value in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})


def forget_origin(config: Path) -> None:
    """Removes `_name_or_path` from the network's config: it is a path of the maker's machine."""
    values = {key: value for key, value in json.loads(config.read_text(encoding="utf-8")).items()
              if key != "_name_or_path"}  # fmt: skip
    config.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def load_parts(folder: Path) -> Networks:
    """The networks of a written pipeline, in float32."""
    return Networks(
        vae=_untyped.AutoencoderKL.from_pretrained(folder / "vae", low_cpu_mem_usage=False),
        text=CLIPTextModel.from_pretrained(folder / "text_encoder"),
        unet=_untyped.UNet2DConditionModel.from_pretrained(folder / "unet", low_cpu_mem_usage=False),
    )


def scheduler() -> Any:
    """SD 1.5's noise schedule, sampled with DDIM from the last timestep."""
    return _untyped.DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", clip_sample=False,
        set_alpha_to_one=False, steps_offset=1, prediction_type="epsilon", timestep_spacing="trailing",
    )  # fmt: skip


def _vae(sizes: Sizes) -> Any:
    return _untyped.AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=sizes.vae, layers_per_block=sizes.vae_layers, latent_channels=4,
        norm_num_groups=sizes.groups, sample_size=96, scaling_factor=0.18215,
    )  # fmt: skip


def _text(sizes: Sizes) -> Any:
    tokens = vocabulary()
    return CLIPTextModel(CLIPTextConfig(
        vocab_size=len(tokens), hidden_size=sizes.hidden, intermediate_size=2 * sizes.hidden,
        projection_dim=sizes.hidden, num_hidden_layers=sizes.text_layers, num_attention_heads=sizes.heads,
        max_position_embeddings=MAX_TOKENS, bos_token_id=tokens.index(START), eos_token_id=tokens.index(END),
        pad_token_id=tokens.index(END),
    ))  # fmt: skip


def _unet(sizes: Sizes) -> Any:
    return _untyped.UNet2DConditionModel(
        sample_size=12, in_channels=4, out_channels=4, cross_attention_dim=sizes.hidden,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        block_out_channels=sizes.unet, layers_per_block=1, attention_head_dim=sizes.heads,
        norm_num_groups=sizes.groups,
    )  # fmt: skip
