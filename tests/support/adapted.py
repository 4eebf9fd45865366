"""A UNet with adapters, what it answers, and the same from a file whose formula is applied to the base's weights; LoRA
files of random values for tiny models of any family."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from prep.models.families.registry import FAMILIES
from prep.models.families.sd15 import PRESETS
from prep.training.schema import Lora
from train.models import lora
from train.models.naming import naming_of


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


def adapter(family, folder, path, **settings):
    """A LoRA file of random values for the denoiser of the pipeline in `folder`."""
    import tiny_pipelines  # here: it asks for newer libraries than the rest

    chosen = Lora(**{"rank": 2, "alpha": 1.0, **settings})
    with tiny_pipelines.known_warnings():
        model = getattr(tiny_pipelines.load(folder), FAMILIES[family].denoiser)
    found = lora.attach(model, chosen, 0, FAMILIES[family].lora.presets)
    drawn = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for value in found.values():
            value.normal_(std=0.2, generator=drawn)
    save_file(lora.pack(found, chosen, naming_of(FAMILIES[family])), path,
              metadata=lora.describe(found, chosen, naming_of(FAMILIES[family])))
    return path
