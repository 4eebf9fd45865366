"""Finds the safetensors files of a component, and checks their headers against file sizes.

Format: 8 bytes with the header's length (little-endian), the header as JSON, then the tensors without gaps.
"""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from prep.errors import ModelError
from prep.models.checkpoints import gguf
from prep.models.files import (
    FETCH_AGAIN,
    Shape,
    StoredTensor,
    open_regular,
    read_config,
    unreadable,
)
from prep.parse import brief

HEADER_BYTES = 100_000_000  # MAX_HEADER_SIZE of the safetensors library
MOST_TENSORS = 1 << 16  # of a file; the largest checkpoints have a few thousand
_MOST_A_BYTE = 2  # numbers of the smallest dtype, F4


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


def has_weights(folder: Path) -> bool:
    """Whether `folder` has a safetensors file, of any name. Raises `ModelError` if it cannot be listed."""
    try:
        return any(name.endswith(".safetensors") for name in os.listdir(folder))  # noqa: PTH208  (names, not paths)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise unreadable(folder, error) from None


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
    """The shape of each weight in `paths`. Raises `ModelError` for a truncated file, and for a tensor in two."""
    return shapes_in(read_tensors(paths))


def shapes_in(tensors: Mapping[str, StoredTensor]) -> dict[str, Shape]:
    """The shape of each weight among `tensors`: of those that are no scales."""
    beside = scales_in(tensors).beside
    return {name: tensor.shape for name, tensor in tensors.items() if name not in beside}


def read_tensors(paths: Iterable[Path]) -> dict[str, StoredTensor]:
    """Each tensor in `paths`, from their headers. Raises `ModelError` as `read_shapes` does."""
    found: dict[str, StoredTensor] = {}
    for path in paths:
        tensors = gguf.tensors_in(path) if path.suffix.lower() == gguf.SUFFIX else _tensors_in(path)
        if both := sorted(found.keys() & tensors.keys()):
            raise ModelError(f"{path} has the tensor {brief(both[0])}, which another file of these weights has too",
                             hint=FETCH_AGAIN)
        found |= tensors
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Which tensors beside weights of 8 bits say what their numbers are multiplied by."""

    of: Mapping[str, str]  # by the name of the weight
    beside: frozenset[str]  # these, and what else tells how the weights were rounded: no model has such a tensor


# What follows a layer's name. ComfyUI: scale_weight, later weight_scale; block-wise fp8: weight_scale_inv.
_SCALES = ("scale_weight", "weight_scale", "weight_scale_inv")
# The scales that a layer's input would be divided by to compute in 8 bits, which we do not; the name of the format.
_OF_INPUTS = ("scale_input", "input_scale", "comfy_quant")
_MARK = "scaled_fp8"  # an empty tensor that says that weights have scales


def scales_in(names: Collection[str]) -> Scales:
    """The scales among tensors of these names."""
    of: dict[str, str] = {}
    beside: set[str] = set()
    for name in names:
        layer, dot, last = name.rpartition(".")
        weight = f"{layer}{dot}weight"
        if last == _MARK or (last in _OF_INPUTS and weight in names):
            beside.add(name)
        elif last in _SCALES and weight in names and weight not in of:
            beside.add(name)
            of[weight] = name
    return Scales(of=of, beside=frozenset(beside))


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


def _bytes_of(path: Path, tensor: StoredTensor) -> bytes:
    try:
        with open_regular(path) as file:
            file.seek(tensor.begin)
            return file.read(tensor.end - tensor.begin) if tensor.end - tensor.begin <= 8 * MOST_NUMBERS else b""
    except OSError as error:
        raise unreadable(path, error) from None


def read_metadata(path: Path) -> dict[str, str]:
    """What the file's program wrote beside its tensors. Raises `ModelError`."""
    _, _, header = (0, 0, b"{}") if path.suffix.lower() == gguf.SUFFIX else _header(path)
    try:
        found = json.loads(header).get("__metadata__")
    except (ValueError, AttributeError, RecursionError):
        found = None
    return {str(key): str(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _header(path: Path) -> tuple[int, int, bytes]:
    """The bytes of a file, and of its header; and the header, empty if it is longer than it may be."""
    try:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8) or b"", "little")
            return size, length, file.read(length) if length <= min(HEADER_BYTES, size - 8) else b""
    except OSError as error:
        raise unreadable(path, error) from None


def _tensors_in(path: Path) -> dict[str, StoredTensor]:
    size, length, header = _header(path)
    try:
        entries = json.loads(header, object_pairs_hook=named_once)
        if len(entries) > MOST_TENSORS:
            raise ModelError(f"{path} has {len(entries)} tensors, expected at most {MOST_TENSORS}", hint=FETCH_AGAIN)
        tensors = {name: _tensor(path, value, 8 + length) for name, value in entries.items() if name != "__metadata__"}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        raise ModelError(f"{path} has no safetensors header; it is damaged or has another format",
                         hint=FETCH_AGAIN) from None
    wanted = max((tensor.end for tensor in tensors.values()), default=8 + length)
    if size != wanted:
        raise ModelError(f"{path} has {size} bytes, expected {wanted} as its header says", hint=FETCH_AGAIN)
    at = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda entry: (entry[1].begin, entry[1].end)):
        if tensor.begin != at:
            raise ModelError(f"{path} has the tensor {brief(name)} from byte {tensor.begin} on, expected {at}: tensors "
                             "follow each other", hint=FETCH_AGAIN)
        at = tensor.end
    return tensors


def named_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object. Raises `ValueError` if it has a name twice, of which libraries take different ones."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name occurs twice")
    return table


def _tensor(path: Path, value: Any, start: int) -> StoredTensor:
    """A tensor from its entry in a header, whose data starts at `start`."""
    shape, (begin, end) = tuple(value["shape"]), value["data_offsets"]
    if not all(type(number) is int and number >= 0 for number in (*shape, begin, end)) or begin > end:
        raise ValueError
    if prod(shape) > _MOST_A_BYTE * (end - begin):
        raise ValueError
    return StoredTensor(path=path, dtype=str(value["dtype"]), shape=shape, begin=start + begin, end=start + end)


MOST_VALUE = 1 << 25  # of a config's numbers if its weights are few; the largest known is a language model's rope_theta


def check_numbers(config: Mapping[str, Any], path: Path, tensors: Mapping[str, StoredTensor]) -> None:
    """Raises `ModelError` if a whole number in `config`, which was read from `path`, is more than its weights have
    numbers: none could be so long, and libraries make lists of such lengths as soon as they read the config.

    What the config asks for in all is checked when it is built: see `checkpoints.bounds`.
    """
    most = max(MOST_VALUE, sum(prod(tensor.shape) for tensor in tensors.values()))
    level: list[tuple[str, Any]] = [(str(key), value) for key, value in config.items()]
    while level:
        for key, value in level:
            if type(value) is int and abs(value) > most:
                raise ModelError(f"{path} has {key} {value}, more than its weights have numbers", hint=TWO_MODELS)
        level = [(f"{key}.{inner}", each) for key, value in level if isinstance(value, dict | list)
                 for inner, each in (value.items() if isinstance(value, dict) else enumerate(value))]


TWO_MODELS = "config.json and weights are from different models; download both again"
