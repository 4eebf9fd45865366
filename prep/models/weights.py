"""Finds the safetensors files of a component, and checks their headers against file sizes and the config.

Format: 8 bytes with the header's length (little-endian), the header as JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.models.files import FETCH_AGAIN, open_regular, read_config, unreadable
from prep.parse import brief

HEADER_BYTES = 100_000_000  # MAX_HEADER_SIZE of the safetensors library
Shape = tuple[int, ...]


def index_name(stem: str, variant: str = "") -> str:
    """The name of the file that says where each tensor is, for weights in several files."""
    return f"{stem}.safetensors.index{variant and f'.{variant}'}.json"


def variant_of(folder: Path, stem: str) -> str:
    """The variant of the weights in `folder` that are used: "" if some have none, as diffusers does, else the only one.

    A variant is a part of the file's name: fp16 of model.fp16.safetensors. Raises `ModelError` for several.
    """
    if any(os.path.lexists(folder / name) for name in (f"{stem}.safetensors", index_name(stem))):
        return ""
    pattern = re.compile(rf"{re.escape(stem)}\.(?:(\w+)\.safetensors|safetensors\.index\.(\w+)\.json)", re.ASCII)
    try:
        matches = [pattern.fullmatch(name) for name in os.listdir(folder)]  # noqa: PTH208  (names, not paths)
    except OSError as error:
        raise unreadable(folder, error) from None
    found = sorted({match[1] or match[2] for match in matches if match})
    if len(found) > 1:
        raise ModelError(f"{folder} has weights of the variants {', '.join(found)}, and none without a variant",
                         hint="keep those of one variant in the directory, and move the others elsewhere")
    return found[0] if found else ""


def weight_files(folder: Path, stem: str, variant: str = "") -> tuple[Path, ...]:
    """The safetensors files of `variant` that diffusers and transformers would load from `folder`. Raises `ModelError`.

    A single file beside an index is refused: transformers takes the file, diffusers the index.
    """
    single = folder / f"{stem}{variant and f'.{variant}'}.safetensors"
    index = folder / index_name(stem, variant)
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


def read_vector(paths: Sequence[Path], name: str) -> tuple[float, ...]:
    """The numbers of the tensor `name` with one dimension, from the file among `paths` that has it.

    Raises `ModelError`, also if no file has it, or if it has another shape or dtype.
    """
    for path in paths:
        found = _tensors_in(path).get(name)
        if found is None:
            continue
        code = _CODES.get(found.dtype)
        if len(found.shape) != 1 or found.shape[0] > MOST_NUMBERS or code is None:
            raise ModelError(f"{path} has {name} {found.dtype} {list(found.shape)}, expected one dimension of floats",
                             hint=FETCH_AGAIN)
        data = _bytes_of(path, found)
        if found.dtype == "BF16":  # the upper half of a float32
            data = b"".join(b"\0\0" + data[at:at + 2] for at in range(0, len(data), 2))
        if len(data) != struct.calcsize(code) * found.shape[0]:
            raise ModelError(f"{path} has {name} of {len(data)} bytes, expected {found.shape[0]} numbers",
                             hint=FETCH_AGAIN)
        return struct.unpack(f"<{found.shape[0]}{code}", data)
    raise ModelError(f"the weights in {paths[0].parent} have no tensor {name}", hint=FETCH_AGAIN)


_CODES = {"F64": "d", "F32": "f", "F16": "e", "BF16": "f"}  # safetensors' dtypes as those of `struct`
MOST_NUMBERS = 1 << 16  # of a vector; FLUX.2's VAE has 128


@dataclass(frozen=True, kw_only=True, slots=True)
class _Tensor:
    """A tensor's entry in a header."""

    dtype: str
    shape: Shape
    begin: int  # in the file
    end: int


def _bytes_of(path: Path, tensor: _Tensor) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(tensor.begin)
            return file.read(tensor.end - tensor.begin) if tensor.end - tensor.begin <= 8 * MOST_NUMBERS else b""
    except OSError as error:
        raise unreadable(path, error) from None


def _shapes_in(path: Path) -> dict[str, Shape]:
    return {name: tensor.shape for name, tensor in _tensors_in(path).items()}


def _tensors_in(path: Path) -> dict[str, _Tensor]:
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8) or b"", "little")
            header = file.read(length) if length <= min(HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        tensors = {name: _tensor(value, 8 + length) for name, value in json.loads(header).items()
                   if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(f"{path} has no safetensors header; it is damaged or has another format",
                         hint=FETCH_AGAIN) from None
    wanted = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if size != wanted:
        raise ModelError(f"{path} has {size} bytes, expected {wanted} as its header says", hint=FETCH_AGAIN)
    return tensors


def _tensor(value: Any, start: int) -> _Tensor:
    """A tensor from its entry in a header, whose data starts at `start`."""
    shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)) or begin > end:
        raise ValueError
    return _Tensor(dtype=str(value["dtype"]), shape=shape, begin=start + begin, end=start + end)


# Config keys that are a side of some tensor, or a number of layers with a tensor each.
SIZES = ("base_dim", "block_out_channels", "cross_attention_dim", "decoder_block_out_channels",
         "decoder_layers_per_block", "dim_mult", "encoder_block_out_channels", "encoder_layers_per_block",
         "hidden_size", "in_channels", "intermediate_size", "latent_channels", "layers_per_block", "num_hidden_layers",
         "num_layers", "out_channels", "transformer_layers_per_block", "vocab_size", "d_ff", "d_model")
POSITIONS = "max_position_embeddings"  # of CLIP a table; language models compute positions, and allocate nothing
SLACK = 16


def check_sizes(kind: str, config: Mapping[str, Any], path: Path, shapes: Mapping[str, Shape]) -> None:
    """Raises `ModelError` if a config asks for far more than its weights have: a library would allocate it first.

    `kind` is the class that is loaded. `loading.refuse_holes` names single tensors that are missing or have another
    shape.
    """
    most = SLACK * max([len(shapes), *(side for shape in shapes.values() for side in shape)])
    keys = (*SIZES, *((POSITIONS,) if kind.startswith("CLIP") else ()))
    nested = ((f"{name}.", table) for name, table in config.items() if isinstance(table, dict))  # text_config
    for prefix, table in (("", config), *nested):
        for key in keys:
            sizes = table.get(key)
            listed: Sequence[Any] = sizes if isinstance(sizes, list) else [sizes]
            numbers = [size for size in listed if isinstance(size, int | float)]
            if len(listed) > most or not all(0 <= size <= most for size in numbers):
                raise ModelError(f"{path} has {prefix}{key} {brief(sizes)}, far more than its {len(shapes)} tensors "
                                 "have", hint="config and weights are from different models; download both again")
