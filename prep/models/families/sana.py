"""SANA: the last layer of Gemma 2 for the tokens, and a deep compression autoencoder of factor 32 with 32 channels.

Sources: `SanaPipeline.encode_prompt` in diffusers 0.42, which lower-cases captions and pads them on the right. Its
`__call__` writes an instruction of eight lines before each prompt, but before no negative prompt; of the instruction's
tokens the row keeps the first and the last, and then has those of the caption: 300 in all. Cross-attention ignores
padding, so rows are stored without it. `clean_caption` is always off, as by default there; it depends on installed
packages. The keys say both.

The autoencoder has no posterior: it encodes a picture to one latent. scaling_factor 0.41407 is that of
Efficient-Large-Model/Sana_1600M_1024px_diffusers. The transformer takes each latent cell as a token.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.digest import digest_bytes
from prep.errors import ModelError
from prep.models.configs import Configs
from prep.models.denoiser import padding
from prep.models.denoiser.samplers import BY_STEPS, EULER
from prep.models.families import sd15
from prep.models.family import (
    ATTENTION_MASK,
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

# SHA-256 of the instruction in diffusers 0.42, its lines joined by newlines.
INSTRUCTION = "48290080bb4fd4a264bdc81d0647ac0221359a36506e2b3e954616d6cb48c3da"


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel] of Gemma."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, after the instruction, without padding."""
    return _rows(pipeline, captions, options, device, _instruction(pipeline))


def negative(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per negative prompt, which gets no instruction."""
    return _rows(pipeline, captions, options, device, None)


def _rows(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any,
          instruction: list[str] | None) -> Sequence[TextRow]:
    hidden_BLD, mask_BL, _, _ = pipeline.encode_prompt(
        list(captions), do_classifier_free_guidance=False, device=device, clean_caption=False,
        max_sequence_length=options.max_length, complex_human_instruction=instruction)
    return [{"hidden": hidden[mask.bool()]} for hidden, mask in zip(hidden_BLD, mask_BL, strict=True)]


def _instruction(pipeline: Any) -> list[str]:
    """The default of the pipeline's `__call__`. Raises `ModelError` if it is not the one that the keys name."""
    lines: list[str] = inspect.signature(type(pipeline).__call__).parameters["complex_human_instruction"].default
    if digest_bytes("\n".join(lines).encode()) != INSTRUCTION:
        raise ModelError("the installed diffusers has another instruction for SANA than diffusers 0.42, with which "
                         "captions are encoded", hint="install the version that Latentry knows: pip install "
                         "'diffusers==0.42.*'")
    return lines


TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", padding_masked=True,
                    max_length=300, longest=300, shapes=shapes, encode=encode,
                    negative=negative, constants={"clean_caption": 0, "instruction": INSTRUCTION})


# ---- the denoiser ----------------------------------------------------------------------------------------------------

TIMESTEPS = 1000  # of the published schedules


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity; it takes the time of the schedule, times a number of its config."""
    answer_BChw: Tensor = transformer(
        noised_BChw, encoder_hidden_states=conditions.text["hidden"],
        encoder_attention_mask=conditions.text[ATTENTION_MASK],
        timestep=sigma_B * TIMESTEPS * transformer.config.timestep_scale, return_dict=False)[0]
    return answer_BChw


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `SanaPipeline.__call__`; without binning, which would make pictures of other sizes."""
    return {**padding.embeddings(prompted), "negative_prompt": None, "latents": prompted.latent_1Chw,
            "guidance_scale": prompted.guidance, "use_resolution_binning": False}


# Euler steps along the flow, for pictures that the trained velocity alone decides; the published scheduler has its
# shift under another name, which `load_scheduler` knows.
SAMPLING = SamplePipeline(call=call, unpack=sd15.unpack, sampler=EULER, solvers=BY_STEPS, guidance=4.5)


# ---- LoRA ------------------------------------------------------------------------------------------------------------

PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # With the feed-forward layers, which are convolutions of 1 x 1; not the one of 3 x 3 channel by channel.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "conv_inverted", "conv_point"),
}
LORA = LoraLayers(presets=PRESETS, kohya=None, in_comfyui=False)


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "Gemma2Model"),),
    "tokenizer": (("transformers", "GemmaTokenizer"), ("transformers", "GemmaTokenizerFast")),
    "transformer": (("diffusers", "SanaTransformer2DModel"),),
    "vae": (("diffusers", "AutoencoderDC"),),
}
FAMILY = Family(
    name="sana", models=("SANA 1.0", "SANA 1.5"), pipelines=("SanaPipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=32, factor=32, patch=1, step=64, resolution=1024, scaling_factor="0.41407",
    shift_factor="0", predictions=("flow",), text=TEXT, predict=predict, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="sana"),
    config_widths={"in_channels": ("latent", 1), "caption_channels": ("hidden", 1)},
)
