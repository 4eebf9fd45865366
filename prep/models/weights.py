"""Finds the safetensors files of a component, and checks their headers against file sizes and the config.

Format: 8 bytes with the header's length (little-endian), the header as JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.models.files import FETCH_AGAIN, open_regular, read_config, unreadable
from prep.parse import brief

HEADER_BYTES = 100_000_000  # MAX_HEADER_SIZE of the safetensors library
Shape = tuple[int, ...]


def weight_files(folder: Path, stem: str) -> tuple[Path, ...]:
    """The safetensors files that diffusers and transformers would load from `folder`. Raises `ModelError`.

    A single file beside an index is refused: transformers takes the file, diffusers the index.
    """
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if os.path.lexists(single) and os.path.lexists(index):
        raise ModelError(f"{folder} has two sets of weights, {single.name} and {index.name}",
                         hint="libraries disagree on which to load; remove one")
    if os.path.lexists(single):
        return (single,)
    if os.path.lexists(index):
        return tuple(folder / name for name in _parts(index))
    raise ModelError(f"{folder} has no {single.name}", hint="only safetensors are read; to convert .bin weights, "
                     "load them with their library and call save_pretrained(DIR, safe_serialization=True)")


def _parts(index: Path) -> list[str]:
    """The files that an index of weights names, sorted."""
    placed = read_config(index).get("weight_map")
    names = set(map(str, placed.values())) if isinstance(placed, dict) else set()
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"{index} names {brief(name)}, expected safetensors files beside it", hint=FETCH_AGAIN)
    if not names:
        raise ModelError(f"{index} has weight_map {brief(placed)}, expected the file of each tensor", hint=FETCH_AGAIN)
    return sorted(names)


def read_shapes(paths: Iterable[Path]) -> dict[str, Shape]:
    """The shape of each tensor in `paths`. Raises `ModelError` for a truncated file, and for a tensor in two."""
    found: dict[str, Shape] = {}
    for path in paths:
        shapes = _shapes_in(path)
        if both := sorted(found.keys() & shapes.keys()):
            raise ModelError(f"{path} has the tensor {brief(both[0])}, which another file of these weights has too",
                             hint=FETCH_AGAIN)
        found |= shapes
    return found


def _shapes_in(path: Path) -> dict[str, Shape]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8) or b"", "little")
            header = file.read(length) if length <= min(HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        tensors = {name: _tensor(value) for name, value in json.loads(header).items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(f"{path} has no safetensors header; it is damaged or has another format",
                         hint=FETCH_AGAIN) from None
    wanted = 8 + length + max((end for _, end in tensors.values()), default=0)
    if size != wanted:
        raise ModelError(f"{path} has {size} bytes, expected {wanted} as its header says", hint=FETCH_AGAIN)
    return {name: shape for name, (shape, _) in tensors.items()}


def _tensor(value: Any) -> tuple[Shape, int]:
    """Shape and end offset of a tensor, from its header entry."""
    shape, (_, end) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, end)):
        raise ValueError
    return shape, end


# Config keys that are a side of some tensor, or a number of layers with a tensor each.
SIZES = ("block_out_channels", "cross_attention_dim", "hidden_size", "in_channels", "intermediate_size",
         "latent_channels", "layers_per_block", "max_position_embeddings", "num_hidden_layers", "num_layers",
         "out_channels", "transformer_layers_per_block", "vocab_size", "d_ff", "d_model")
SLACK = 16


def check_sizes(config: Mapping[str, Any], path: Path, shapes: Mapping[str, Shape]) -> None:
    """Raises `ModelError` if a config asks for far more than its weights have: a library would allocate it first.

    `loading.refuse_holes` names single tensors that are missing or have another shape.
    """
    most = SLACK * max([len(shapes), *(side for shape in shapes.values() for side in shape)])
    for key in SIZES:
        sizes = config.get(key)
        listed: Sequence[Any] = sizes if isinstance(sizes, list) else [sizes]
        numbers = [size for size in listed if isinstance(size, int | float)]
        if len(listed) > most or not all(0 <= size <= most for size in numbers):
            raise ModelError(f"{path} has {key} {brief(sizes)}, far more than its {len(shapes)} tensors have",
                             hint="config and weights are from different models; download both again")
