"""Which tensors of a single file are of which component, by their names alone: no weights are read, no torch is loaded.

The names are those of a model's authors, of ComfyUI's checkpoints, or already diffusers'.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

# The last is that of Cosmos' authors, whom others follow.
DENOISER, VAE = ("model.diffusion_model.", "diffusion_model.", "net."), ("first_stage_model.", "vae.")
CONDITIONER = "llm_adapter."  # of Anima, after a prefix of the denoiser, whose text it makes
# Text encoders: with the names of transformers, or those of OpenCLIP.
OF_TRANSFORMERS = re.compile(r"cond_stage_model\.transformer\.|conditioner\.embedders\.\d+\.transformer\."
                             r"|text_encoders\.\w+\.transformer\.")
OF_OPEN_CLIP = re.compile(r"cond_stage_model\.model\.|conditioner\.embedders\.\d+\.model\.")
_ONLY_VAE = ("encoder.", "decoder.", "quant_conv.", "post_quant_conv.", "bn.")  # all names of a file of a VAE

# What files have beside their components, and why leaving it out changes nothing.
HARMLESS: Mapping[re.Pattern[str], str] = {
    re.compile(r"model_ema\."): "a moving average of the denoiser, which is there beside it",
    re.compile(r"(\w+_)?alphas_cumprod(_prev)?$"): "the noise schedule, which the scheduler's config has",
    re.compile(r"(betas|sigmas|log_sigmas|scale_factor|logvar|lvlb_weights|posterior_\w+)$"): "as above",
    re.compile(r"(denoiser|model_sampling)\.\w+$"): "as above",
    re.compile(r"(first_stage_model\.|vae\.)?loss\."): "what judged a VAE in its training",
    re.compile(r"(.+\.)?position_ids$"): "counts up from 0",
    re.compile(r"(.+\.)?logit_scale$"): "CLIP's, for comparing pictures with texts",
    re.compile(r"(.+\.)?attn_mask$"): "computed from the length",
    re.compile(r"(.+\.)?spiece_model$"): "a tokenizer, which the pipeline directory has",
    re.compile(r"text_encoders\.clip_l\.transformer\.text_projection\.weight$"): "SD3 does not project this vector",
    re.compile(r"((model\.)?diffusion_model\.)?norm_final\.weight$"): "of Lumina 2 and Z-Image, whose code ignores it",
    re.compile(r"((model\.)?diffusion_model\.)?pos_embed$"): "of SANA, whose positions are computed; SD3 reads its own",
    re.compile(r"((model\.)?diffusion_model\.)?y_embedder\.y_embedding$"): "of SANA, for no caption: that is encoded",
    re.compile(r"(v_pred|ztsnr)$"): "a mark, which is compared with the scheduler's config",
    # As the converter of diffusers removes them.
    re.compile(r"(.*\.)?pos_embedder\.(seq|dim_spatial_range|dim_temporal_range)$"): "of Cosmos, made from the config",
    re.compile(r"(.*\.)?(accum_\w+|_extra_state)$"): "of Cosmos, how it was trained",
    # Of the last of OpenCLIP-H's layers, as `SD_2_TEXT_ENCODER_KEYS_TO_IGNORE` of diffusers lists them: Stable
    # Diffusion 2 reads the last but one, and its config has one layer less.
    re.compile(r"cond_stage_model\.model\.(transformer\.resblocks\.23\..+|text_projection)$"): "not read by SD 2",
}


def is_harmless(name: str) -> bool:
    """Whether leaving the tensor `name` of a file out changes nothing."""
    return any(pattern.match(name) for pattern in HARMLESS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """The names of a file's tensors by component, each without its prefix → as the file has it."""

    denoiser: Mapping[str, str]
    conditioner: Mapping[str, str]
    vae: Mapping[str, str]
    encoders: Mapping[str, Mapping[str, str]]  # by prefix


def parts_of(names: Iterable[str]) -> Parts:
    """The components that a file with tensors of these `names` has. CLIP-L comes first, as in pipelines."""
    names = sorted(names, key=lambda name: ("clip_l" not in name, name))

    def below(prefixes: tuple[str, ...]) -> dict[str, str]:
        return {name.removeprefix(prefix): name for prefix in prefixes for name in names if name.startswith(prefix)}

    denoiser, vae = below(DENOISER), below(VAE)
    encoders: dict[str, dict[str, str]] = {}
    for name in names:
        found = OF_TRANSFORMERS.match(name) or OF_OPEN_CLIP.match(name)
        if found:
            encoders.setdefault(found[0], {})[name.removeprefix(found[0])] = name
    if not (denoiser or vae or encoders):  # a file of one component, without a prefix
        only = {name: name for name in names}
        of_vae = all(name.startswith(_ONLY_VAE) for name in names)
        denoiser, vae = ({}, only) if of_vae else (only, {})
    conditioner = {name.removeprefix(CONDITIONER): there for name, there in denoiser.items()
                   if name.startswith(CONDITIONER)}
    denoiser = {name: there for name, there in denoiser.items() if not name.startswith(CONDITIONER)}
    return Parts(denoiser=denoiser, conditioner=conditioner, vae=vae, encoders=encoders)
