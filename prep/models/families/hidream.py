"""HiDream-I1: two CLIPs for a pooled vector, T5 and layers of Llama 3.1 for the tokens, and FLUX.1's VAE.

Sources: `HiDreamImagePipeline.encode_prompt` in diffusers 0.42: 128 tokens of each encoder; no attention has a mask for
them, so padding is part of a row. It returns every layer of Llama; rows hold only those that the transformer's config
lists, each once. That is most of them: a row has 34 MB in half precision. The transformer takes patches of 2 × 2 latent
cells. The model is published without Llama: the directory must have it, as `pipeline.save_pretrained` writes it.

The transformer has experts. B samples, N layers of Llama, L tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import sqrt
from typing import TYPE_CHECKING, Any

from prep.errors import ModelError
from prep.models.configs import Configs
from prep.models.denoiser.samplers import BY_SHIFT, EULER, UNIPC
from prep.models.families import flux, sd3, sd15
from prep.models.family import (
    Conditions,
    Family,
    Labels,
    LoraLayers,
    Prompted,
    SamplePipeline,
    Shape,
    TextArrays,
    TextEncoding,
    TextOptions,
    TextRow,
)
from prep.models.lora.kohya import Kohya
from prep.parse import brief

if TYPE_CHECKING:
    from torch import Tensor

LAYERS, LLAMA = "llama_layers", "text_encoder_4"
MOST_LAYERS = 128  # that a config may list; the published ones list 48


def layers_of(listed: Any) -> list[int]:
    """The layers of Llama that the value `llama_layers` of a transformer's config names, each once, sorted.

    Of a pipeline without its transformer, the value is text. Raises `ValueError`.
    """
    layers = listed.split(",") if isinstance(listed, str) else listed
    if not isinstance(layers, list) or not 1 <= len(layers) <= MOST_LAYERS:
        raise ValueError
    return sorted({int(layer) for layer in layers})


def denoiser_config(configs: Configs) -> Mapping[str, str]:
    """The layers of Llama in rows. Raises `ModelError` if the config does not say, or if there is no Llama."""
    if not configs.has(LLAMA):
        raise ModelError(f"{configs.model} has no {LLAMA}, which HiDream is published without",
                         hint="load the pipeline with text_encoder_4 and tokenizer_4 of Llama 3.1 8B Instruct, and "
                         "save it: pipeline.save_pretrained(DIR)")
    listed = configs("transformer").get(LAYERS)
    most = configs.width(LLAMA, "num_hidden_layers")
    try:
        layers = layers_of(listed if isinstance(listed, list) else None)
        if not all(0 <= layer < most for layer in layers):
            raise ValueError
    except (ValueError, TypeError):
        raise ModelError(f"{configs.model / 'transformer' / 'config.json'} has {LAYERS} {brief(listed)}, expected "
                         f"layers from 0 to {most - 1}") from None
    return {LAYERS: ",".join(map(str, layers))}


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`t5` [token, channel], `llama` [layer, token, channel] and `pooled` [channel] of both CLIPs."""
    layers = len(layers_of(denoiser_config(configs)[LAYERS]))
    pooled = sum(configs.width(name, "projection_dim") for name in ("text_encoder", "text_encoder_2"))
    return {"t5": (options.max_length, configs.width("text_encoder_3", "d_model")),
            "llama": (layers, options.max_length, configs.width(LLAMA, "hidden_size")), "pooled": (pooled,)}


def largest_area(config: Mapping[str, Any]) -> int | None:
    """Pixels of a picture that is not square: the transformer pads its patches to as many as `max_resolution` has."""
    sides = config.get("max_resolution", [128, 128])
    usable = isinstance(sides, list) and len(sides) == 2 and all(type(side) is int and side > 0 for side in sides)
    return sides[0] * sides[1] * 8 * 8 if usable else None


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """The arrays of each caption; all encoders read the same text."""
    t5_BLD, _, llama_NBLD, _, pooled_BD, _ = pipeline.encode_prompt(
        prompt=list(captions), device=device, do_classifier_free_guidance=False,
        max_sequence_length=options.max_length)
    llama_BNLD = llama_NBLD[layers_of(pipeline.transformer.config.llama_layers)].transpose(0, 1)
    return [{"t5": t5, "llama": llama, "pooled": pooled}
            for t5, llama, pooled in zip(t5_BLD, llama_BNLD, pooled_BD, strict=True)]


TEXT = TextEncoding(arrays={"t5": ("token", "channel"), "llama": ("layer", "token", "channel"), "pooled": ("channel",)},
                    layout="full", max_length=128, longest=128, shapes=shapes, encode=encode,
                    denoiser_config=denoiser_config)


# ---- the denoiser ----------------------------------------------------------------------------------------------------

