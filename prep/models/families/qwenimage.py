"""Qwen-Image: the last layer of Qwen2.5-VL for the caption, and a VAE of video, of factor 8 with 16 channels.

Sources: `QwenImagePipeline` in diffusers 0.42: `encode_prompt` writes the caption into the template below, cuts off the
rows of its first 34 tokens, which are those before the caption, and keeps the five after it. Its `__call__` takes 512
tokens, `encode_prompt` at most 1024. `QwenImageTransformer2DModel` masks padding in every block, and its positions do
not depend on the length of the text, so rows are stored without padding. It takes patches of 2 × 2 latent cells.

The pipeline guides a picture only if it is given a negative prompt; " " is that of its authors' examples (QwenLM/
Qwen-Image, README), so it is the row without a prompt here.

The transformer takes packed latents.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser import packing, padding
from prep.models.denoiser.samplers import BY_SIGMAS, EULER
from prep.models.families import flux
from prep.models.family import (
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    SamplePipeline,
    Shape,
    TextEncoding,
    TextOptions,
    TextRow,
)
from prep.models.lora.kohya import Kohya

if TYPE_CHECKING:
    from torch import Tensor

TEMPLATE = ("<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, "
            "spatial relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n"
            "<|im_start|>assistant\n")
DROPPED = 34  # tokens of the template before the caption
NEGATIVE = " "


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]."""
    nested = ("text_config",) if isinstance(configs("text_encoder").get("text_config"), dict) else ()  # of new configs
    return {"hidden": (options.max_length, configs.width("text_encoder", *nested, "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without padding."""
    hidden_BLD, mask_BL = pipeline.encode_prompt(list(captions), device=device, max_sequence_length=options.max_length)
    if mask_BL is None:  # no row is shorter than another
        return [{"hidden": hidden_LD} for hidden_LD in hidden_BLD]
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def without_prompt(pipeline: Any, options: TextOptions, device: Any) -> TextRow:
    """The encoding of " "."""
    return encode(pipeline, [NEGATIVE], options, device)[0]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", max_length=512, longest=1024,
                    shapes=shapes, encode=encode, without_prompt=without_prompt,
                    constants={"template": TEMPLATE, "dropped": DROPPED, "negative": NEGATIVE})


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, unpacked. It multiplies sigma by 1000 itself. A picture has one frame."""
    count, _, height, width = noised_BChw.shape
    hidden_BLD, mask_BL = padding.cut(conditions.text, "hidden")
    shape = (1, height // packing.PATCH, width // packing.PATCH)
    given = append({"hidden_states": packing.pack(noised_BChw), "img_shapes": [[shape]] * count}, conditions.references)
    packed = transformer(**given, timestep=sigma_B, encoder_hidden_states=hidden_BLD,
                         encoder_hidden_states_mask=mask_BL, return_dict=False)[0]
    return packing.unpack(packed[:, :shape[1] * shape[2]], (width, height))


def append(given: Mapping[str, Any], references: Sequence[Tensor]) -> Mapping[str, Any]:
    """The transformer's arguments with references [B, C, h, w] behind the noise, for models that take them."""
    if not references:
        return given
    shapes = [(1, latent.shape[-2] // packing.PATCH, latent.shape[-1] // packing.PATCH) for latent in references]
    return {**given, "img_shapes": [[*sample, *shapes] for sample in given["img_shapes"]],
            "hidden_states": packing.joined(given["hidden_states"], [packing.pack(latent) for latent in references])}


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `QwenImagePipeline.__call__`. Rows of one picture need no mask."""
    (positive, _), (negative, _) = (padding.cut(text, "hidden") for text in (prompted.positive, prompted.negative))
    return {"prompt_embeds": positive, "negative_prompt_embeds": negative, "true_cfg_scale": prompted.guidance,
            "latents": packing.pack(prompted.latent_1Chw)}


SAMPLING = SamplePipeline(call=call, unpack=flux.unpack, sampler=EULER, solvers=BY_SIGMAS,
                          guidance=4.0)  # the pipeline's default true_cfg_scale


# ---- LoRA ------------------------------------------------------------------------------------------------------------

PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the joint attention.
    "attention": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
    # With the feed-forward layers of both streams; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out",
                   "img_mlp.net.0.proj", "img_mlp.net.2", "txt_mlp.net.0.proj", "txt_mlp.net.2"),
}
LORA = LoraLayers(presets=PRESETS, kohya=Kohya(usual=True))  # the authors name layers as diffusers does


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "Qwen2_5_VLForConditionalGeneration"),),
    "tokenizer": (("transformers", "Qwen2Tokenizer"), ("transformers", "Qwen2TokenizerFast")),
    "transformer": (("diffusers", "QwenImageTransformer2DModel"),),
    "vae": (("diffusers", "AutoencoderKLQwenImage"),),
}
FAMILY = Family(
    name="qwenimage", models=("Qwen-Image",), pipelines=("QwenImagePipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1",
    shift_factor="0", predictions=("flow",), text=TEXT, predict=predict, chooses_attention=True, sampling=SAMPLING,
    lora=LORA,
    labels=Labels(architecture="qwen-image", version="qwen_image"),
    config_widths={"in_channels": ("latent", 4), "joint_attention_dim": ("hidden", 1)},
)
