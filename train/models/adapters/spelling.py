"""The spellings of tensors' names in LoRA files, by program: a prefix, a layer, and the kind of tensor.

A layer has its name in diffusers or in its authors' code, with dots or with underscores for them. Prefixes and ends are
those that sd-scripts, musubi-tuner, LyCORIS, ai-toolkit, OneTrainer, SimpleTuner, diffusion-pipe, PEFT, diffusers of
2023 and today, and ComfyUI write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from train.models.products import CORES, PRODUCTS

# What a tensor is, by the end of its name.
ENDS: Mapping[str, str] = {
    **{end: kind for kind, ends in {
        "down": (".lora_down.weight", ".lora_A.weight", ".lora_A.default.weight", ".lora_A", ".lora.down.weight",
                 "_lora.down.weight", ".lora_linear_layer.down.weight"),
        "up": (".lora_up.weight", ".lora_B.weight", ".lora_B.default.weight", ".lora_B", ".lora.up.weight",
               "_lora.up.weight", ".lora_linear_layer.up.weight"),
        "alpha": (".alpha", ".lora.alpha"),
        "mid": (".lora_mid.weight",), "diff": (".diff", ".w_norm"), "diff_b": (".diff_b", ".b_norm"),
        "magnitude": (".dora_scale", ".lora_magnitude_vector", ".lora_magnitude_vector.weight",
                      ".lora_magnitude_vector.default.weight"),
    }.items() for end in ends},
    **{f".{end}.weight": f"glora_{end}" for end in ("a1", "a2", "b1", "b2")},
    ".weight": "ia3", ".on_input": "ia3_input",  # the first only beside the second: `contents_of` looks
    **{f".{kind}{end}": kind for kind in (*PRODUCTS, "lokr_w1_a", "lokr_w1_b", *CORES) for end in ("", ".default")},
}
_LONGEST = sorted(ENDS, key=len, reverse=True)
# What tensors with other names belong to, as far as it is known.
_OTHERS: Mapping[str, str] = {
    r"\.(oft_blocks|oft_diag|oft_R|oft_r|oft_s|oft_R\.weight|vera_lambda_[bd])\b": "OFT, BOFT or VeRA",
    r"\.(set_weight|reshape_weight)$": "whole weights",
    r"\.(diff|diff_b)$": "a whole difference of a norm or of another layer",
    r"\.(w_norm|b_norm)$": "trained norms (LyCORIS' train_norm)",
    r"\.([ab][12]|bm[12]?)(\.weight)?$": "another form of GLoRA", r"\.ia3_l(\.default)?$": "PEFT's IA3",
    r"\.(lora_E|lora_ranknum|ranknum)\b": "AdaLoRA",
    r"\.lora_B(\.default)?\.bias$|\.lora_up\.bias$": "LoRA with biases",
    r"\.(scale_weight|weight_scale|lora_[ABupdown]+\.scale)\b": "scaled fp8 weights",
    r"\.(lora_embedding_[AB]|base_layer\.)": "layers that are no LoRA's",
}
# Prefixes of a layer's name. More than one may be there: base_model.model.diffusion_model.
_DOTTED = ("base_model.model.", "model.diffusion_model.", "diffusion_model.", "transformer.", "unet.", "model.")
_UNDERSCORED = ("lora_unet_", "lora_transformer_", "lycoris_")
_TEXT = re.compile(r"(lora_te\d?_|lora_prior_te_|lora_llm|lycoris_te\d?_|text_encoders?[._]|te\d?\.|clip_[lgh]\.|"
                   r"text_model\.|cond_stage_model\.|conditioner\.|base_model\.model\.(text_model|text_encoder)\.|"
                   r"bundle_emb\.|emb_params)")


def of_text(name: str) -> bool:
    """Whether a tensor adapts a text encoder, or is the embedding of a word that came with the adapters."""
    return _TEXT.match(name) is not None


def split(name: str) -> tuple[str, str] | None:
    """The part of a tensor's name before its end, and the kind that the end means; `None`: no known end."""
    for end in _LONGEST:
        if name.endswith(end):
            return name.removesuffix(end), ENDS[end]
    return None


def spelled(layer: str) -> str:
    """A layer's name as it is looked up: the same for dots and for underscores."""
    return layer.replace(".", "_")


def candidates(stem: str) -> list[str]:
    """The names that a layer may have, given a tensor's name without its end: with its prefixes, then without."""
    names = [stem]
    while prefix := next((start for start in (*_DOTTED, *_UNDERSCORED) if names[-1].startswith(start)), ""):
        names.append(names[-1].removeprefix(prefix))
    # diffusers of 2023 named the attention by its processor: attn1.processor.to_out_lora.down.weight
    names += [name.replace(".processor.", ".") for name in names if ".processor." in name]
    return [*names, *(f"{name}.0" for name in names if name.endswith(".to_out"))]


def kind_of(name: str) -> str:
    """The owner of a tensor that is not read; empty: unknown."""
    return next((owner for pattern, owner in _OTHERS.items() if re.search(pattern, name)), "")
