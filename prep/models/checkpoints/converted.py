"""The weights of a component under the names of the libraries, whatever its files call them.

Of a directory they are as they lie there. Of a single file, what makes a library's tensor of the file's is found by
running diffusers' converter without data, and done when that tensor is read: nothing is there twice, and the form that
it is read into is that of its use.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from prep.errors import ModelError, first_line
from prep.formatting import join_texts
from prep.models.checkpoints.bounds import TooMuch, build, limited, of_diffusers
from prep.models.checkpoints.classes import imported
from prep.models.checkpoints.contents import name_configs
from prep.models.checkpoints.gguf import QUANTIZED
from prep.models.checkpoints.original import Fit, Made, Way, fit, ways_of_diffusers, ways_of_encoder
from prep.models.checkpoints.staging import staged
from prep.models.checkpoints.stored import DTYPES, SPELLED, Stored
from prep.models.files import ComponentFiles, StoredTensor
from prep.models.weights import Scales
from prep.parse import brief

# Of a weight that is multiplied by its scale, or unpacked from fewer bits, where no other dtype is asked for.
SCALED = torch.bfloat16


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted(Stored):
    """The tensors of a component of a single file, by the names of its library."""

    source: Stored
    made: Mapping[str, Made]
    last: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)  # one: other parts follow

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor `name` as the file has it, of fp8 with scales as `dtype`. Raises `ModelError`."""
        return self.made[name].value(lambda there: self.source.read(there, dtype or SCALED)).contiguous()

    def cast(self, name: str, dtype: torch.dtype) -> Tensor:
        """The tensor `name` as `dtype`, in memory of its own. Raises `ModelError`."""
        made = self.made[name]
        if made.func is None:
            return self.source.cast(made.name, dtype)
        value = made.value(lambda there: self._once(there, dtype)).to(dtype).contiguous()
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes or self._is_whole(value) else value

    def _once(self, name: str, dtype: torch.dtype) -> Tensor:
        if (name, dtype) not in self.last:
            self.last.clear()
            self.last[name, dtype] = self.source.cast(name, dtype)
        return self.last[name, dtype]

    def _is_whole(self, value: Tensor) -> bool:
        """Whether `value` shares the memory of the one that is kept."""
        return any(value.data_ptr() == one.data_ptr() for one in self.last.values())


def empty_model(files: ComponentFiles) -> Any:
    """The model that the config in `files` describes, without memory. Raises `ModelError`."""
    try:
        with limited(files.tensors), torch.device("meta"):
            if files.kind[0] == "diffusers":
                return of_diffusers(imported(files.kind), files)
            with staged(files) as folder:
                return build(imported(files.kind), folder)
    except ModelError:
        raise
    except (TooMuch, MemoryError):
        raise ModelError(f"{files.folder / 'config.json'} describes a model far larger than what {files.place} has",
                         hint=name_configs(files.place)) from None
    except Exception as error:  # bad values can raise nearly any exception
        raise ModelError(f"{files.folder / 'config.json'} cannot be used: {first_line(error)}",
                         hint=name_configs(files.place)) from None


def weights_of(files: ComponentFiles, model: Any) -> Stored:
    """The weights in `files` for `model`, which has no memory, by its names.

    Raises `ModelError` if those of a single file do not fit.
    """
    tensors = files.tensors
    if not files.part:
        return Stored.of(tensors)
    stored = Stored.of({there: tensors[name] for name, there in files.part.items()})
    found = [each for way in _ways(files, stored, model) if (each := _fit(way, stored, model)) is not None]
    if not found:
        raise ModelError(f"the {files.folder.name.replace('_', ' ')} in {files.place} is no {type(model).__name__} as "
                         f"in {files.folder}, or diffusers does not know its names", hint=name_configs(files.place))
    best = max(found, key=lambda one: (one.whole, one.common))
    spoken = files.folder.name.replace("_", " ")
    for names, what in ((best.missing, f"lacks weights of the {spoken}"),
                        (best.misshapen, f"has weights of the {spoken} whose shapes are not those of {files.folder}"),
                        (best.unread, "has tensors that nothing reads")):
        if names:
            raise ModelError(f"{files.place} {what}: {join_texts(names, 3)}", hint=name_configs(files.place))
    return Converted(tensors=dict(_tensors(best, stored)), scales=Scales(of={}, beside=frozenset()), source=stored,
                     made=best.made)


def weights_to_give(files: ComponentFiles, dtype: torch.dtype | None) -> dict[str, Any] | None:
    """The weights of a model of transformers by name, each read as `dtype` where the library asks for its values.

    `None` for those that the library reads itself: of a directory, without scales. Raises `ModelError`.
    """
    if files.part:
        stored = weights_of(files, empty_model(files))
    else:
        stored = Stored.of(files.tensors)
        if not stored.scales.beside:
            return None
    lock = Lock()
    return {name: _Read(stored, name, dtype or torch.float32, lock) for name in stored.tensors
            if name not in stored.scales.beside}


@dataclass(frozen=True, slots=True)
class _Read:
    """A tensor that is read by `tensor[...]`, as transformers asks for the slices of safetensors. Several threads may.
    """

    stored: Stored
    name: str
    dtype: torch.dtype
    lock: Lock

    def __getitem__(self, _: Any) -> Tensor:
        with self.lock:
            return self.stored.cast(self.name, self.dtype)


def _ways(files: ComponentFiles, stored: Stored, model: Any) -> Iterator[Way]:
    part = {name: there for name, there in files.part.items() if there not in stored.scales.beside}
    if files.kind[0] != "diffusers":
        name, there = next(iter(part.items()))
        yield from ways_of_encoder(there.removesuffix(name), part, model)
    else:
        yield from ways_of_diffusers(type(model), files.config, part)


def _fit(way: Way, stored: Stored, model: Any) -> Fit | None:
    """How the file's tensors fit into `model`; `None`: they are of another. Raises `ModelError`."""
    given = {name: torch.empty(stored.tensors[there].shape, dtype=_dtype(stored, there), device="meta")
             for name, there in way.names.items()}
    try:
        found = fit(given, way, model)
    except Exception:  # a converter stumbles over what it does not find
        return None
    return found if 2 * found.common > len(model.state_dict()) else None


def _dtype(stored: Stored, name: str) -> torch.dtype:
    unpacked = name in stored.scales.of or stored.tensors[name].dtype in QUANTIZED
    found = SCALED if unpacked else DTYPES.get(stored.tensors[name].dtype)
    if found is None:
        raise ModelError(f"{stored.tensors[name].path} has {brief(name)} as {stored.tensors[name].dtype}, expected one "
                         f"of: {', '.join(DTYPES)}")
    return found


def _tensors(found: Fit, stored: Stored) -> Iterator[tuple[str, StoredTensor]]:
    """Each tensor of the library, at the place of the first that it is made of."""
    for name, (dtype, shape) in found.layout.items():
        sources = [stored.tensors[there] for there in found.made[name].names()]
        begin = min((one.begin for one in sources), default=0)
        path = sources[0].path if sources else Path()
        yield name, StoredTensor(path=path, dtype=SPELLED[dtype], shape=shape, begin=begin, end=begin)
