"""A second device made of host memory: tensors on it may not meet tensors that are not, as with a GPU.

Within `playing()` the device `meta`, which PyTorch has on every machine and which normally holds no values, holds some
and computes: factories, `.to`, autograd and optimizers take it for a device like any other, and an operator that sees
tensors of both raises what CUDA raises. As this goes through PyTorch's own device machinery, a tensor made with
`device=x.device` is where x is, and one made without is not; tags on tensors could not tell them apart.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

THERE = torch.device("meta")
_HOST = torch.device("cpu")
_aten = torch.ops.aten


class There(torch.Tensor):
    """A tensor of the second device: a shell that says so, around one in host memory."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, requires_grad: bool = False) -> There:
        shell = torch.Tensor._make_wrapper_subclass(
            cls, inner.size(), strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            layout=inner.layout, device=THERE, requires_grad=requires_grad)
        shell.inner = inner
        return shell

    def __repr__(self) -> str:
        return f"There({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        return play(operator, args, kwargs or {})


class Mode(TorchDispatchMode):
    """Within it every operator is played on the device of its tensors."""

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if torch.is_inference_mode_enabled():  # in which composite operators, as `.to`, come here whole
            with torch.inference_mode(False), torch.no_grad(), self:
                return operator(*args, **(kwargs or {}))
        return play(operator, args, kwargs or {})


@contextmanager
def playing() -> Iterator[torch.device]:
    """Within it the second device, which it yields, is there."""
    with Mode():
        yield THERE


def play(operator: Any, args: Any, kwargs: Any) -> Any:
    """Runs `operator` in host memory. Raises `RuntimeError` when it sees tensors of both devices.

    As on CUDA, copies cross over, and a number in a tensor without dimensions is welcome anywhere.
    """
    if operator is _aten._to_copy.default:
        return _copy(args[0], kwargs)
    if operator is _aten.copy_.default:
        _inner(args[0]).copy_(_inner(args[1]))
        return args[0]
    tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    there = [tensor for tensor in tensors if isinstance(tensor, There)]
    if there and any(not isinstance(tensor, There) and tensor.dim() > 0 for tensor in tensors):
        raise RuntimeError(f"Expected all tensors to be on the same device, but {operator} got both devices")
    wanted = kwargs.get("device")
    goes_there = bool(there) if wanted is None else torch.device(wanted) == THERE
    if wanted is not None:
        kwargs = {**kwargs, "device": _HOST}
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    out = operator(*inner_args, **inner_kwargs)
    if not goes_there:
        return out
    shells = {id(tensor.inner): tensor for tensor in there}  # what was changed in place stays the same tensor
    return tree_map(lambda value: shells[id(value)] if id(value) in shells else _shell(value), out)


def _copy(source: torch.Tensor, kwargs: dict[str, Any]) -> torch.Tensor:
    wanted = kwargs.get("device")
    target = source.device if wanted is None else torch.device(wanted)
    out = _aten._to_copy.default(_inner(source), **{**kwargs, "device": _HOST, "non_blocking": False})
    return There(out) if target == THERE else out


def _inner(value: Any) -> Any:
    return value.inner if isinstance(value, There) else value


def _shell(value: Any) -> Any:
    return There(value) if isinstance(value, torch.Tensor) and not isinstance(value, There) else value
