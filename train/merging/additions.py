"""The additions of an adapter of any kind, or of a whole difference, to the denoiser's weights, read from its file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prep.models.lora.kohya import LayerSlice
from prep.parse import Unparsed
from prep.runs.documents import refused
from train.merging.trained import another
from train.models.adapters.stored import by_columns, check_shapes
from train.models.naming import Naming
from train.models.products import LOHA
from train.models.targets import Shapes
from train.runs.lora_file import LoraFile, open_lora, unfit
from train.runs.safetensors.reader import STORED, read_safetensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """The addition of an adapter to one weight: scale x up @ down, or another product."""

    where: LayerSlice  # the weight's rows among those of the product
    parts: Mapping[str, Tensor]  # by kind: down and up, or those of another adapter, or diff; empty for a bias alone
    scale: float
    lengths: Tensor | None  # of DoRA, the length of each row of the sum, or column; else the sum is left as it is
    columns: bool = False  # whether the lengths are those of columns
    bias: Tensor | None = None  # what it adds to the layer's bias


@dataclass(frozen=True, kw_only=True, slots=True)
class Additions:
    """The additions of a file to each weight, by the layer's name."""

    file: LoraFile
    added: Mapping[str, Added]


def read_lora(path: Path, layers: Shapes, naming: Naming) -> Additions:
    """The additions of the LoRA to each weight. Raises `ModelError`, `CacheError`, and before it reads any value."""
    file = open_lora(path, layers, naming, another(path))
    scales = {}
    for adapter in file.contents.adapters:
        try:
            check_shapes(adapter, file.shapes, layers)
            scales[adapter.name] = file.scale(adapter)
        except Unparsed as error:
            raise unfit(path, error) from None
    try:
        tensors = read_safetensors(path, None, None, STORED)
    except (OSError, Unparsed) as error:
        raise refused(path, error, another(path)) from None
    added = {}
    for adapter in file.contents.adapters:
        parts = {kind: tensors[name] for kind, name in adapter.tensors.items()
                 if kind not in ("alpha", "magnitude", "diff_b")}
        bias = adapter.tensors.get("diff_b")
        lengths = adapter.tensors.get("magnitude")
        if adapter.kind == "ia3":
            _require_axis(path, parts, layers[adapter.parts[0][1]], adapter.rows(layers))
        for where, layer in adapter.parts:
            added[layer] = Added(where=where, parts=parts, scale=scales[adapter.name],
                                 bias=None if bias is None else _rows(where, tensors[bias].float(), layers[layer]),
                                 lengths=None if lengths is None else tensors[lengths],
                                 columns=lengths is not None and where.of == 1 and by_columns(
                                     lengths, file.shapes[lengths], layers[layer]))
    return Additions(file=file, added=added)


def changed(value: Tensor, part: Added, strength: float) -> Tensor:
    """A weight with the LoRA's addition. With DoRA (Liu et al. 2024, equation 5) rows get their length after that; a
    strength is then the way from the weight to the result, as ComfyUI takes it."""
    if not part.parts:
        return value
    added = part.scale * _added(value, part)
    if part.lengths is None:
        return value + strength * added
    summed, ones = value + added, (1 for _ in value.shape[2:])
    if part.columns:
        across: Tensor = summed.transpose(0, 1).flatten(1).norm(dim=1)
        factor = (part.lengths.float().flatten() / across).reshape(1, -1, *ones)
    else:
        rows: Tensor = summed.flatten(1).norm(dim=1)
        lengths = _rows(part.where, part.lengths.float().flatten(), value.shape)
        factor = (lengths / rows).reshape(-1, 1, *ones)
    return value + strength * (summed * factor - value)


def _added(value: Tensor, part: Added) -> Tensor:
    """The addition to a weight, before it is scaled. GLoRA (Chavan et al. 2023) also adds W @ a1 @ a2, IA3 (Liu et al.
    2022), as LyCORIS has it, W times factors of its rows or columns."""
    parts = part.parts
    if "ia3" in parts:
        factors, ones = parts["ia3"].float().flatten(), (1 for _ in value.shape[2:])
        if parts["ia3_input"]:
            return value * factors.reshape(1, -1, *ones)
        return value * _rows(part.where, factors, value.shape).reshape(-1, 1, *ones)
    addition = _rows(part.where, _product(parts), value.shape).reshape(value.shape)
    if "glora_a1" in parts:
        first, second = (parts[f"glora_{name}"].float().flatten(1) for name in ("a1", "a2"))
        addition = addition + torch.einsum("oi...,ir,rj->oj...", value, first, second)
    return addition


def _require_axis(path: Path, parts: Mapping[str, Tensor], layer: tuple[int, ...], rows: int) -> None:
    """Raises `ModelError` unless IA3 has as many factors as the axis that its flag says."""
    expected, count = layer[1] if parts["ia3_input"] else rows, parts["ia3"].numel()
    if count != expected:
        raise unfit(path, Unparsed(f"it has {count} factors of IA3 for an axis of {expected}"))


def _rows(where: LayerSlice, whole: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The rows of a weight of this shape among those of a whole file's layer, in the weight's order."""
    unit = len(whole) // where.of
    if len(shape) > 1 and where.exchanges(len(whole), shape[1]):
        return whole.roll(len(whole) // 2, 0)
    return whole[where.first * unit : (where.first + where.count) * unit]


def _product(tensors: Mapping[str, Tensor]) -> Tensor:
    """up @ down, or the product of LoHa or LoKr (see `products`), each also by Tucker's decomposition, or a whole
    difference, as a matrix with a row for each of the weight's."""
    if "diff" in tensors:
        return tensors["diff"].float().reshape(len(tensors["diff"]), -1)
    parts = {kind: value.float().flatten(1) for kind, value in tensors.items()}

    def product(first: str, second: str, core: str) -> Tensor:
        if core not in tensors:
            return parts[first] @ parts[second]
        left = parts[first].T if first == "up" else parts[first]  # LoHa's and LoKr's have a row for each rank
        matrix: Tensor = torch.einsum("ij...,ip,jq->pq...", tensors[core].float(), left, parts[second])
        return matrix.flatten(1)

    if "down" in parts:
        return product("up", "down", "mid")
    if "glora_b1" in parts:
        return parts["glora_b1"] @ parts["glora_b2"]
    if any(kind in parts for kind in LOHA):
        return product(*LOHA[:2], "hada_t1") * product(*LOHA[2:], "hada_t2")
    small, large = (parts[name] if name in parts else product(f"{name}_a", f"{name}_b", core)
                    for name, core in (("lokr_w1", ""), ("lokr_w2", "lokr_t2")))
    whole = small[:, None, :, None] * large[None, :, None, :]  # Kronecker's
    return whole.reshape(len(small) * len(large), -1)
