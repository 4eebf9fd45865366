"""ERNIE-Image: the last layer but one of Mistral 3 for the tokens of the caption, and FLUX.2's VAE.

Sources: `ErnieImagePipeline` in diffusers 0.42: `encode_prompt` encodes each caption alone, without a template, and
returns a list of rows without padding; it cuts captions only where the tokenizer does. The language model is causal,
so a row cut later is that of a caption cut before. `ErnieImageTransformer2DModel` masks padding, and its positions
follow from each caption's own length. It takes FLUX.2's patches of 2 × 2 latent cells.

The pipeline normalizes latents with an epsilon of 1e-5, whatever the VAE's config says, as the model was trained. The
prompt enhancer that may be in its directory (`pe`) is not used: training sees captions as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prep.geometry import Size
from prep.models.configs import Configs
from prep.models.denoiser import packing, padding
from prep.models.denoiser.samplers import EULER
from prep.models.families import flux2
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


def shapes(configs: Configs, options: TextOptions) -> Mapping[str, Shape]:
    """`hidden` [token, channel]."""
    return {"hidden": (options.max_length, configs.width("text_encoder", "text_config", "hidden_size"))}


def encode(pipeline: Any, captions: Sequence[str], options: TextOptions, device: Any) -> Sequence[TextRow]:
    """One `hidden` per caption, without padding."""
    return [{"hidden": hidden_LD[:options.max_length]}
            for hidden_LD in pipeline.encode_prompt(list(captions), device=device)]


# 2048 tokens are more than captions have; a longer caption would be whole in the pipeline.
TEXT = TextEncoding(arrays={"hidden": ("token", "channel")}, layout="trimmed", max_length=2048, longest=2048,
                    shapes=shapes, encode=encode)


# ---- the denoiser ----------------------------------------------------------------------------------------------------

TIMESTEPS = 1000  # of the published schedule: the transformer takes sigma times this


def predict(transformer: Any, noised_BChw: Tensor, sigma_B: Tensor, conditions: Conditions) -> Tensor:
    """The transformer's velocity, for each latent cell."""
    hidden_BLD, _ = padding.cut(conditions.text, "hidden")
    answer = transformer(
        hidden_states=flux2.patches(noised_BChw), timestep=sigma_B * TIMESTEPS, text_bth=hidden_BLD,
        text_lens=sigma_B.new_tensor(padding.lengths(conditions.text)).long(), return_dict=False)[0]
    return cells(answer)


def cells(patches_BPyx: Tensor) -> Tensor:
    """[B, C, h, w] of patches, the inverse of `flux2.patches`."""
    rows, columns = patches_BPyx.shape[-2:]
    packed = patches_BPyx.flatten(2).transpose(1, 2)
    return packing.unpack(packed, (columns * packing.PATCH, rows * packing.PATCH))


def call(transformer: Any, prompted: Prompted) -> Mapping[str, Any]:
    """Arguments of `ErnieImagePipeline.__call__`."""
    return {"prompt_embeds": padding.rows(prompted.positive, "hidden"),
            "negative_prompt_embeds": padding.rows(prompted.negative, "hidden"),
            "latents": flux2.patches(prompted.latent_1Chw), "guidance_scale": prompted.guidance}


def unpack(transformer: Any, patches_1Pyx: Tensor, size: Size) -> Tensor:
    """The pipeline's latents, by cell."""
    return cells(patches_1Pyx)


SAMPLING = SamplePipeline(call=call, unpack=unpack, sampler=EULER, guidance=4.0)  # the pipeline's default


# ---- LoRA ------------------------------------------------------------------------------------------------------------

PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # With the feed-forward layers; no modulation, no embeddings.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "mlp.gate_proj", "mlp.up_proj", "mlp.linear_fc2"),
}
# The authors name layers as diffusers does; ComfyUI reads them so.
LORA = LoraLayers(presets=PRESETS, kohya=Kohya(imported=False))


# ---- the family ------------------------------------------------------------------------------------------------------

COMPONENTS = {
    "text_encoder": (("transformers", "Mistral3Model"),),
    "tokenizer": (*flux2.MISTRAL_TOKENIZERS, ("transformers", "LlamaTokenizerFast"),
                  ("transformers", "LlamaTokenizer")),
    "transformer": (("diffusers", "ErnieImageTransformer2DModel"),),
    "vae": flux2.PICTURES["vae"],
}
FAMILY = Family(
    name="ernie", models=("ERNIE-Image",), pipelines=("ErnieImagePipeline",), denoiser="transformer",
    components=COMPONENTS, latent_channels=32, factor=8, patch=2, step=64, resolution=1024, scaling_factor="1",
    shift_factor="0", batch_norm_eps=1e-5, predictions=("flow",), text=TEXT,
    predict=predict, chooses_attention=True, sampling=SAMPLING, lora=LORA,
    labels=Labels(architecture="ernie-image"),
    config_widths={"in_channels": ("latent", 4), "text_in_dim": ("hidden", 1)},
)
