"""kohya's names of a LoRA's layers, as records that the modules of families fill."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerSlice:
    """The rows that a layer has in a file's layer, in parts of the whole: most layers are all of one."""

    name: str  # of the file's layer, without a suffix
    first: int = 0
    count: int = 1
    of: int = 1
    halved: bool = False  # whether the file has the halves of the rows exchanged, if the layer has two a column

    def exchanges(self, rows: int, columns: int) -> bool:
        """Whether the halves of this layer's rows are exchanged in the file."""
        return self.halved and rows == 2 * columns


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """Layers of diffusers and their name in the authors' code."""

    layer: str  # a regular expression of the whole name
    name: str  # its groups filled in; "": the layer's own name
    first: int = 0
    count: int = 1
    of: int = 1
    halved: bool = False


def fused(block: str, layers: str, name: str, parts: tuple[int, ...] = ()) -> tuple[Rule, ...]:
    """Rules for `layers` of a block that are one layer in the file; `parts`: their shares of its rows, by default
    equal."""
    names = layers.split()
    shares = parts or (1,) * len(names)
    return tuple(Rule(layer=rf"{block}\.{re.escape(layer)}", name=name, first=sum(shares[:number]),
                      count=shares[number], of=sum(shares)) for number, layer in enumerate(names))


def renamed(block: str, names: str) -> tuple[Rule, ...]:
    """Rules for `layer=name` pairs of a block."""
    pairs = (pair.split("=") for pair in names.split())
    return tuple(Rule(layer=rf"{block}\.{re.escape(layer)}", name=name) for layer, name in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Kohya:
    """kohya's names for a family of models."""

    usual: bool = False  # whether `lora.format = "auto"` means these
    rules: tuple[Rule, ...] = (Rule(layer=".+", name=""),)
    module: str = "networks.lora"  # ss_network_module
    imported: bool = True  # whether `load_lora_weights` of diffusers reads them, too
    counted: bool = False  # whether the rules are those of `LoraLayers.original`

    def slice_of(self, layer: str) -> LayerSlice | None:
        """The slice that a layer is in the file; `None` if the names have none for it."""
        layer_slice = slice_by(self.rules, layer)
        if layer_slice is None:
            return None
        return replace(layer_slice, name=f"lora_unet_{layer_slice.name.replace('.', '_')}")


def slice_by(rules: Iterable[Rule], layer: str) -> LayerSlice | None:
    """The slice that a layer is by the first rule for it, under the authors' name; `None`: there is no rule."""
    for rule in rules:
        if match := re.fullmatch(rule.layer, layer):
            return LayerSlice(name=rule.name.format(*match.groups()) or layer, first=rule.first, count=rule.count,
                              of=rule.of, halved=rule.halved)
    return None


UNET = Kohya(usual=True)
