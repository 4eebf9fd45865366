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
from train.models.naming import Naming, Place, ends_of
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
    layout = naming.format_of(lora)
    ends, tensors = ends_of(layout), dict[str, Tensor]()
    naming.require(lora, {_split(name)[0] for name in parameters})
    for name, parts in _grouped(parameters, layout, naming).items():
        matrices = [{kind: parameters[named].detach() for kind, named in part.items()} for _, part in parts]
        tensors[name + ends["down"]] = matrices[0]["down"] if len(parts) == 1 else torch.cat(
            [matrix["down"] for matrix in matrices])
        if layout == "kohya":
            tensors[name + ends["alpha"]] = torch.tensor(lora.alpha * len(parts))
        tensors[name + ends["up"]] = _fuse_up([(place, matrix["up"]) for (place, _), matrix
                                               in zip(parts, matrices, strict=True)])
    return tensors


def unpack(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], naming: Naming) -> dict[str, Tensor]:
    """The values of `parameters` that a file's tensors contain, in either format."""
    found: dict[str, Tensor] = {}
    for layout in ("kohya", "diffusers"):
        ends = ends_of(layout)
        for name, parts in _grouped(parameters, layout, naming).items():
            down, up = (tensors.get(name + ends[kind]) for kind in ("down", "up"))
            if down is None or up is None:
                continue
            for number, (place, part) in enumerate(parts):
                rank = len(parameters[part["down"]])
                own = slice(None) if len(down) == rank else slice(number * rank, (number + 1) * rank)  # or shared
                unit = len(up) // place.of
                found[part["down"]] = down[own]
                found[part["up"]] = up[place.first * unit : (place.first + place.count) * unit, own]
    return found


_Parts = list[tuple[Place, dict[str, str]]]  # place, and the names of the parameters by kind


def _grouped(parameters: Iterable[str], layout: str, naming: Naming) -> dict[str, _Parts]:
    """The parameters that the layout has names for, by their layer in the file: its parts in the order of the rows."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    places: dict[str, Place] = {}
    for name in parameters:
        module, end = _split(name)
        place = naming.place(module, layout)
        if place is not None:
            places[module] = place
            found.setdefault(place.name, {}).setdefault(module, {})[end] = name
    return {name: sorted(((places[module], part) for module, part in parts.items()), key=lambda each: each[0].first)
            for name, parts in found.items()}


def _fuse_up(parts: list[tuple[Place, Tensor]]) -> Tensor:
    """The `up` matrices along the diagonal, each at the rows of its layer; rows without an adapter are 0."""
    place, first = parts[0]
    if place.of == 1:
        return first
    unit, column = len(first) // place.count, 0
    whole = first.new_zeros(unit * place.of, sum(up.shape[1] for _, up in parts))
    for place, up in parts:
        whole[place.first * unit : (place.first + place.count) * unit, column : column + up.shape[1]] = up
        column += up.shape[1]
    return whole


def describe(parameters: Iterable[str], lora: Lora, naming: Naming) -> dict[str, str]:
    """The metadata that the format's readers expect: rank and alpha."""
    if naming.format_of(lora) == "kohya":
        assert naming.kohya is not None
        return {"ss_network_module": naming.kohya.module, "ss_network_dim": str(lora.rank),
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
