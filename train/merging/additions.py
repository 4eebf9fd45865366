"""What a LoRA, LoHa or LoKr adds to the weights of the denoiser, read from its file."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

from torch import Tensor

from prep.errors import ModelError
from prep.parse import Unparsed
from prep.runs.documents import open_plain, refused
from train.merging.trained import another
from train.models.naming import Naming, Place, ends_of, in_file_order, shape_of_lengths
from train.models.products import LOHA, PRODUCTS
from train.models.targets import Shapes
from train.runs.safetensors.header import read_header_and_metadata
from train.runs.safetensors.reader import read_safetensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Added:
    """What a LoRA adds to one weight: scale x up @ down, or another product."""

    parts: Mapping[str, Tensor]  # by kind: down and up, or those of LoHa or LoKr
    scale: float
    lengths: Tensor | None  # of DoRA, the length of each row of the sum; else the sum is left as it is


def read_lora(path: Path, layers: Shapes, naming: Naming) -> dict[str, Added]:
    """What the LoRA adds to each weight, by the layer's name. Raises `ModelError`, `CacheError`."""
    try:
        with open_plain(path) as handle:
            _, metadata = read_header_and_metadata(handle, os.fstat(handle.fileno()).st_size)
        tensors = read_safetensors(path, None, None)
    except (OSError, Unparsed, KeyError) as error:
        raise refused(path, error, another(path)) from None
    found: dict[str, Added] = {}
    used: set[str] = set()
    for layout in ("diffusers", "kohya"):
        for place, layer in _placed(layers, layout, naming):
            names = {kind: place.name + end for kind, end in ends_of(layout).items()}
            down, up, lengths = (tensors.get(names[kind]) for kind in ("down", "up", "magnitude"))
            if down is None or up is None:
                continue
            used |= set(names.values())
            rank = down.shape[0]
            stored = tensors.get(names.get("alpha", ""))
            alpha = naming.alpha_of(metadata, layer, rank) if stored is None else float(stored)
            unit = up.shape[0] // place.of
            rows = slice(place.first * unit, (place.first + place.count) * unit)
            _check_shapes(path, layer, down, up[rows], layers[layer])
            up = in_file_order(place, up, down, up)
            if lengths is not None:
                _check_lengths(path, names["magnitude"], lengths, up)
                lengths = in_file_order(place, up, down, lengths.flatten())[rows]
            found[layer] = Added(parts={"down": down, "up": up[rows]}, scale=alpha / rank, lengths=lengths)
    for layer, added, own in _read_products(path, layers, naming, tensors):
        found[layer], used = added, used | own
    if unknown := sorted(tensors.keys() - used):
        raise ModelError(f"{path} has the tensor '{unknown[0][:80]}', which adapts no layer of the denoiser in a way "
                         "that can be merged", hint="name a plain LoRA of the same family of models, without text "
                         "encoders")
    if not found:
        raise ModelError(f"{path} has no tensors, so it is no LoRA", hint="name a run, or a LoRA file")
    return found


def changed(value: Tensor, part: Added, strength: float) -> Tensor:
    """A weight with what the LoRA adds. With DoRA (Liu et al. 2024, equation 5) rows get their length after that; a
    strength is then the way from the weight to the result, as ComfyUI takes it."""
    added = part.scale * _product(part.parts).reshape(value.shape)
    if part.lengths is None:
        return value + strength * added
    summed = value + added
    rows: Tensor = summed.flatten(1).norm(dim=1)
    factor: Tensor = (part.lengths.float() / rows).reshape(-1, *(1 for _ in value.shape[1:]))
    return value + strength * (summed * factor - value)


def _product(given: Mapping[str, Tensor]) -> Tensor:
    """up @ down, or the product of LoHa or LoKr (see `products`), as a matrix with a row for each of the weight's."""
    parts = {kind: value.float().flatten(1) for kind, value in given.items()}
    if "down" in parts:
        return parts["up"] @ parts["down"]
    if any(kind in parts for kind in LOHA):
        first, second = ((parts[a], parts[b]) for a, b in (LOHA[:2], LOHA[2:]))
        return (first[0] @ first[1]) * (second[0] @ second[1])
    small, large = (parts[name] if name in parts else parts[f"{name}_a"] @ parts[f"{name}_b"]
                    for name in ("lokr_w1", "lokr_w2"))
    product = small[:, None, :, None] * large[None, :, None, :]  # Kronecker's
    return product.reshape(len(small) * len(large), -1)


def _read_products(path: Path, layers: Shapes, naming: Naming, tensors: Mapping[str, Tensor],
                   ) -> Iterator[tuple[str, Added, set[str]]]:
    """What LoHa and LoKr add, under LyCORIS' names: layer, addition, and the tensors that it is of."""
    for place, layer in _placed(layers, "kohya", naming):
        names = {kind: name for kind in (*PRODUCTS, "lokr_w1_a", "lokr_w1_b")
                 if (name := f"{place.name}.{kind}") in tensors}
        if not names or place.of > 1:
            continue
        parts = {kind: tensors[name] for kind, name in names.items()}
        ranks = [len(parts[kind]) for kind in ("hada_w1_b", "lokr_w2_b", "lokr_w1_b") if kind in parts]
        alpha = tensors.get(f"{place.name}.alpha")
        scale = float(alpha) / ranks[0] if ranks and alpha is not None else 1.0
        try:
            fits = _product(parts).numel() == prod(layers[layer]) and _product(parts).shape[0] == layers[layer][0]
        except (RuntimeError, KeyError):
            fits = False
        if not fits:
            raise ModelError(f"{path} has '{next(iter(names.values()))[:80]}' and others that do not make a weight of "
                             f"shape {list(layers[layer])}", hint="name the model that the file was trained on")
        yield layer, Added(parts=parts, scale=scale, lengths=None), {*names.values(), f"{place.name}.alpha"}


def _placed(layers: Shapes, layout: str, naming: Naming) -> Iterator[tuple[Place, str]]:
    for layer in layers:
        if (place := naming.place(layer, layout)) is not None:
            yield place, layer


def _check_shapes(path: Path, layer: str, down: Tensor, up: Tensor, shape: tuple[int, ...]) -> None:
    rank = down.shape[0]
    wanted = {"down": (rank, *shape[1:]), "up": (shape[0], rank, *(1 for _ in shape[2:]))}
    for kind, value in (("down", down), ("up", up)):
        if tuple(value.shape) != wanted[kind]:
            raise ModelError(f"{path} has '{kind}' of {layer} with shape {list(value.shape)}, expected "
                             f"{list(wanted[kind])}", hint="name the model that the LoRA was trained on")


def _check_lengths(path: Path, name: str, lengths: Tensor, up: Tensor) -> None:
    """Raises `ModelError` unless the lengths are those of rows: some programs have one for each column."""
    wanted = shape_of_lengths(name, len(up), up.ndim)
    if tuple(lengths.shape) != wanted:
        raise ModelError(f"{path} has '{name[:80]}' with shape {list(lengths.shape)}, expected {list(wanted)}",
                         hint="name a LoRA whose lengths are those of rows (wd_on_output)")
