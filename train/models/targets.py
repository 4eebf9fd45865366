"""Selects the denoiser's layers that get an adapter, from the headers of its weights: reads no weights, no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import prod, sqrt

import regex

from prep.errors import ConfigError
from prep.models.family import Family
from prep.models.files import Model
from prep.models.pipeline import shapes_of, weighted_files
from prep.parse import brief, suggest
from prep.training.schema import Config, Full, Lora
from train.models.products import product_shapes

Shapes = Mapping[str, tuple[int, ...]]
Presets = Mapping[str, tuple[str, ...]]  # of a family: suffixes of layer names, by the value of lora.targets


def read_weights(model: Model, family: Family) -> Shapes:
    """The shape of each weight of the denoiser of the pipeline directory `model`, without buffers. Raises `ModelError`.
    """
    shapes = shapes_of(weighted_files(model, family.denoiser))
    return {name: shape for name, shape in shapes.items() if name not in family.buffers}


# A weight of two dimensions that is no layer: which experts HiDream's tokens go to is computed without a module.
_NO_LAYER = ".ff_i.gate.weight"


def layers_of(weights: Shapes) -> Shapes:
    """The linear and convolution layers: those whose weight has two or four dimensions."""
    return {name.removesuffix(".weight"): shape for name, shape in weights.items()
            if name.endswith(".weight") and len(shape) in (2, 4) and not name.endswith(_NO_LAYER)}


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The settings of one layer's adapter."""

    rank: int
    alpha: float  # its output is scaled by alpha / rank
    lr: float | None  # None: optimizer.lr


def targeted(layers: Iterable[str], lora: Lora, presets: Presets) -> list[str]:
    """Full names of the layers that match `lora.targets`, in order. Raises `ConfigError` if there are none, and if a
    target or one of `lora.layers` matches none."""
    names = list(layers)
    if isinstance(lora.targets, str) and lora.targets not in presets:
        raise ConfigError(f"lora.targets is '{lora.targets}', expected {' or '.join(presets)} for this family of "
                          "models", hint="or list suffixes of layer names: --set 'lora.targets=[\"to_q\", \"to_k\"]'")
    ends = presets[lora.targets] if isinstance(lora.targets, str) else lora.targets
    known = sorted({name.rpartition(".")[2] for name in names if not name.rpartition(".")[2].isdigit()})
    for end in ends if lora.targets not in presets else ():
        if not any(is_named(name, end) for name in names):
            raise ConfigError(f"lora.targets names '{end}', but no linear or convolution layer's name {_way(end)} it"
                              f"{suggest(end, known)}", hint=f"layers end in: {', '.join(known)}")
    matching = [name for name in names if any(is_named(name, end) for end in ends)]
    if not matching:
        raise ConfigError(f"lora.targets is '{lora.targets}', but no layer of the model matches: {', '.join(ends)}",
                          hint=f"list suffixes of layer names; layers end in: {', '.join(known)}")
    for rule in lora.layers:
        if not any(is_named(name, rule["match"]) for name in matching):
            raise ConfigError(f"lora.layers names '{rule['match']}', but no layer with an adapter has a name that "
                              f"{_way(rule['match'])} it", hint="adapters are on layers like "
                              f"{', '.join(matching[:: max(1, len(matching) // 3)][:3])}; lora.targets chooses them")
    return matching


def adapter_of(lora: Lora, name: str, sides: Sequence[int]) -> Adapter:
    """The adapter of the layer `name`; `sides` are those of its kernel, if it is a convolution."""
    large = prod(sides) > 1
    rank, alpha = (lora.conv_rank, lora.conv_alpha) if large else (lora.rank, lora.alpha)
    rule = next((rule for rule in lora.layers if is_named(name, rule["match"])), {})
    rank, alpha = rule.get("rank", rank), rule.get("alpha", alpha)
    return Adapter(rank=rank, alpha=alpha * sqrt(rank) if lora.rslora else alpha, lr=rule.get("lr"))


def is_ambiguous(weights: Shapes, lora: Lora, presets: Presets) -> bool:
    """Whether a reader that matches names by their ends, as PEFT does with a list, takes other layers for targets."""
    targets = set(targeted(layers_of(weights), lora, presets))
    modules = {".".join(parts[:end]) for parts in (name.split(".") for name in weights)
               for end in range(1, len(parts))}
    return any(end in targets for name in modules - targets for end in endings(name))


def endings(name: str) -> list[str]:
    """The part of a name after each of its dots."""
    parts = name.split(".")
    return [".".join(parts[first:]) for first in range(1, len(parts))]


