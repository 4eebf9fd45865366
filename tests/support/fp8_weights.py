"""Weights of 8 bits with scales beside them, as ComfyUI and others write them; and plain ones that mean the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]
MOST = 448.0  # the largest number of float8 e4m3


def by_tensor(weight: torch.Tensor) -> torch.Tensor:
    """One scale for all of a weight."""
    return (weight.float().abs().max() / MOST).clamp(min=1e-12)


def by_row(weight: torch.Tensor) -> torch.Tensor:
    """A scale for each row."""
    return (weight.float().abs().amax(1, keepdim=True) / MOST).clamp(min=1e-12)


def by_block(weight: torch.Tensor) -> torch.Tensor:
    """A scale for each 128 rows and columns."""
    rows, columns = (-(-side // 128) for side in weight.shape)
    return torch.tensor([[by_tensor(weight[128 * row:128 * row + 128, 128 * column:128 * column + 128])
                          for column in range(columns)] for row in range(rows)])


def spread(scale: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """A scale for each number."""
    if (scale.ndim == 2 and scale.shape[1] != 1) or scale.numel() > shape[0]:
        return scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:shape[0], :shape[1]]
    return scale.expand(shape)


def scaled(weights: Weights, name: str = "scale_weight", scale_of: Callable[[torch.Tensor], torch.Tensor] = by_tensor,
           only: str = "") -> tuple[Weights, Weights]:
    """`weights` with the matrices whose names hold `only` as fp8 and their scales beside them; and what these mean."""
    found, meant = Weights(), Weights(weights)
    for key, value in weights.items():
        if value.ndim != 2 or not key.endswith(".weight") or only not in key or "embed" in key or "shared" in key:
            found[key] = value
            continue
        scale = scale_of(value)
        found[key] = (value.float() / spread(scale, value.shape)).to(torch.float8_e4m3fn)
        found[f"{key.removesuffix('weight')}{name}"] = scale
        meant[key] = (found[key].float() * spread(scale, value.shape)).to(value.dtype)
    return found, meant


def rewrite(folder: Path, change: Callable[[Weights], Weights]) -> None:
    """Changes the weights in a component's directory, which may be in several files."""
    for path in sorted(folder.glob("*.safetensors")):
        save_file({key: value.contiguous() for key, value in change(load_file(path)).items()}, path,
                  metadata={"format": "pt"})


def split(folder: Path) -> None:
    """Divides a component's weights among two files and an index: names by turns, so that a weight and its scale part.
    """
    (path,) = folder.glob("*.safetensors")
    tensors = load_file(path)
    names = [f"{path.stem}-0000{number}-of-00002.safetensors" for number in (1, 2)]
    placed = {key: names[number % 2] for number, key in enumerate(sorted(tensors))}
    for name in names:
        save_file({key: value for key, value in tensors.items() if placed[key] == name}, folder / name,
                  metadata={"format": "pt"})
    path.unlink()
    (folder / f"{path.stem}.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
