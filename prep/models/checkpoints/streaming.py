"""Builds a model of diffusers without memory, and reads its weights, each straight into the form and place of its use.

Nothing is there twice: neither a model of random numbers first, nor all weights in another dtype. A library's own
loading maps files, whose changes would end the process; these are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration

from prep.models.checkpoints.bounds import of_diffusers
from prep.models.checkpoints.stored import Stored
from prep.models.files import ComponentFiles
from prep.progress import Tick

# Is given a layer's name and the layer with its weights, where they are used, and returns what takes its place.
Settle = Callable[[str, nn.Module], nn.Module]
# Is given a parameter's name and its whole value, and returns what the model gets in its place.
Keep = Callable[[str, Tensor], Tensor]


def without_weights(kind: Any, files: ComponentFiles) -> Any:
    """A model of class `kind` with the config in `files`, whose parameters are on the meta device. Its buffers are what
    the constructor makes of them. Raises nearly any exception.
    """
    with _parameters_on_meta():
        return of_diffusers(kind, files)


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Within it, parameters lose their memory as they become those of a module, before it is written to."""
    def emptied(_module: Any, _name: str, value: nn.Parameter | None) -> nn.Parameter | None:
        return None if value is None else nn.Parameter(value.to("meta"), requires_grad=value.requires_grad)

    hook = registration.register_module_parameter_registration_hook(emptied)  # type: ignore[arg-type]  # its answer counts
    try:
        yield
    finally:
        hook.remove()


def names_in(model: Any, stored: Stored, files: ComponentFiles) -> dict[str, str]:
    """The name in `stored` of each tensor, by the one that this release of the library has for it."""
    names: Any = {name: name for name in stored.tensors if name not in stored.scales.beside}
    if len(files.weights) == 1:  # as the library, which renamed parts of attention before it wrote several files
        model._fix_state_dict_keys_on_load(names)
    return dict(names)


def compared(model: Any, stored: Stored, names: Mapping[str, str]) -> dict[str, Any]:
    """Which tensors of the model and of its files have no counterpart, as libraries report it."""
    wanted = model.state_dict()
    shapes = {name: stored.tensors[source].shape for name, source in names.items()}
    return {"missing_keys": wanted.keys() - names.keys(), "unexpected_keys": names.keys() - wanted.keys(),
            "mismatched_keys": [(name, shape, wanted[name].shape) for name, shape in shapes.items()
                                if name in wanted and tuple(wanted[name].shape) != shape]}


def fill(model: Any, stored: Stored, names: Mapping[str, str], dtype: torch.dtype, device: torch.device,
         settle: Settle, keep: Keep, tick: Tick) -> None:
    """Gives the model its weights as `dtype`, a layer at a time in the order of the files. Raises `ModelError`.

    Parameters that its class keeps in float32 are so. `settle` is given the other layers on `device`, where a GPU
    quantizes in a fraction of the time. What `keep` returns may be on the meta device, and stays there.
    `tick` counts the bytes of each layer's weights, as `Stored.size` says them.
    """
    in_float32 = kept_in_float32(model)
    layers = dict(model.named_modules())
    own = {name: [f"{name}{name and '.'}{each}" for each in _own(layer)] for name, layer in layers.items()}

    def place(name: str) -> tuple[str, int]:
        return min(((str(found.path), found.begin) for each in own[name] if each in names
                    for found in [stored.tensors[names[each]]]), default=("", 0))

    for name in sorted(layers, key=place):
        layer = layers[name]
        for each in own[name]:
            of_weights = torch.float32 if in_float32(each) else dtype
            _put(layer, each, stored, names.get(each), of_weights, dtype, keep)
        layer._apply(lambda value: value if value.is_meta else value.to(device), recurse=False)
        settled = layer if in_float32(name) else settle(name, layer)
        if settled is not layer:
            parent, _, last = name.rpartition(".")
            setattr(layers[parent], last, settled)
            layers[name] = settled  # so that nothing keeps the weights that it was made of
        tick(sum(stored.size(names[each]) for each in own[name] if each in names))


def kept_in_float32(model: Any) -> Callable[[str], bool]:
    """Whether a parameter or layer of this name is one that the class of `model` keeps in float32."""
    floats = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    return lambda name: not floats.isdisjoint(name.split("."))


def _own(layer: nn.Module) -> Iterator[str]:
    """The names of a layer's own parameters and buffers."""
    for values in (layer._parameters, layer._buffers):
        yield from (name for name, value in values.items() if value is not None)


def _put(layer: nn.Module, full_name: str, stored: Stored, source: str | None, dtype: torch.dtype,
         of_buffers: torch.dtype, keep: Keep) -> None:
    """Puts one tensor in its place: from the files if these have it, else as the constructor made it."""
    name = full_name.rpartition(".")[2]
    parameter = layer._parameters.get(name)
    if parameter is not None:
        assert source is not None, f"{name} has no weights"
        value = keep(full_name, stored.cast(source, _as(parameter, dtype)))
        layer._parameters[name] = nn.Parameter(value, requires_grad=parameter.requires_grad)
        return
    buffer = layer._buffers[name]
    assert buffer is not None
    wanted = _as(buffer, of_buffers)
    layer._buffers[name] = buffer.to(wanted) if source is None else stored.cast(source, wanted)


def _as(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    """What `value` becomes in a model of this dtype: counts and flags stay."""
    return dtype if value.is_floating_point() or value.is_complex() else value.dtype