def unfrozen(weights: Iterable[str], full: Full) -> list[str]:
    """The names of the weights that full fine-tuning trains, in order.

    Raises `ConfigError` if there are none, and for a pattern that matches none.
    """
    names = list(weights)
    tops = ", ".join(dict.fromkeys(name.partition(".")[0] for name in names))
    for kind, patterns in (("train", full.train), ("freeze", full.freeze)):
        for pattern in patterns:
            if not any(_inside(name, pattern) for name in names):
                raise ConfigError(f"full.{kind} names '{pattern}', but no module's name {_way(pattern)} it",
                                  hint=f"modules of the model: {tops}, and all inside them")
    trained = [name for name in names if (not full.train or any(_inside(name, pattern) for pattern in full.train))
               and not any(_inside(name, pattern) for pattern in full.freeze)]
    if not trained:
        raise ConfigError("full.freeze freezes all that full.train names, so nothing is trained",
                          hint="--set 'full.freeze=[]' trains every weight")
    return trained


def _inside(weight: str, pattern: str) -> bool:
    """Whether a weight is in a module that `pattern` names; a regular expression is one of the weight's name."""
    if pattern.startswith("re:"):
        return is_named(weight, pattern)
    parts = weight.split(".")
    return any(is_named(".".join(parts[:end]), pattern) for end in range(1, len(parts) + 1))


def trained_shapes(weights: Shapes, config: Config, presets: Presets) -> list[tuple[int, ...]]:
    """The shape of each trained parameter. Raises `ConfigError` like `targeted`."""
    if config.method == "full":
        return [weights[name] for name in unfrozen(weights, config.full)]
    layers, lora = layers_of(weights), config.lora
    adapters = {name: adapter_of(lora, name, layers[name][2:]) for name in targeted(layers, lora, presets)}
    if lora.kind != "lora":
        return [shape for name, adapter in adapters.items()
                for shape in product_shapes(layers[name], adapter.rank, lora).values()]
    for name, adapter in adapters.items():
        _check_adaptable(name, layers[name], adapter, lora)
    return [shape for name, adapter in adapters.items() for shape in adapter_shapes(layers[name], adapter.rank, lora)]


def _check_adaptable(name: str, shape: tuple[int, ...], adapter: Adapter, lora: Lora) -> None:
    """Raises `ConfigError` for a layer that a LoRA cannot have: of each channel by itself, as in SANA's feed-forward
    layers, or for PiSSA with too few rows or columns."""
    if len(shape) == 4 and shape[1] == 1 < shape[0]:
        raise ConfigError(f"lora.targets is {brief(lora.targets)}, which chooses '{name}', but that convolves each "
                          "channel by itself, which a LoRA cannot change",
                          hint="list other layers in lora.targets")
    require_directions(name, shape, adapter, lora)


def require_directions(name: str, shape: Sequence[int], adapter: Adapter, lora: Lora) -> None:
    """Raises `ConfigError` if PiSSA asks a weight for more principal directions than it has."""
    if lora.init == "pissa" and adapter.rank > min(shape[0], prod(shape[1:])):
        raise ConfigError(f"lora.init is 'pissa', but '{name}' of shape {list(shape)} has no {adapter.rank} "
                          "principal directions", hint="a smaller --rank, for this layer alone by lora.layers, or "
                          "--set lora.init=kaiming")


def adapter_shapes(layer: tuple[int, ...], rank: int, lora: Lora) -> list[tuple[int, ...]]:
    """The shapes of an adapter's parameters for a layer's weight of shape `layer`: lora_A, lora_B, and DoRA's lengths.
    """
    ones = tuple(1 for _ in layer[2:])
    lengths = [(1, layer[0], *ones) if ones else (layer[0],)]
    return [(rank, *layer[1:]), (layer[0], rank, *ones), *(lengths if lora.dora else [])]


def is_named(name: str, end: str) -> bool:
    """Whether a layer's name ends in the suffix `end`; one with * is a pattern of the whole name, and one after `re:` a
    regular expression of a part of it. Raises `ConfigError` for an expression that takes too long."""
    if end.startswith("re:"):
        return found_in(name, end.removeprefix("re:"))
    return fnmatchcase(name, end) if "*" in end else name == end or name.endswith(f".{end}")


def found_in(name: str, expression: str) -> bool:
    """Whether the regular expression is found in a layer's name. Raises `ConfigError` if it takes more than `PATIENCE`.

    Python's own `re` may take years for a name of 30 characters, and cannot be interrupted on all systems.
    """
    try:
        return regex.search(expression, name, timeout=PATIENCE) is not None
    except TimeoutError:
        fault = f"takes more than {PATIENCE:g} s to look for in {brief(name)}"
    except (regex.error, RecursionError, OverflowError) as error:
        fault = f"is no regular expression: {error}"
    raise ConfigError(f"the expression {brief(expression)} {fault}", hint="name layers by their ends, as in "
                      "attn2.to_q, or with * for any characters; not by repetitions of repetitions, as in (a+)+")


PATIENCE = 1.0  # seconds


def _way(pattern: str) -> str:
    return "matches" if pattern.startswith("re:") else "ends in"
