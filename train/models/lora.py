"""Low-rank adapters through PEFT (its only room), and the two ways of naming them in a file.

kohya       lora_unet_down_blocks_0_…_to_q.lora_down.weight, .lora_up.weight, .alpha: ComfyUI and diffusers read it
diffusers   unet.down_blocks.0.….to_q.lora_A.weight, .lora_B.weight; alpha stands in the file's metadata
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from peft import LoraConfig, inject_adapter_in_model
from torch import Tensor, nn

from prep.errors import ConfigError
from prep.parse import suggest
from train.config.schema import Lora

_PRESETS: Mapping[str, tuple[str, ...]] = {
    "attention": ("to_q", "to_k", "to_v", "to_out.0"),
    # The linear layers of the transformer blocks; resnets and embeddings are left alone, as kohya's trainer does.
    "all-linear": ("to_q", "to_k", "to_v", "to_out.0", "ff.net.0.proj", "ff.net.2"),
}
_ENDS = {".lora_A.default.weight": "down", ".lora_B.default.weight": "up"}  # PEFT's names within a module
_KOHYA = {"down": ".lora_down.weight", "up": ".lora_up.weight"}
_DIFFUSERS = {"down": ".lora_A.weight", "up": ".lora_B.weight"}


def attach(denoiser: nn.Module, lora: Lora, seed: int) -> dict[str, nn.Parameter]:
    """Adds adapters (zero at first: lora_B is 0) to `denoiser` and returns their parameters by name, float32.

    Only they require a gradient afterwards. The same seed gives the same weights on any device. Raises `ConfigError`
    when no module is targeted.
    """
    denoiser.requires_grad_(False)
    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,  # type: ignore[arg-type]
                        target_modules=_modules(denoiser, lora), init_lora_weights=True)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, denoiser)
    found = {name: value for name, value in denoiser.named_parameters() if value.requires_grad}
    for value in found.values():
        value.data = value.data.float()
    return found


def pack(parameters: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """The adapter as a file holds it, in `lora.format`."""
    tensors: dict[str, Tensor] = {}
    for name, value in parameters.items():
        module, end = _split(name)
        tensors[_spell(module, end, lora.format)] = value.detach()
        if lora.format == "kohya":
            tensors[f"{_kohya_module(module)}.alpha"] = torch.tensor(lora.alpha)
    return tensors


def unpack(tensors: Mapping[str, Tensor], names: Iterable[str], lora: Lora) -> dict[str, Tensor]:
    """Those of the parameters called `names` that are among a file's tensors, in either format."""
    found = {}
    for name in names:
        for layout in ("kohya", "diffusers"):
            value = tensors.get(_spell(*_split(name), layout))
            if value is not None:
                found[name] = value
    return found


def describe(parameters: Iterable[str], lora: Lora) -> dict[str, str]:
    """The metadata that readers of the format look for: rank and alpha."""
    if lora.format == "kohya":
        return {"ss_network_module": "networks.lora", "ss_network_dim": str(lora.rank),
                "ss_network_alpha": str(lora.alpha)}
    modules = sorted({_split(name)[0] for name in parameters})
    adapter: dict[str, Any] = {"r": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout,
                               "target_modules": modules}
    return {"lora_adapter_metadata": json.dumps({f"unet.{key}": value for key, value in adapter.items()})}


def _modules(denoiser: nn.Module, lora: Lora) -> list[str]:
    """Full names of the layers to adapt."""
    layers = [name for name, module in denoiser.named_modules() if isinstance(module, nn.Linear | nn.Conv2d)]
    ends = _PRESETS[lora.targets] if isinstance(lora.targets, str) else lora.targets
    for end in ends if lora.targets not in _PRESETS else ():
        if not any(_ends(name, end) for name in layers):
            known = sorted({name.rpartition(".")[2] for name in layers if not name.rpartition(".")[2].isdigit()})
            raise ConfigError(f"lora.targets names '{end}', which no linear or convolution layer of the model ends in"
                              f"{suggest(end, known)}", hint=f"layers end in: {', '.join(known)}")
    return [name for name in layers if any(_ends(name, end) for end in ends)]


def _ends(name: str, end: str) -> bool:
    return name == end or name.endswith(f".{end}")


def _split(name: str) -> tuple[str, str]:
    """(module, `down` or `up`) of a PEFT parameter."""
    for ending, kind in _ENDS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), kind
    raise AssertionError(f"{name} is no LoRA parameter")


def _spell(module: str, end: str, layout: str) -> str:
    return _kohya_module(module) + _KOHYA[end] if layout == "kohya" else f"unet.{module}{_DIFFUSERS[end]}"


def _kohya_module(module: str) -> str:
    return "lora_unet_" + module.replace(".", "_")
