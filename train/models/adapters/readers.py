"""Tells which programs read which LoRA files, by the code of diffusers 0.42 and ComfyUI 0.29."""

from __future__ import annotations

from prep.training.schema import Lora
from train.models.naming import Naming

KINDS = {"lora": "LoRA", "loha": "LoHa", "lokr": "LoKr",  # by lora.kind
         "glora": "GLoRA", "ia3": "set of IA3 factors", "diff": "difference"}  # what is only merged


def unread_by_diffusers(lora: Lora, naming: Naming) -> str:
    """The parts of a file with these settings that `load_lora_weights` does not read; empty: it reads all."""
    if lora.kind != "lora":
        return KINDS[lora.kind]
    if naming.format_of(lora) != "kohya" or naming.kohya is None:
        return ""
    if lora.dora:
        return "DoRA with these names"
    return "" if naming.kohya.imported else "LoRA of this family with these names"


def unread_by_comfyui(lora: Lora, naming: Naming) -> str:
    """The parts of such a file that ComfyUI does not read; empty: it reads all, or knows no model of the family.

    It expects the attention of a UNet as diffusers named it in 2023, and DoRA's lengths as LyCORIS does.
    """
    if naming.format_of(lora) == "kohya":
        return ""
    if not naming.in_comfyui:
        return "" if naming.kohya is None else "LoRA of this family with diffusers' names"
    parts = ["attention layers"] if naming.component == "unet" else []
    parts += ["DoRA's lengths"] if lora.dora else []
    return f"{' and '.join(parts)} with diffusers' names" if parts else ""
