"""Keeps one of a pipeline's text encoders in memory at a time.

A pipeline's `encode_prompt` calls its encoders one after the other and puts their results together. Here it calls
stand-ins. One whose encoder is loaded returns what that computes, and what the pipeline reads of it is kept, by the
tokens of each caption. One whose encoder is not loaded returns what was kept, or raises `NotLoaded`; then that encoder
is loaded in place of the other, and `encode_prompt` called again. So rows are what the pipeline makes of them, whatever
was loaded when; `prepare` sees to it that each encoder is loaded once for many captions, not once for each.

In bfloat16, 1.5 KB are kept of a caption of FLUX.1 (CLIP's pooled vector), 118 KB of SDXL, 316 KB of SD 3.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from prep.digest import digest_parts
from prep.models.device.memory import free_memory

T = TypeVar("T")
KEPT_BYTES = 512 << 20  # of results that wait for the last encoder
Output = Any  # of a transformers model
Read = tuple[str, Callable[[Output], Any]]  # what a pipeline reads of an output: its name, and how


class NotLoaded(Exception):
    """A pipeline needs a text encoder that is not in memory."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.name = name


class Encoders:
    """The text encoders of a pipeline by component name. A single one stays loaded; of several, one at a time is.

    `parts` are what the pipeline gets for its components.
    """

    def __init__(self, names: Sequence[str], load: Callable[[str], nn.Module], configs: Mapping[str, Any],
                 dtype: torch.dtype, device: torch.device) -> None:
        """`load` returns an encoder in `dtype`, ready to run with inputs on `device`. Raises what `load` raises."""
        self.names, self.device, self.dtype = tuple(names), device, dtype
        self._load, self._name, self._module = load, "", nn.Module()
        self._kept: dict[str, tuple[KeptOutput, int]] = {}  # by input: the output of a batch, and the place in it
        self._computed: list[tuple[KeptOutput, list[str]]] = []  # since the last call of `_try`
        self.parts: Mapping[str, nn.Module]
        if len(names) == 1:
            self._bring(names[0])
            self.parts = {names[0]: self._module}
        else:
            self.parts = {name: StandIn(name, configs[name], self) for name in names}

    def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, which may call all encoders."""
        while True:
            try:
                return self._try(work)
            except NotLoaded as missing:
                self._bring(missing.name)

    def prepare(self, works: Iterable[Callable[[], Any]], *, least: int) -> int:
        """Keeps what all encoders but the last return for the first of `works`, as many as fit; returns how many.

        The first `least` are done even if they do not fit.
        Running these works then loads only the last encoder. Encoders are expected to be called in the order of their
        names; in any other, rows are the same and take longer.
        """
        *first, _ = self.names
        self._kept.clear()
        count, stored_bytes = 0, 0
        for number, name in enumerate(first):
            self._bring(name)
            fitting: list[Callable[[], Any]] = []
            for work in works:
                if len(fitting) >= least and stored_bytes >= KEPT_BYTES * (number + 1) // len(first):
                    break
                with suppress(NotLoaded):
                    self._try(work)
                stored_bytes += sum(output.bytes for output, _ in self._computed)
                fitting.append(work)
            works, count = fitting, len(fitting)
        return count

    @contextmanager
    def in_float32(self) -> Iterator[None]:
        """Within it encoders compute in float32, with the same weights."""
        usual, self.dtype = self.dtype, torch.float32
        if len(self.names) > 1:
            self._release()
        dtypes = [tensor.dtype for tensor in _tensors(self._module)]
        try:
            computing_in(self._module, torch.float32)
            yield
        finally:
            self.dtype = usual
            if len(self.names) > 1:
                self._release()
                dtypes = []
            computing_in(self._module, usual, dtypes)  # some models keep a few weights in another dtype than `usual`

    def ask(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The output of an encoder. Raises `NotLoaded`."""
        keys = _keys(name, self.dtype, args, kwargs)
        if not all(key in self._kept for key in keys):
            if self._name != name:
                raise NotLoaded(name)
            made = KeptOutput(self._module(*args, **kwargs))
            self._computed.append((made, keys))
            self._kept |= {key: (made, place) for place, key in enumerate(keys)}
        return Answer([self._kept[key] for key in keys], self.device)

    def _try(self, work: Callable[[], T]) -> T:
        """Returns the result of `work`; or raises `NotLoaded` and keeps what its encoders returned."""
        self._computed.clear()
        try:
            made = work()
        except NotLoaded:
            for output, _ in self._computed:
                output.shrink()
            raise
        except BaseException:
            self._forget()
            raise
        self._forget()
        return made

    def _forget(self) -> None:
        for _, keys in self._computed:
            for key in keys:
                self._kept.pop(key, None)
        self._computed.clear()

    def _bring(self, name: str) -> None:
        if self._name != name:
            self._release()
            with torch.inference_mode(False):  # so that its weights are plain tensors, which may be converted later
                module = self._load(name)
                self._module = computing_in(module, self.dtype) if self.dtype == torch.float32 else module
            self._name = name

    def _release(self) -> None:
        """Frees the memory of the loaded encoder, whose modules refer to one another."""
        self._name, self._module = "", nn.Module()
        gc.collect()
        free_memory(self.device)


