"""Runs models without their weights: tensors have shapes and dtypes, and no data.

Nearly all of it is torch's fake tensors. Small tensors that depend on no weights keep their data, since code asks for
it: lengths of texts, positions, noise levels. So what is computed of them is real, and what is computed with a hollow
tensor is hollow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

from prep.models.device.counting import Counted, tensors_in

CPU, META = torch.device("cpu"), torch.device("meta")
SMALL = 1 << 16  # numbers of a tensor that keeps its data
_aten: Any = torch.ops.aten
_device: Any = torch.ops.prim.device.default  # by far the most frequent


class Hollow(Counted):
    """Within it, tensors may be hollow, and are counted. Hollow tensors say that they lie on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._fake: Any = FakeTensorMode(allow_non_fake_inputs=True)  # type: ignore[no-untyped-call]

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A hollow tensor."""
        return self._hollow(torch.empty(shape, dtype=dtype, device=META))

    def enter(self, model: nn.Module) -> None:
        """Makes a model of torch's meta device hollow, in place."""
        for module in model.modules():
            for name, weight in module._parameters.items():
                if weight is not None:
                    module._parameters[name] = nn.Parameter(self._hollow(weight.detach()), weight.requires_grad)
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = self._hollow(buffer)
            for name, table in list(vars(module).items()):  # of positions, for example
                if isinstance(table, Tensor | list):
                    setattr(module, name, tree_map_only(Tensor, self._hollow, table))

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        """What the operation returns, hollow if it is given anything hollow, or makes something large."""
        if func is _device:
            return CPU
        given = list(tensors_in((args, kwargs)))
        if not any(map(_is_hollow, given)):
            return self._real(func, args, kwargs, factory=not given)
        if func in _ASSUMED:
            return _ASSUMED[func](self, *args, **kwargs)
        if _only_writes(func):
            return args[0]
        if func in (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default):
            args = (args[0], [_numbered(index) for index in args[1]], *args[2:])
        if all(each.device == META for each in given if _is_hollow(each)):  # while a model is made
            kwargs = {**kwargs, "device": META} if "device" in kwargs else kwargs
            return func(*_onto(META, args), **_onto(META, kwargs))
        if not all(type(each) is FakeTensor for each in given):
            args, kwargs = tree_map_only(Tensor, self._hollow, (args, kwargs))
        return self._fake.dispatch(func, (), args, kwargs)

    def _real(self, func: Any, args: Any, kwargs: Mapping[str, Any], *, factory: bool) -> Any:
        if factory and torch.device(kwargs.get("device") or CPU) != META and "device" in kwargs:
            sizes = [leaf for leaf in tree_leaves(args) if type(leaf) is int]
            if torch.Size(sizes).numel() > SMALL:
                return self._hollow(func(*args, **{**kwargs, "device": META}))
        return func(*args, **kwargs)

    def _hollow(self, value: Tensor) -> Tensor:
        if isinstance(value, FakeTensor):
            return value
        like = value if value.device == META else torch.empty_strided(value.shape, value.stride(), dtype=value.dtype,
                                                                      device=META)
        made: Tensor = FakeTensor(self._fake, like, CPU)
        return made


def _is_hollow(value: Tensor) -> bool:
    return isinstance(value, FakeTensor) or value.device == META


@cache
def _only_writes(func: Any) -> bool:
    """Whether an operation changes nothing but the data of its first argument, which it returns."""
    name = func._schema.name.partition("::")[2]
    return (name.endswith("_") and torch.Tag.inplace_view not in func.tags and name not in ("resize_", "set_")
            and len(func._schema.returns) == 1 and func._schema.arguments[0].alias_info is not None
            and str(func._schema.arguments[0].type) == "Tensor")


def _onto(device: torch.device, given: Any) -> Any:
    return tree_map_only(Tensor, lambda value: value.to(device), given)


def _numbered(index: Tensor | None) -> Tensor | None:
    """An index of booleans with data as one of numbers, whose count is known without them."""
    if index is None or _is_hollow(index) or index.dtype not in (torch.bool, torch.uint8):
        return index
    assert index.dim() == 1, "a mask of rows"
    return index.nonzero().flatten()


def _chosen(mode: Hollow, value: Tensor, count: int, dim: int = -1, *args: Any) -> tuple[Tensor, Tensor]:
    """The largest of unknown numbers: each place in turn, so that experts get equal parts."""
    shape = list(value.shape)
    shape[dim] = count
    places = torch.arange(torch.Size(shape).numel()).remainder_(value.shape[dim]).view(shape)
    return mode.empty(tuple(shape), value.dtype), places


_ASSUMED: Mapping[Any, Callable[..., Any]] = {
    _aten._local_scalar_dense.default: lambda mode, value: 1,  # a number that nobody knows
    _aten.topk.default: _chosen,
}
