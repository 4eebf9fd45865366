"""Low-rank adapters through PEFT (imported only here), and their tensors in LoRA files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from prep.batching.rng import draw_key
from prep.loader.device import to_device
from train.config.schema import Lora
from train.models.naming import Naming
from train.models.targets import Presets, targeted

_ENDS = {".lora_A.default.weight": "down", ".lora_B.default.weight": "up"}  # suffixes of PEFT's parameter names


def attach(denoiser: nn.Module, lora: Lora, seed: int, presets: Presets) -> dict[str, nn.Parameter]:
    """Adds adapters (initially without effect: lora_B is 0) to `denoiser`; returns their float32 parameters by name.

    Freezes all other parameters. The same seed gives the same weights on any device and for any dtype of the base.
    Raises `ConfigError` if no module is targeted.
    """
    denoiser.requires_grad_(False)
    layers = [name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,  # type: ignore[arg-type]
                        target_modules=targeted(layers, lora, presets), init_lora_weights=True)
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, denoiser)
    found = {name: value for name, value in denoiser.named_parameters() if value.requires_grad}
    for name, value in found.items():
        value.data = to_device(_drawn(name, value, seed), value.device)
    return found


def _drawn(name: str, like: Tensor, seed: int) -> Tensor:
    """The initial value of a parameter, float32: zeros for lora_B; for lora_A PEFT's initialization (He et al. 2015,
    with the slope sqrt(5) of PyTorch's linear layers), drawn by seed and parameter name."""
    value = torch.zeros(like.shape, dtype=torch.float32)
    if _split(name)[1] == "up":
        return value
    key = draw_key(seed, 0, name.encode(), 0, "lora_A")[0]
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=torch.Generator().manual_seed(key))


def pack(parameters: Mapping[str, Tensor], lora: Lora, naming: Naming) -> dict[str, Tensor]:
    """The adapter's tensors with the names and alphas of `lora.format`."""
    tensors: dict[str, Tensor] = {}
    layout = naming.format_of(lora)
    for name, value in parameters.items():
        module, end = _split(name)
        tensors[naming.spell(module, end, layout)] = value.detach()
        if layout == "kohya":
            tensors[f"{naming.kohya_module(module)}.alpha"] = torch.tensor(lora.alpha)
    return tensors


def unpack(tensors: Mapping[str, Tensor], names: Iterable[str], naming: Naming) -> dict[str, Tensor]:
    """The parameters among `names` that a file's tensors contain, in either format."""
    found = {}
    for name in names:
        for layout in ("kohya", "diffusers"):
            value = tensors.get(naming.spell(*_split(name), layout))
            if value is not None:
                found[name] = value
    return found


def describe(parameters: Iterable[str], lora: Lora, naming: Naming) -> dict[str, str]:
    """The metadata that the format's readers expect: rank and alpha."""
    if naming.format_of(lora) == "kohya":
        return {"ss_network_module": "networks.lora", "ss_network_dim": str(lora.rank),
                "ss_network_alpha": str(lora.alpha)}
    modules = sorted({_split(name)[0] for name in parameters})
    adapter: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
                               "target_modules": modules, "rank_pattern": {}, "alpha_pattern": {}}
    return {"lora_adapter_metadata": json.dumps({f"{naming.component}.{key}": value for key, value in adapter.items()})}


def _split(name: str) -> tuple[str, str]:
    """(module, `down` or `up`) of a PEFT parameter."""
    for ending, kind in _ENDS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), kind
    raise AssertionError(f"{name} is no LoRA parameter")
