"""PixArt Alpha and Sigma: T5 for the tokens, a transformer with masked cross-attention, and VAEs of SD and of SDXL.

They are two families: Alpha has learned from 120 tokens and has SD's VAE, Sigma from 300 and has SDXL's, so neither the
text rows nor the latents of one serve the other.

Sources: PixArt-alpha/PixArt-alpha configs/PixArt_xl2_internal.py (model_max_length 120, scale_factor 0.18215);
PixArt-alpha/PixArt-sigma configs/pixart_sigma_config (model_max_length 300, scale_factor 0.13025);
`encode_prompt` of both pipelines in diffusers 0.42, whose defaults are these lengths. The transformer takes patches of
2 × 2 latent cells. Cross-attention ignores padding, so rows are stored without it.

`encode_prompt` lower-cases captions. The pipelines' `clean_caption`, on by default, also removes words and signs, if
beautifulsoup4 and ftfy are installed; here it is always off, so that rows do not depend on installed packages. The keys
say so.

The transformer also predicts the variance.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from prep.models.configs import Configs
from prep.models.denoiser import padding
from prep.models.families import flux, sd15
from prep.models.family import (
    ATTENTION_MASK,
    Class,
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

if TYPE_CHECKING:
    from torch import Tensor


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of T5."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "d_model"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without padding."""
    hidden_BLD, mask_BL, _, _ = pipeline.encode_prompt(
        list(captions), do_classifier_free_guidance=False, device=device, clean_caption=False,
        max_sequence_length=options.max_length)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def _text(max_length: int) -> TextEncoding:
    return TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", padding_masked=True,
                        max_length=max_length, longest=max_length, shapes=shapes, encode=encode,
                        constants={"clean_caption": 0})


# ---- the denoiser ----------------------------------------------------------------------------------------------------


def predict(transformer: Any, noised_BChw: Tensor, timestep_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's noise: the first half of its answer, if that has variances too."""
    answer_BChw: Tensor = transformer(
        noised_BChw, encoder_hidden_states=conditions.text["hidden"], timestep=timestep_B,
        encoder_attention_mask=conditions.text[ATTENTION_MASK],
        added_cond_kwargs=_sizes(transformer, conditions.sizes_B6), return_dict=False)[0]
    return answer_BChw[:, :noised_BChw.shape[1]]


def _sizes(transformer: Any, sizes_B6: Tensor) -> Mapping[str, Tensor | None]:
    """The conditions of Alpha at 1024 pixels: the size of the picture [B, 2] and the aspect ratio of its bucket [B, 1].

    As its authors trained it (PixArt-alpha diffusion/data/datasets/InternalData_ms.py: img_hw is the file's height and
    width). Both stay float32: bfloat16 has no 1001, and the transformer embeds them before it casts.
    """
    if not transformer.use_additional_conditions:
        return {"resolution": None, "aspect_ratio": None}
    return {"resolution": sizes_B6[:, :2], "aspect_ratio": sizes_B6[:, 4:5] / sizes_B6[:, 5:6]}


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of both pipelines' `__call__`; without binning, which would make pictures of other sizes."""
    return {**padding.embeddings(prompted), "negative_prompt": None, "latents": prompted.latent_1Chw,
            "guidance_scale": prompted.guidance, "use_resolution_binning": False}


def prepare(pipeline: Any, _: Prompted) -> None:
    """Lets the pipeline make a picture in one step.

    Alpha's takes the second output of an only step, which few schedulers have: the clean latent that distilled models
    predict. It gets the first one there, too, where every other pipeline finds the latent after the last step.
    """
    scheduler = pipeline.scheduler
    if "step" in vars(scheduler):  # prepared for an earlier picture
        return
    own = scheduler.step

    @wraps(own)  # pipelines look at its signature
    def step(*values: Any, **options: Any) -> tuple[Any, ...]:
        after = own(*values, **options)[0]
        return after, after

    scheduler.step = step


# The scheduler of the published pipelines, and the default guidance of `__call__`.
SAMPLING = SamplePipeline(call=call, unpack=sd15.unpack, sampler="DPMSolverMultistepScheduler", guidance=4.5,
                          prepare=prepare)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

LORA = LoraLayers(presets=sd15.PRESETS, kohya=None, in_diffusers=False)  # layers are named as the UNet's


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS: Mapping[str, tuple[Class, ...]] = {
    "text_encoder": (("transformers", "T5EncoderModel"),),
    "tokenizer": flux.T5_TOKENIZERS,
    # Alpha was published before its transformer had a class of its own; diffusers loads both names as that class.
    "transformer": (("diffusers", "PixArtTransformer2DModel"), ("diffusers", "Transformer2DModel")),
    "vae": (("diffusers", "AutoencoderKL"),),
}
ALPHA = Family(
    name="pixart_alpha", models=("PixArt Alpha",), pipelines=("PixArtAlphaPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=4, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.18215",
    shift_factor="0", predictions=("epsilon",), text=_text(120), predict=predict, sampling=SAMPLING,
    lora=LORA,
    labels=Labels(architecture="pixart-alpha"),
    config_widths={"in_channels": ("latent", 1), "caption_channels": ("hidden", 1)},
)
SIGMA = Family(
    name="pixart_sigma", models=("PixArt Sigma",), pipelines=("PixArtSigmaPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=4, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.13025",
    shift_factor="0", predictions=("epsilon",), text=_text(300), predict=predict, sampling=SAMPLING,
    lora=LORA,
    labels=Labels(architecture="pixart-ms-sigma-xl-2"),
    config_widths={"in_channels": ("latent", 1), "caption_channels": ("hidden", 1)},
)
