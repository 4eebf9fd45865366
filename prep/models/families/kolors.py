"""Kolors: SDXL's UNet and VAE, with ChatGLM3 for the tokens of a caption and for the pooled vector.

Sources: `KolorsPipeline` in diffusers 0.42. Its `encode_prompt` pads captions on the left to 256 tokens, the most that
it allows. It returns the states before ChatGLM's last layer (`hidden_states[-2]`) and, as pooled vector, that of the
last token after it (`hidden_states[-1][-1]`), both without the final norm. ChatGLM masks the padding and counts
positions from the first token of the text. The UNet has no mask, so its states of padding are part of a row. Sizes are
given as to SDXL's.

Without a negative prompt the pipeline encodes "", or fails, if its `force_zeros_for_empty_prompt` is set: it would have
no pooled vector. So that is not read here.

The UNet projects states of ChatGLM to the width of its attention (`encoder_hid_proj`). Its schedule has 1100 levels of
noise, as Kwai-Kolors/Kolors-diffusers has it; all is read from the scheduler's config.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from prep.models.configs import Configs
from prep.models.families import sd15, sdxl
from prep.models.family import Family, Labels, Shape, TextEncoding, TextOptions, TextRow
from prep.models.files import KOLORS


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] and `pooled` [channel] of ChatGLM."""
    width = configs.width("text_encoder", "hidden_size")
    return {"hidden": (options.max_length, width), "pooled": (width,)}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` and one `pooled` per caption."""
    hidden_BLD, _, pooled_BD, _ = pipeline.encode_prompt(
        prompt=list(captions), device=device, do_classifier_free_guidance=False,
        max_sequence_length=options.max_length)
    return [{"hidden": hidden, "pooled": pooled} for hidden, pooled in zip(hidden_BLD, pooled_BD, strict=True)]


TEXT = TextEncoding(arrays={"hidden": ("token", "channel"), "pooled": ("channel",)}, layout="full", max_length=256,
                    longest=256, shapes=shapes, encode=encode)

# Programs of others have no names of their own for it: sd-scripts does not train it, and ComfyUI does not know it.
LORA = replace(sd15.LORA, kohya=None, in_comfyui=False)

COMPONENTS = {
    **sd15.COMPONENTS,
    "text_encoder": ((KOLORS, "ChatGLMModel"),),
    "tokenizer": ((KOLORS, "ChatGLMTokenizer"),),
}
FAMILY = Family(
    name="kolors", models=("Kolors",), pipelines=("KolorsPipeline",), denoiser="unet", components=COMPONENTS,
    library="sentencepiece", latent_channels=4, factor=8, patch=1, step=64, resolution=1024, scaling_factor="0.13025",
    shift_factor="0", predictions=("epsilon", "v_prediction"), upcasts_vae=True, text=TEXT, predict=sdxl.predict,
    sampling=sdxl.SAMPLING, lora=LORA, labels=Labels(architecture="kolors"),
    config_widths={"in_channels": ("latent", 1), "encoder_hid_dim": ("hidden", 1)},
)
