"""Pipelines of published sizes with random weights, written a tensor at a time: no more memory than the largest takes.

    build("sdxl", folder)                             # a pipeline directory with its denoiser alone
    build("sdxl", folder, parts=("vae", "text"))      # with its VAE, text encoders and tokenizers

Configs are those of the published models, which diffusers has as defaults for FLUX.1 and Z-Image. Values are drawn from
a small pool: what is measured depends on bytes and shapes alone. Tokenizers are those of `tiny_pipelines`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import diffusers
import torch
import transformers
from original_checkpoints import unet_name
from original_layout import ZIMAGE, published
from safetensors.torch import load_file
from tiny_pipelines import tokenizers
from torch import Tensor

from prep.models.checkpoints.stored import write

_untyped: Any = diffusers  # its constructors have no type annotations

POOL = 1 << 22  # random numbers
STEP = 1 << 16  # by which the next tensor begins later in the pool
DEVIATION = 0.02
SHARD = 10_000_000_000  # bytes of a file of weights at most


@dataclass(frozen=True, kw_only=True)
class Size:
    """A published model."""

    pipeline: str
    part: str  # the denoiser's
    kind: str  # its class in diffusers
    config: Mapping[str, Any]
    scheduler: tuple[str, Mapping[str, Any]]
    vae: Mapping[str, Any]  # what differs from the VAE of SD1.5
    text: Mapping[str, tuple[str, Mapping[str, Any]]]  # encoders: class and config
    tokenizers: Mapping[str, Callable[[], Any]]
    dtype: torch.dtype = torch.bfloat16  # of the file, as it is published
    variant: str = ""


_BETAS = {"num_train_timesteps": 1000, "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}
_VAE = {"sample_size": 512, "latent_channels": 4, "scaling_factor": 0.18215, "block_out_channels": (128, 256, 512, 512),
        "layers_per_block": 2, "down_block_types": ("DownEncoderBlock2D",) * 4,
        "up_block_types": ("UpDecoderBlock2D",) * 4}
_OF_FLUX = {"latent_channels": 16, "scaling_factor": 0.3611, "shift_factor": 0.1159, "sample_size": 1024,
            "use_quant_conv": False, "use_post_quant_conv": False}
_CLIP_L = ("CLIPTextModel", {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12,
                             "num_attention_heads": 12, "projection_dim": 768, "vocab_size": 49408, "eos_token_id": 2})
_CLIP_G = ("CLIPTextModelWithProjection", {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_attention_heads": 20,
    "projection_dim": 1280, "vocab_size": 49408, "hidden_act": "gelu", "eos_token_id": 2})
_T5_XXL = ("T5EncoderModel", {"d_model": 4096, "d_kv": 64, "d_ff": 10240, "num_layers": 24, "num_heads": 64,
                              "vocab_size": 32128, "feed_forward_proj": "gated-gelu", "is_encoder_decoder": False})
_QWEN3_4B = ("Qwen3Model", {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "head_dim": 128,
                            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 151936})
SIZES: Mapping[str, Size] = {
    "sd15": Size(pipeline="StableDiffusionPipeline", part="unet", kind="UNet2DConditionModel", variant="fp16",
                 dtype=torch.float16, scheduler=("PNDMScheduler", _BETAS | {"steps_offset": 1, "skip_prk_steps": True}),
                 config={"sample_size": 64, "cross_attention_dim": 768, "attention_head_dim": 8}, vae={},
                 text={"text_encoder": _CLIP_L}, tokenizers={"tokenizer": tokenizers.clip}),
    "sdxl": Size(pipeline="StableDiffusionXLPipeline", part="unet", kind="UNet2DConditionModel", variant="fp16",
                 dtype=torch.float16, scheduler=("EulerDiscreteScheduler", _BETAS | {"steps_offset": 1}),
                 config={"sample_size": 128, "block_out_channels": (320, 640, 1280), "cross_attention_dim": 2048,
                         "attention_head_dim": (5, 10, 20), "use_linear_projection": True,
                         "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
                         "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
                         "transformer_layers_per_block": (1, 2, 10), "addition_embed_type": "text_time",
                         "addition_time_embed_dim": 256, "projection_class_embeddings_input_dim": 2816},
                 vae={"sample_size": 1024, "scaling_factor": 0.13025, "force_upcast": True},
                 text={"text_encoder": _CLIP_L, "text_encoder_2": _CLIP_G},
                 tokenizers={"tokenizer": tokenizers.clip, "tokenizer_2": tokenizers.open_clip}),
    "zimage": Size(pipeline="ZImagePipeline", part="transformer", kind="ZImageTransformer2DModel", config={},
                   scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0}), vae=_OF_FLUX,
                   text={"text_encoder": _QWEN3_4B}, tokenizers={"tokenizer": tokenizers.qwen3}),
    "flux": Size(pipeline="FluxPipeline", part="transformer", kind="FluxTransformer2DModel",
                 config={"guidance_embeds": True},
                 scheduler=("FlowMatchEulerDiscreteScheduler", {"shift": 3.0, "use_dynamic_shifting": True}),
                 vae=_OF_FLUX, text={"text_encoder": _CLIP_L, "text_encoder_2": _T5_XXL},
                 tokenizers={"tokenizer": tokenizers.clip, "tokenizer_2": tokenizers.t5}),
}


def build(name: str, folder: Path, *, parts: Iterable[str] = ("denoiser",), **changes: Any) -> Path:
    """Writes the pipeline `name` of `SIZES` with these `parts`: denoiser, vae or text; returns `folder`.

    Of the denoiser, there is the config in any case, with these `changes`.
    """
    size, wanted = SIZES[name], set(parts)
    folder.mkdir(parents=True)
    kind, options = size.scheduler
    index = {"_class_name": size.pipeline, "scheduler": ["diffusers", kind]}
    with torch.device("meta"):
        models = {size.part: getattr(diffusers, size.kind)(**{**size.config, **changes})}
        if "vae" in wanted:
            models["vae"] = _untyped.AutoencoderKL(**{**_VAE, **size.vae})
        for part, (encoder, config) in size.text.items() if "text" in wanted else ():
            made = getattr(transformers, encoder)
            models[part] = made(made.config_class(**config))
    for part, model in models.items():
        index[part] = ["diffusers" if hasattr(model, "save_config") else "transformers", type(model).__name__]
        save(model, folder / part, size.dtype, size.variant, weights=part != size.part or "denoiser" in wanted)
    for part, make in size.tokenizers.items() if "text" in wanted else ():
        tokenizer = make()
        tokenizer.save_pretrained(folder / part)
        index[part] = ["transformers", type(tokenizer).__name__]
    (folder / "scheduler").mkdir()
    _write(folder / "scheduler" / "scheduler_config.json", {"_class_name": kind, **options})
    _write(folder / "model_index.json", index)
    return folder


def in_one_file(folder: Path, path: Path) -> str:
    """The denoiser of a pipeline directory in the file `path`, in its authors' names; how --model names that."""
    part = next(one for one in ("unet", "transformer") if (folder / one).is_dir())
    config = json.loads((folder / part / "config.json").read_text())
    weights = {name: value for file in sorted((folder / part).glob("*.safetensors"))
               for name, value in load_file(file).items()}
    if part == "unet":
        blocks, layers = len(config["block_out_channels"]), config["layers_per_block"]
        theirs = {unet_name(name, layers, blocks, config): value for name, value in weights.items()}
    else:
        theirs = published(weights, {"ZImageTransformer2DModel": ZIMAGE}[config["_class_name"]])
    found = {f"model.diffusion_model.{name}": value for name, value in theirs.items()}
    write(path, {name: (value.dtype, tuple(value.shape)) for name, value in found.items()}, iter(found.values()))
    return f"{path}@{folder}"