class StandIn(nn.Module):
    """Stands for a text encoder in a pipeline: its config, dtype and device, and what `Encoders` answers for it."""

    def __init__(self, name: str, config: Any, encoders: Encoders) -> None:
        super().__init__()
        self.config, self._name, self._encoders = config, name, encoders

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the encoder computes."""
        return self._encoders.dtype

    @property
    def device(self) -> torch.device:
        """The device on which the encoder computes."""
        return self._encoders.device

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._encoders.ask(self._name, args, kwargs)


class KeptOutput:
    """The output of an encoder for a batch; after `shrink`, only the parts that were read remain."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._parts: dict[str, Any] = {}
        self.bytes = 0

    def part(self, read: Read) -> Any:
        """A part of the output, for the whole batch."""
        name, get = read
        if name not in self._parts:
            assert self._output is not None, f"{name} of an encoder's output was not read when it was computed"
            self._parts[name] = get(self._output)
        return self._parts[name]

    def shrink(self) -> None:
        """Drops what was not read, and moves the rest to host memory."""
        self._output = None
        self._parts = tree_map(_on_host, self._parts)
        self.bytes = sum(leaf.nbytes for leaf in tree_leaves(self._parts) if isinstance(leaf, Tensor))


class Answer:
    """An encoder's output for a batch, put together of what was kept for each of its captions."""

    def __init__(self, rows: Sequence[tuple[KeptOutput, int]], device: torch.device) -> None:
        self._rows, self._device = rows, device

    def __getitem__(self, place: Any) -> Any:
        return self.read((f"[{place}]", lambda output: output[place]))

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Layers(self) if name == "hidden_states" else self.read((name, lambda output: getattr(output, name)))

    def read(self, read: Read) -> Any:
        """A part of the output on the device: a tensor, or a tuple of tensors."""
        whole = {id(output) for output, _ in self._rows}
        parts = [(output.part(read), place) for output, place in self._rows]
        if len(whole) == 1 and [place for _, place in self._rows] == list(range(_rows_of(parts[0][0]))):
            return tree_map(lambda leaf: leaf.to(self._device), parts[0][0])
        rows = [tree_map(lambda leaf, place=place: leaf[place:place + 1].to(self._device), part)
                for part, place in parts]
        return tree_map(lambda *leaves: torch.cat(leaves), *rows)


class Layers:
    """The hidden states of an answer."""

    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def __getitem__(self, place: Any) -> Any:
        return self._answer.read((f"hidden_states[{place}]", lambda output: output.hidden_states[place]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])


def _rows_of(part: Any) -> int:
    return len(tree_leaves(part)[0])


def _on_host(leaf: Any) -> Any:
    """A tensor of its own in host memory: a view would keep all of the output."""
    return leaf.to("cpu", copy=True) if isinstance(leaf, Tensor) else leaf


def computing_in(module: nn.Module, dtype: torch.dtype, dtypes: Sequence[torch.dtype] | None = None) -> nn.Module:
    """`module` itself, with its numbers in `dtype`, or each tensor in its own of `dtypes`.

    Quantized weights stay as they are; only what is computed with them is in `dtype`.
    """
    tensors = list(_tensors(module))
    for tensor, own in zip(tensors, [dtype] * len(tensors) if dtypes is None else dtypes, strict=True):
        tensor.data = tensor.data.to(own)
    for part in module.modules():
        if hasattr(part, "compute_dtype"):  # a layer of bitsandbytes with weights of 4 bits
            vars(part)["compute_dtype"] = dtype
    return module


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    return (tensor for tensor in chain(module.parameters(), module.buffers()) if tensor.is_floating_point())


def _keys(name: str, dtype: torch.dtype, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[str]:
    """A digest of an encoder's input for each row of its batch."""
    leaves = tree_leaves([list(args), dict(sorted(kwargs.items()))])
    tensors = [leaf.cpu().contiguous() for leaf in leaves if isinstance(leaf, Tensor)]
    plain = [leaf if not isinstance(leaf, Tensor) else (leaf.dtype, leaf.shape[1:]) for leaf in leaves]
    shared = repr((name, dtype, sorted(kwargs), plain)).encode()
    return [digest_parts([shared, *(tensor[row].numpy().tobytes() for tensor in tensors)])
            for row in range(len(tensors[0]))]
