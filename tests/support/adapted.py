"""A UNet with adapters, what it answers, and the same from a file whose formula is applied to the base's weights."""

from __future__ import annotations

import torch

from prep.models.families.sd15 import PRESETS
from train.models import lora


def ask(unet):
    drawn = torch.Generator().manual_seed(3)
    with torch.no_grad():
        return unet(torch.randn(2, 4, 8, 8, generator=drawn), torch.tensor([10, 700]),
                    torch.randn(2, 8, 32, generator=drawn)).sample


def trained(unet, settings):
    """An attached adapter that changes the answer: the parameters that a file holds."""
    found = lora.attach(unet, settings, seed=0, presets=PRESETS)
    with torch.no_grad():
        for value in found.values():
            value.normal_(std=0.3, generator=torch.Generator().manual_seed(len(value)))
    return {name: value for name, value in unet.named_parameters() if lora.is_stored(name)}


def change(unet, tensors, formula):
    """Replaces each weight of which `tensors` has parts, under kohya's names, by `formula(weight, parts)`, the parts by
    the end of their names; the names of all parts."""
    used = set()
    for name, layer in unet.named_modules():
        file = f"lora_unet_{name.replace('.', '_')}."
        parts = {one.removeprefix(file): value for one, value in tensors.items() if one.startswith(file)}
        if parts:
            layer.weight.data = formula(layer.weight.data, parts)
            used |= {file + end for end in parts}
    return used