def save(model: Any, folder: Path, dtype: torch.dtype, variant: str = "", *, weights: bool = True) -> None:
    """Writes a model that is on the meta device, with random weights if at all, in files as libraries split them."""
    folder.mkdir(parents=True)
    of_diffusers = hasattr(model, "save_config")
    (model.save_config if of_diffusers else model.config.save_pretrained)(folder)
    if not weights:
        return
    tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - dict(model.named_parameters()).keys()
    shapes = {name: tuple(value.shape) for name, value in sorted(model.state_dict().items()) if name not in tied}
    files: list[dict[str, tuple[int, ...]]] = [{}]
    left = SHARD
    for name, shape in shapes.items():
        size = torch.Size(shape).numel() * dtype.itemsize
        if size > left:
            files.append({})
            left = SHARD
        files[-1][name] = shape
        left -= size
    draw = _draws(dtype)
    stem, dot = "diffusion_pytorch_model" if of_diffusers else "model", variant and f".{variant}"
    names = [f"{stem}{dot}.safetensors"] if len(files) == 1 else [
        f"{stem}{dot}-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    for name, part in zip(names, files, strict=True):
        write(folder / name, {key: (dtype, shape) for key, shape in part.items()}, map(draw, part.values()))
    if len(files) > 1:
        placed = {key: name for name, part in zip(names, files, strict=True) for key in part}
        _write(folder / f"{stem}.safetensors.index{dot}.json", {"metadata": {}, "weight_map": placed})


def _draws(dtype: torch.dtype) -> Callable[[tuple[int, ...]], Tensor]:
    """What draws a tensor of a shape, each from another place of the pool."""
    pool = (torch.randn(POOL, generator=torch.Generator().manual_seed(0)) * DEVIATION).to(dtype).repeat(2)
    starts = count(0, STEP)

    def draw(shape: tuple[int, ...]) -> Tensor:
        numbers, turned = torch.Size(shape).numel(), pool[next(starts) % POOL:][:POOL]
        return turned.repeat(-(-numbers // POOL))[:numbers].reshape(shape)

    return draw


def _write(path: Path, body: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(body, indent=2))
