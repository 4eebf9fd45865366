"""Low-rank adapters through PEFT (imported only here), and their tensors in LoRA files."""

from __future__ import annotations

import json
import logging
import math
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from prep.batching.rng import draw_key
from prep.errors import ConfigError
from prep.loader.device import to_device
from prep.models.checkpoints.streaming import Keep
from prep.models.lora.kohya import LayerSlice
from prep.training.schema import Lora
from train.models.adapters.peft import unusual
from train.models.adapters.stored import contents_of, table_of
from train.models.naming import Naming, ends_of, in_file_order
from train.models.principal import principal_part
from train.models.products import PRODUCTS, product_alpha, scaled_alpha
from train.models.targets import Adapter, Presets, Shapes, adapter_of, require_directions, targeted

logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # PEFT imports it, and it asks for kernels not used here

from peft import LoHaConfig, LoKrConfig, LoraConfig, inject_adapter_in_model  # noqa: E402
from peft.tuners.lora import LoraLayer  # noqa: E402
from peft.tuners.tuners_utils import BaseTunerLayer  # noqa: E402

# Suffixes of PEFT's parameter names. The magnitude is that of DoRA (Liu et al. 2024): the length of each row.
_ENDS = {".lora_A.default.weight": "down", ".lora_B.default.weight": "up",
         ".lora_magnitude_vector.default.weight": "magnitude",
         # What PiSSA began with, which never changes: the base minus this is what it adapts.
         ".lora_A.first.weight": "first_down", ".lora_B.first.weight": "first_up",
         **{f".{kind}.default": kind for kind in PRODUCTS}}
_ZERO = ("up", "hada_w2_b", "lokr_w1")  # so that nothing is added at first


def attach(denoiser: nn.Module, lora: Lora, seed: int, presets: Presets,
           keep: Keep | None = None) -> dict[str, nn.Parameter]:
    """Adds adapters (initially without effect) to `denoiser`; returns their float32 parameters by name.

    Freezes all other parameters. The same seed gives the same weights on any device and for any dtype of the base;
    DoRA's lengths are those of the base's rows. `keep` is given each of them, and they are on the meta device, as the
    base is: not for what `reads_base`. Raises `ConfigError` if no module is targeted.
    """
    with nullcontext() if keep is None else torch.device("meta"):
        adapters, layers = inject(denoiser, lora, presets)
    parameters = stored(denoiser)
    for name, value in parameters.items():
        if keep is not None:
            value.data = keep(name, _drawn(name, value, seed))
            continue
        first = _length(name, value) if _split(name)[1] == "magnitude" else _drawn(name, value, seed)
        value.data = to_device(first, value.device)
    if lora.init == "pissa":
        for name, adapter in adapters.items():
            require_directions(name, layers[name], adapter, lora)
            _begin_with_principal(denoiser.get_submodule(name), name, adapter, seed)
    return {name: value for name, value in parameters.items() if value.requires_grad}