TIMESTEPS = 1000  # of the published schedules: the transformer takes sigma times this
PATCH, FACTOR = 2, 8


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The velocity: the transformer returns its negative. Neither the attention nor the text has a mask."""
    answer: Tensor = transformer(
        hidden_states=noised_BChw, timesteps=sigma_B * TIMESTEPS, encoder_hidden_states_t5=conditions.text["t5"],
        encoder_hidden_states_llama3=_by_layer(transformer, conditions.text), pooled_embeds=conditions.text["pooled"],
        return_dict=False)[0]
    in_patches = transformer.training and not transformer.config.force_inference_output
    return -(_whole(answer, noised_BChw) if in_patches else answer)


def _by_layer(transformer: Any, text: TextArrays) -> Tensor:
    """[N, B, L, D], where each stored layer is at its own number, as the transformer looks it up; zeros elsewhere."""
    layers, llama_BNLD = layers_of(transformer.config.llama_layers), text["llama"]
    placed = llama_BNLD.new_zeros((layers[-1] + 1, llama_BNLD.shape[0], *llama_BNLD.shape[2:]))
    placed[layers] = llama_BNLD.transpose(0, 1)
    return placed


def _whole(answer_BCNP: Tensor, like_BChw: Tensor) -> Tensor:
    """[B, C, h, w] of patches [B, C, N, 4]: in training the transformer does not put them together.

    Of a latent that is not square, patches beyond its own are padding.
    """
    count, channels, height, width = like_BChw.shape
    rows, columns = height // PATCH, width // PATCH
    parts = answer_BCNP[:, :, :rows * columns].reshape(count, channels, rows, columns, PATCH, PATCH)
    return parts.permute(0, 1, 2, 4, 3, 5).reshape(count, channels, height, width)


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `HiDreamImagePipeline.__call__`."""
    arguments = {"latents": prompted.latent_1Chw, "guidance_scale": prompted.guidance}
    for prefix, text in (("", prompted.positive), ("negative_", prompted.negative)):
        arguments |= {f"{prefix}prompt_embeds_t5": text["t5"], f"{prefix}pooled_prompt_embeds": text["pooled"],
                      f"{prefix}prompt_embeds_llama3": _by_layer(transformer, text)}
    return arguments


def prepare(pipeline: Any, prompted: Prompted) -> None:
    """Lets the pipeline make a picture of its size: it gives each picture the area of a square of its default size.

    It rounds down, so the square is a billionth larger.
    """
    pipeline.default_sample_size = sqrt(prompted.size[0] * prompted.size[1]) * (1 + 1e-9) / FACTOR


SAMPLING = SamplePipeline(
    call=call, unpack=sd15.unpack, sampler=EULER, prepare=prepare,
    # The pipeline always gives a shift by size, but to UniPC never.
    solvers={**BY_SHIFT, UNIPC: "static"},
    guidance=5.0)  # the pipeline's default


# ---- LoRA ------------------------------------------------------------------------------------------------------------

ATTENTION = ("to_q", "to_k", "to_v", "to_out", "to_q_t", "to_k_t", "to_v_t", "to_out_t")
PRESETS: Mapping[str, tuple[str, ...]] = {
    # Image and text projections of the joint attention, and the attention of the single blocks.
    "attention": ATTENTION,
    # With the feed-forward layers that all tokens go through; experts see few tokens each.
    "all-linear": (*ATTENTION, *(f"{part}.{name}" for part in ("ff_t", "shared_experts")
                                 for name in ("w1", "w2", "w3"))),
}
# The authors name layers as diffusers does; ComfyUI reads them so.
LORA = LoraLayers(presets=PRESETS, kohya=Kohya(imported=False))


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": sd3.PROJECTED_CLIP,
    "text_encoder_2": sd3.PROJECTED_CLIP,
    "text_encoder_3": flux.COMPONENTS["text_encoder_2"],
    LLAMA: (("transformers", "LlamaForCausalLM"),),
    "tokenizer": sd15.COMPONENTS["tokenizer"],
    "tokenizer_2": sd15.COMPONENTS["tokenizer"],
    "tokenizer_3": flux.T5_TOKENIZERS,
    # The names of the class before and since transformers 5.
    "tokenizer_4": (("transformers", "PreTrainedTokenizerFast"), ("transformers", "TokenizersBackend")),
    "transformer": (("diffusers", "HiDreamImageTransformer2DModel"),),
    "vae": flux.COMPONENTS["vae"],
}
FAMILY = Family(
    name="hidream", models=("HiDream-I1",), pipelines=("HiDreamImagePipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=16, factor=8, patch=2, step=64, resolution=1024, scaling_factor="0.3611",
    shift_factor="0.1159", predictions=("flow",), text=TEXT, predict=predict, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="hidream-i1"),
    config_widths={"in_channels": ("latent", 1), "text_emb_dim": ("pooled", 1)}, largest_area=largest_area,
)
