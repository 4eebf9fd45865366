"""Checks what a model's config asks for before memory is allocated for it: the model is built without any.

On torch's meta device tensors have shapes and no data. While it is built, its parameters, buffers and modules
are counted and compared with the weights that are there: a config of a billion layers ends after some thousands of
them. That counts whatever the config's numbers are called. Time is not measured: what is counted bounds it.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as registration
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from prep.errors import ModelError
from prep.models.files import ComponentFiles, StoredTensor
from prep.models.weights import TWO_MODELS

# A model has as many numbers as its weights; tied ones count twice. Some are small in tests.
PARAMETERS, SOME_PARAMETERS = 2, 1 << 24
PACKED = {"U8": 2, "I8": 2}  # numbers in a byte: those of 4 bits
TABLES = 1 << 27  # numbers of a tensor that is made anew from the config, such as positions: 512 MiB
MODULES, SOME_MODULES = 8, 1_000  # that are registered, and parameters, for each tensor; of T5 three


class TooMuch(Exception):
    """A model asks for more than its weights have."""


def require_room(kind: Any, files: ComponentFiles, build: Callable[[], Any]) -> None:
    """Raises `ModelError` if the model of class `kind` that `build` makes is far larger than the weights in `files`.

    Configs that cannot be built are left to the library, which says why.
    """
    tensors = files.tensors
    key = (kind, files.small["config.json"], sum(prod(each.shape) for each in tensors.values()), len(tensors))
    if key in _FITTING:
        return
    try:
        with limited(tensors), torch.device("meta"):
            build()
    except (TooMuch, MemoryError):
        raise ModelError(f"{files.folder / 'config.json'} describes a model far larger than its weights, which have "
                         f"{len(tensors)} tensors", hint=TWO_MODELS) from None
    except Exception:
        return  # as said
    _FITTING.add(key)


_FITTING: set[tuple[Any, bytes, int, int]] = set()  # what has been built: encoders are loaded again for many captions


def of_diffusers(kind: Any, files: ComponentFiles) -> Any:
    """A model of class `kind` with the config in `files`, as it is for weights times their scales."""
    with known_warnings():
        return kind.from_config({key: value for key, value in files.config.items() if key != "quantization_config"})


def build(kind: Any, folder: Path) -> Any:
    """A model of class `kind`, of diffusers or transformers, with the config in `folder`."""
    with known_warnings():
        if hasattr(kind, "load_config"):
            return kind.from_config(kind.load_config(folder, local_files_only=True))
        return kind(kind.config_class.from_pretrained(folder, local_files_only=True))


@contextmanager
def known_warnings() -> Iterator[None]:
    """Within it, what diffusers warns of its own code is not shown."""
    with warnings.catch_warnings():
        # Chroma's transformer in diffusers 0.42 imports a class from where diffusers no longer wants it imported.
        warnings.filterwarnings("ignore", "`FluxPosEmbed` is deprecated", FutureWarning)
        # Its ChatGLM compiles a function as torch no longer wants it compiled.
        warnings.filterwarnings("ignore", "`torch.jit.script` is deprecated", DeprecationWarning)
        yield


@contextmanager
def limited(tensors: Mapping[str, StoredTensor]) -> Iterator[None]:
    """Within it, this thread builds no model that is far larger than `tensors`: that raises `TooMuch`."""
    numbers = sum(prod(tensor.shape) * PACKED.get(tensor.dtype, 1) for tensor in tensors.values())
    left = [PARAMETERS * numbers + SOME_PARAMETERS, MODULES * len(tensors) + SOME_MODULES]
    mine = threading.get_ident()

    def spend(size: int) -> None:
        if threading.get_ident() == mine:
            left[0] -= size
            left[1] -= 1
            if min(left) < 0:
                raise TooMuch

    def tensor(module: Any, name: str, value: Any) -> None:
        spend(0 if value is None else value.numel())

    hooks = (registration.register_module_parameter_registration_hook(tensor),
             registration.register_module_buffer_registration_hook(tensor),
             registration.register_module_module_registration_hook(lambda module, name, value: spend(0)))
    try:
        with _Sizes(left[0] + TABLES):
            yield
    finally:
        for hook in hooks:
            hook.remove()


class _Sizes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Raises `TooMuch` for a tensor with more than `most` numbers; where it would have data, before it is made."""

    def __init__(self, most: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._most = most

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if given.get("device") is not None and torch.device(given["device"]).type != "meta":
            self._check(func(*args, **{**given, "device": torch.device("meta")}))
        made = func(*args, **given)
        self._check(made)
        return made

    def _check(self, made: Any) -> None:
        if any(isinstance(each, torch.Tensor) and each.numel() > self._most for each in tree_leaves(made)):
            raise TooMuch