@contextmanager
def without_adapters(denoiser: nn.Module) -> Iterator[None]:
    """The denoiser as it was before `attach` inside the `with` block."""
    layers = [module for module in denoiser.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer._disable_adapters = True  # enable_adapters would change which of their parameters are trained
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


@contextmanager
def at_weight(denoiser: nn.Module, weight: float) -> Iterator[None]:
    """The denoiser with its adapters at this weight inside the `with` block, also for a backward pass that recomputes;
    at -1 they are subtracted."""
    layers: list[Any] = [module for module in denoiser.modules() if isinstance(module, BaseTunerLayer)]
    usual = [dict(layer.scaling) for layer in layers]
    try:
        for layer, factors in zip(layers, usual, strict=True):
            layer.scaling.update({name: weight * factor for name, factor in factors.items()})
        yield
    finally:
        for layer, factors in zip(layers, usual, strict=True):
            layer.scaling.update(factors)


def reads_base(lora: Lora) -> bool:
    """Whether adapters begin with values that come from the weights of the base."""
    return lora.dora or lora.init == "pissa"


def inject(denoiser: nn.Module, lora: Lora, presets: Presets) -> tuple[dict[str, Adapter], Shapes]:
    """Adds adapters to `denoiser` and freezes all else; their values and dtypes are still PEFT's. Returns the adapters
    by layer, and the shapes of all layers. Raises `ConfigError` if no module is targeted."""
    denoiser.requires_grad_(False)
    layers = {name: _shape(module) for name, module in denoiser.named_modules()
              if isinstance(module, nn.Linear | nn.Conv2d)}
    adapters = {name: adapter_of(lora, name, layers[name][2:]) for name in targeted(layers, lora, presets)}
    config = _config(lora, adapters, layers)
    with torch.random.fork_rng(devices=[]):
        inject_adapter_in_model(config, denoiser)
        if lora.init == "pissa":
            _add_first(denoiser, config)
    assert {_split(name)[0] for name in stored(denoiser)} == set(adapters), "PEFT adapted other layers"
    return adapters, layers


def stored(denoiser: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters of all adapters, by name."""
    return {name: value for name, value in denoiser.named_parameters() if is_stored(name)}


def _shape(layer: nn.Linear | nn.Conv2d) -> tuple[int, ...]:
    """The shape of the weight, also if it is quantized."""
    return (layer.out_features, layer.in_features) if isinstance(layer, nn.Linear) else tuple(layer.weight.shape)


def _config(lora: Lora, adapters: Mapping[str, Adapter], layers: Shapes) -> Any:
    """PEFT's config. It matches a list of targets by the ends of names, a text as an expression of the whole name; a
    pattern of ranks or alphas by the end, unless ^ begins it."""
    ranks = {f"^{re.escape(name)}": each.rank for name, each in adapters.items()}
    alphas = {f"^{re.escape(name)}": each.alpha if lora.kind == "lora" else product_alpha(layers[name], each.rank, lora)
              for name, each in adapters.items()}
    common: dict[str, Any] = {"target_modules": _exactly(adapters), "rank_pattern": ranks, "alpha_pattern": alphas}
    if lora.kind == "loha":
        return LoHaConfig(**common)
    if lora.kind == "lokr":
        return LoKrConfig(decompose_factor=lora.factor or -1, **common)
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout,  # type: ignore[arg-type]
                      init_lora_weights=True, use_dora=lora.dora, **common)


def _exactly(names: Iterable[str]) -> str:
    """A regular expression of these names and no others."""
    return "|".join(map(re.escape, names))


def is_stored(name: str) -> bool:
    """Whether a parameter of a denoiser with adapters is one of theirs: a file holds it."""
    return name.endswith(tuple(_ENDS))


def _add_first(denoiser: nn.Module, config: LoraConfig) -> None:
    """A second adapter beside each, `first`, which is never trained and has no dropout."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # which two adapters mean
        inject_adapter_in_model(replace(config, lora_dropout=0.0), denoiser, "first")
    for module in denoiser.modules():
        if isinstance(module, LoraLayer):
            module.set_adapter(["default", "first"])
    for name, value in denoiser.named_parameters():
        if name.endswith(".first.weight"):
            value.requires_grad_(False)


def _begin_with_principal(layer: Any, name: str, adapter: Adapter, seed: int) -> None:
    """The adapter begins as the principal part of the weight, and `first` takes it away: together they add nothing.

    So what is trained is that part beside the rest of the weight, as in PiSSA, and the base stays as it is.
    """
    weight = layer.base_layer.weight
    up, down = principal_part(weight, adapter.rank, adapter.alpha / adapter.rank,
                              draw_key(seed, 0, name.encode(), 0, "pissa")[0])
    for kind, sign in (("default", 1), ("first", -1)):
        for side, value in ((layer.lora_A[kind].weight, down), (layer.lora_B[kind].weight, sign * up)):
            side.data = to_device(value.reshape(side.shape).clone(), side.device)  # no memory of the other one


def _length(name: str, value: Tensor) -> Tensor:
    """The length of the base's rows, as PEFT found it in the base's dtype. Raises `ConfigError` for a length of 0."""
    if not bool(value.all()):
        raise ConfigError(f"lora.dora is on, but '{_split(name)[0]}' has rows of zeros, which have no direction",
                          hint="list in lora.targets the other layers, or --set lora.dora=false")
    return value.detach().float()


def _drawn(name: str, like: Tensor, seed: int) -> Tensor:
    """The initial value of a parameter, float32: zeros for lora_B; for others PEFT's initialization (He et al. 2015,
    with the slope sqrt(5) of PyTorch's linear layers), drawn by seed and parameter name."""
    value = torch.zeros(like.shape, dtype=torch.float32)
    if _split(name)[1] in _ZERO:
        return value
    key = draw_key(seed, 0, name.encode(), 0, "lora_A")[0]
    return nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=torch.Generator().manual_seed(key))


def decays(name: str) -> bool:
    """Whether weight decay is for this parameter: DoRA's lengths would shrink the base with it."""
    return _split(name)[1] != "magnitude"


def rate_of(name: str, value: Tensor, lora: Lora) -> float | None:
    """The learning rate of a parameter; `None`: optimizer.lr."""
    module, end = _split(name)
    return adapter_of(lora, module, value.shape[2:] if end == "down" else ()).lr


def _adapters(parameters: Mapping[str, Tensor], lora: Lora) -> dict[str, Adapter]:
    """The adapter of each layer, by its lora_A, which has the sides of the kernel."""
    return {_split(name)[0]: adapter_of(lora, _split(name)[0], value.shape[2:])
            for name, value in parameters.items() if _split(name)[1] == "down"}


def pack(parameters: Mapping[str, Tensor], lora: Lora, naming: Naming) -> dict[str, Tensor]:
    """The adapter's tensors with the names and alphas of `lora.format`."""
    naming = naming.knowing({_split(name)[0] for name in parameters})
    layout, adapters = naming.format_of(lora), _adapters(parameters, lora)
    ends, tensors = ends_of(layout), dict[str, Tensor]()
    naming.require(lora, {_split(name)[0] for name in parameters})
    if lora.kind != "lora":
        return _pack_products(parameters, lora, naming)
    for name, parts in _grouped(parameters, layout, naming).items():
        matrices = [_ordered(where, _whole({kind: parameters[named].detach() for kind, named in part.items()}))
                    for where, part in parts]
        tensors[name + ends["down"]] = matrices[0]["down"] if len(parts) == 1 else torch.cat(
            [matrix["down"] for matrix in matrices])
        if layout == "kohya":
            alpha = adapters[_split(parts[0][1]["down"])[0]].alpha  # that of all parts
            tensors[name + ends["alpha"]] = torch.tensor(alpha * _times(lora) * len(parts))
        tensors[name + ends["up"]] = _fuse_up([(where, matrix["up"]) for (where, _), matrix
                                               in zip(parts, matrices, strict=True)])
        if lora.dora:
            tensors[name + ends["magnitude"]] = _lengths(layout, matrices)
    return tensors


def _pack_products(parameters: Mapping[str, Tensor], lora: Lora, naming: Naming) -> dict[str, Tensor]:
    """The tensors of LoHa and LoKr under LyCORIS' names, with the alpha of each layer."""
    tensors: dict[str, Tensor] = {}
    for module, parts in _products(parameters).items():
        where = naming.slice_of(module, "kohya")
        assert where is not None, "require has looked"
        tensors |= {f"{where.name}.{kind}": parameters[name].detach() for kind, name in parts.items()}
        rank = next((parameters[name].shape[0] for kind, name in parts.items() if kind.endswith("_b")), lora.rank)
        tensors[f"{where.name}.alpha"] = torch.tensor(float(rank) if "lokr_w2" in parts else scaled_alpha(rank, lora))
    return tensors


def _products(parameters: Iterable[str]) -> dict[str, dict[str, str]]:
    """The parameters of LoHa and LoKr by layer and kind."""
    kinds: dict[str, dict[str, str]] = {}
    for name in parameters:
        module, kind = _split(name)
        if kind in PRODUCTS:
            kinds.setdefault(module, {})[kind] = name
    return kinds


def _whole(parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """One adapter for the sum of a PiSSA adapter and the one it began with, of both ranks; others as they are."""
    if "first_down" not in parts:
        return parts
    return {"down": torch.cat([parts["down"], parts["first_down"]]),
            "up": torch.cat([parts["up"], parts["first_up"]], dim=1)}


def _ordered(where: LayerSlice, parts: dict[str, Tensor]) -> dict[str, Tensor]:
    """An adapter with its rows in the order of the file."""
    return {kind: value if kind == "down" else in_file_order(where, parts["up"], parts["down"], value)
            for kind, value in parts.items()}


def _times(lora: Lora) -> int:
    """The factor of an adapter's rank and alpha in a file."""
    return 2 if lora.init == "pissa" else 1


def _lengths(layout: str, matrices: list[dict[str, Tensor]]) -> Tensor:
    """DoRA's lengths of the rows of a file's layer: of PEFT's shape, or a column as LyCORIS has it."""
    if layout == "diffusers":
        return matrices[0]["magnitude"]
    column = (-1, *(1 for _ in matrices[0]["up"].shape[1:]))
    return torch.cat([matrix["magnitude"].reshape(column) for matrix in matrices])


def unpack(tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], naming: Naming) -> dict[str, Tensor]:
    """The values of `parameters` that a file's tensors contain, whatever program named them."""
    modules: dict[str, dict[str, str]] = {}
    for name in parameters:
        module, kind = _split(name)
        modules.setdefault(module, {})[kind] = name
    unpacked: dict[str, Tensor] = {}
    for adapter in contents_of(tensors, table_of(modules, naming.knowing(modules))).adapters:
        values = {kind: tensors[name] for kind, name in adapter.tensors.items()}
        for number, (where, module) in enumerate(adapter.parts):
            part = modules[module]
            mine = values if adapter.kind != "lora" else _own(values, where, number, part, parameters)
            unpacked |= {part[kind]: value.reshape(parameters[part[kind]].shape) for kind, value in mine.items()
                         if kind in part}
    return unpacked


def _own(values: Mapping[str, Tensor], where: LayerSlice, number: int, part: Mapping[str, str],
         parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """One layer's part of an adapter in a file, by kind: the layer is the `number`th that has one there."""
    down, up = values["down"], values["up"]
    trained = len(parameters[part["down"]])
    rank = 2 * trained if "first_down" in part else trained
    own = slice(None) if len(down) == rank else slice(number * rank, (number + 1) * rank)  # or shared
    unit = len(up) // where.of
    rows = slice(where.first * unit, (where.first + where.count) * unit)
    mine = in_file_order(where, up, down, up)[rows, own]
    tensors = {"down": down[own][:trained], "up": mine[:, :trained],
               "first_down": down[own][trained:], "first_up": mine[:, trained:]}
    if "magnitude" in values:
        tensors["magnitude"] = in_file_order(where, up, down, values["magnitude"].reshape(-1))[rows]
    return tensors


_Parts = list[tuple[LayerSlice, dict[str, str]]]  # slice, and the names of the parameters by kind


def _grouped(parameters: Iterable[str], layout: str, naming: Naming) -> dict[str, _Parts]:
    """The parameters that the layout has names for, by their layer in the file: its parts in the order of the rows."""
    layers: dict[str, dict[str, dict[str, str]]] = {}
    slices: dict[str, LayerSlice] = {}
    for name in parameters:
        module, end = _split(name)
        where = naming.slice_of(module, layout)
        if where is not None and end not in PRODUCTS:
            slices[module] = where
            layers.setdefault(where.name, {}).setdefault(module, {})[end] = name
    return {name: sorted(((slices[module], part) for module, part in parts.items()), key=lambda each: each[0].first)
            for name, parts in layers.items()}


def _fuse_up(parts: list[tuple[LayerSlice, Tensor]]) -> Tensor:
    """The `up` matrices along the diagonal, each at the rows of its layer; rows without an adapter are 0."""
    where, first = parts[0]
    if where.of == 1:
        return first
    unit, column = len(first) // where.count, 0
    whole = first.new_zeros(unit * where.of, sum(up.shape[1] for _, up in parts))
    for where, up in parts:
        whole[where.first * unit : (where.first + where.count) * unit, column : column + up.shape[1]] = up
        column += up.shape[1]
    return whole


def describe(parameters: Mapping[str, Tensor], lora: Lora, naming: Naming, *, anchored: bool = False) -> dict[str, str]:
    """The metadata that the format's readers expect: rank and alpha, those of most layers and each that differs.

    `anchored`: the layers as a regular expression, where their names are also the ends of others'.
    """
    if lora.kind != "lora":
        arguments = {"algo": lora.kind, "conv_dim": str(lora.conv_rank), "conv_alpha": str(lora.conv_alpha)}
        arguments |= {"factor": str(lora.factor or -1)} if lora.kind == "lokr" else {}
        return {"ss_network_module": "lycoris.kohya", "ss_network_dim": str(lora.rank),
                "ss_network_alpha": str(lora.alpha), "ss_network_args": json.dumps(arguments)}
    adapters = _adapters(parameters, lora)
    (rank, alpha), _ = Counter((each.rank, each.alpha) for each in adapters.values()).most_common(1)[0]
    times = _times(lora)
    if naming.format_of(lora) == "kohya":
        assert naming.kohya is not None
        large = {_split(name)[0] for name, value in parameters.items() if prod(value.shape[2:]) > 1}
        more = {"conv_dim": str(times * lora.conv_rank), "conv_alpha": str(times * lora.conv_alpha)} if large else {}
        if lora.dora:
            more |= {"algo": "lora", "dora_wd": "True", "wd_on_output": "True"}
        module = "lycoris.kohya" if lora.dora else naming.kohya.module
        return {"ss_network_module": module, "ss_network_dim": str(times * rank),
                "ss_network_alpha": str(times * alpha),
                **({"ss_network_args": json.dumps(more)} if more else {})}
    adapter: dict[str, Any] = {
        "r": times * rank, "lora_alpha": times * alpha, "lora_dropout": lora.dropout,
        "target_modules": _exactly(sorted(adapters)) if anchored else sorted(adapters),
        **({"use_dora": True} if lora.dora else {}),
        "rank_pattern": unusual({name: times * each.rank for name, each in adapters.items()}, times * rank),
        "alpha_pattern": unusual({name: times * each.alpha for name, each in adapters.items()}, times * alpha)}
    return {"lora_adapter_metadata": json.dumps({f"{naming.component}.{key}": value for key, value in adapter.items()})}


def _split(name: str) -> tuple[str, str]:
    """(module, kind) of a PEFT parameter."""
    for ending, kind in _ENDS.items():
        if name.endswith(ending):
            return name.removesuffix(ending), kind
    raise AssertionError(f"{name} is no LoRA parameter")
