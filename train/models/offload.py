"""Blocks of a denoiser whose frozen weights stay in host memory, so that larger models fit on a device.

Each block's weights are copied to the device ahead of its use, on CUDA by a stream of their own, into one of two
buffers of the size of the largest such block. They go one way: a LoRA's base does not change, so nothing is copied
back. Adapters stay on the device. Between its uses a block's weights are empty tensors, with which nothing computes.

Passes that need gradients compute such a block again in the backward pass (`torch.utils.checkpoint`), so that autograd
holds none of its weights between. In which order blocks come is learned from pass to pass: after two blocks comes the
one that did so before. Autograd goes back in the exact reverse of the order of operations, so when a block is asked
for, all that needs the one before has been given to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from prep.errors import ConfigError
from train.models import lora
from train.models.recomputed import recomputed

BUFFERS = 2
PIECE = 1 << 26  # bytes that are pinned together: torch rounds what it pins up to a power of two
ALIGNED = 256  # bytes: as the allocator of a GPU aligns tensors


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The blocks of a denoiser: of the classes that diffusers names as repeated, or if it names none, of those in the
    model's lists that it does not split over devices."""
    names = set(getattr(model, "_repeated_blocks", None) or ())
    places = [model] if names else [each for each in model.children() if isinstance(each, nn.ModuleList)]
    names = names or set(getattr(model, "_no_split_modules", None) or ())
    found = [module for place in places for module in place.modules() if type(module).__name__ in names]
    inner = {part for module in found for part in module.modules() if part is not module}
    return [module for module in found if module not in inner]


def block_bytes(model: nn.Module) -> tuple[int, ...]:
    """The bytes that each block takes in a buffer."""
    return tuple(_end(_frozen(block)) for block in repeated_blocks(model))


def spread(blocks: int, count: int) -> list[int]:
    """Which `count` of so many blocks are offloaded: evenly spread, so that others compute during the copies."""
    count = min(count, blocks)
    return [number * blocks // count for number in range(count)]


def saved(blocks: tuple[int, ...], count: int) -> int:
    """The bytes of a device that are spared if `count` of blocks of such sizes are offloaded; with one or two none."""
    chosen = [blocks[number] for number in spread(len(blocks), count)]
    return sum(chosen) - min(BUFFERS, len(chosen)) * max(chosen, default=0)


def fewest(blocks: tuple[int, ...], least: float) -> int:
    """How many blocks to offload to spare at least so many bytes; all, if even they are not enough."""
    return next((count for count in range(len(blocks) + 1) if saved(blocks, count) >= least), len(blocks))


@dataclass(frozen=True, slots=True)
class _Weight:
    """A frozen tensor of a block."""

    values: dict[str, Any]  # the parameters or buffers of its layer
    name: str
    value: Tensor
    begin: int  # in the bytes of its block

    @property
    def end(self) -> int:
        return self.begin + self.value.nbytes


def _frozen(block: nn.Module) -> list[_Weight]:
    """What a block's layers have but for adapters."""
    found: list[_Weight] = []
    for prefix, layer in block.named_modules():
        for values in (layer._parameters, layer._buffers):
            for name, value in values.items():
                if value is not None and not value.requires_grad and not lora.is_stored(f"{prefix}.{name}"):
                    begin = -(-_end(found) // ALIGNED) * ALIGNED
                    found.append(_Weight(values, name, value, begin))
    return found


def _end(weights: list[_Weight]) -> int:
    return weights[-1].end if weights else 0


class _Block:
    """The frozen weights of a block in host memory, and what stands for them in its layers."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        weights = _frozen(module)
        self.module, self.size = module, _end(weights)
        self.buffer: _Buffer | None = None  # that has its weights
        self._places = [(each.values, each.name) for each in weights]
        self._kept = [_as(each.value, torch.empty(0, dtype=each.value.dtype, device=device)) for each in weights]
        self._views: dict[_Buffer, list[Tensor]] = {}
        whole = torch.zeros(self.size, dtype=torch.uint8)
        for each in weights:
            whole[each.begin : each.end] = each.value.detach().contiguous().flatten().view(torch.uint8)
        self.host = [_pinned(part) if device.type == "cuda" else part for part in _pieces(whole)]
        self._shapes = [(each.value.dtype, each.value.shape, each.begin, each.end) for each in weights]
        self._put(self._kept)

    def prepare(self, buffer: _Buffer) -> None:
        """Makes the tensors that are its weights while they are in `buffer`; not later, in torch's inference mode."""
        self._views[buffer] = [_as(kept, buffer.bytes[begin:end].view(dtype).view(shape)) for kept, (
            dtype, shape, begin, end) in zip(self._kept, self._shapes, strict=True)]

    def enter(self, buffer: _Buffer) -> None:
        """Gives its layers the tensors in `buffer`."""
        self.buffer = buffer
        self._put(self._views[buffer])

    def leave(self) -> None:
        """Gives its layers empty tensors."""
        self.buffer = None
        self._put(self._kept)

    def _put(self, tensors: list[Tensor]) -> None:
        for (values, name), tensor in zip(self._places, tensors, strict=True):
            values[name] = tensor


def _as(like: Tensor, value: Tensor) -> Tensor:
    return nn.Parameter(value, requires_grad=False) if isinstance(like, nn.Parameter) else value


def _pieces(whole: Tensor) -> Iterator[Tensor]:
    yield from whole.split(PIECE)  # type: ignore[no-untyped-call]


def _pinned(part: Tensor) -> Tensor:
    return torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part)


class _Buffer:
    """Memory of the device for one block at a time."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, device=device)
        self.block: _Block | None = None
        self.ready: torch.cuda.Event | None = None  # after the copy


class Offloaded:
    """Blocks of a model in host memory, from which their weights come to the device for their turn."""

    def __init__(self, model: nn.Module, count: int, device: torch.device,
                 way: Callable[..., Any] = recomputed) -> None:
        """Takes the frozen weights of `count` blocks out of `model`, which is in host memory. `way`: how a block is
        called that is computed again in the backward pass. Raises `ConfigError`."""
        blocks = repeated_blocks(model)
        if not blocks:
            raise ConfigError(f"offload is {count}, but {type(model).__name__} has no repeated blocks to keep in host "
                              "memory", hint="--set offload=0")
        self._device, self._way = device, way
        stream: Any = torch.cuda.Stream  # which torch does not type
        self._stream = stream(device) if device.type == "cuda" else None
        chosen = [_Block(blocks[number], device) for number in spread(len(blocks), count)]
        size = max(block.size for block in chosen)
        self._buffers = [_Buffer(size, device) for _ in range(min(BUFFERS, len(chosen)))]
        self._last: _Block | None = None
        self._before: _Block | None = None  # the last one
        self._after: dict[tuple[_Block | None, _Block], _Block] = {}  # the one that came after two
        self.modules = {block.module for block in chosen}
        for block in chosen:
            for buffer in self._buffers:
                block.prepare(buffer)
            block.module.forward = partial(self._run, block, block.module.forward)

    def recompute(self, module: nn.Module, *args: Any) -> Any:
        """Calls a module with gradient checkpointing, as diffusers does; offloaded blocks do so themselves."""
        if any(part in self.modules for part in module.modules()):
            return module(*args)
        return self._way(module, *args)

    def _run(self, block: _Block, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward pass."""
        def brought(*given: Any) -> Any:
            self._bring(block)
            return forward(*given[: len(args)], **dict(zip(kwargs, given[len(args) :], strict=True)))

        given = *args, *kwargs.values()
        return self._way(brought, *given) if torch.is_grad_enabled() else brought(*given)

    def _bring(self, block: _Block) -> None:
        """Has the weights of a block on the device for what is computed from now on, and begins to copy the next ones.
        """
        if block.buffer is None:
            self._copy(block)
        assert block.buffer is not None
        if block.buffer.ready is not None:
            torch.cuda.current_stream(self._device).wait_event(block.buffer.ready)
        if block is self._last:
            return
        if self._last is not None:
            self._after[self._before, self._last] = block
        self._before, self._last = self._last, block
        following = self._after.get((self._before, block))
        if following is not None and following.buffer is None:
            self._copy(following)

    def _copy(self, block: _Block) -> None:
        """Copies the weights of a block into the buffer that the last one is not in, once all is computed that the
        device was given so far."""
        buffer = next((each for each in self._buffers if each.block is not self._last), self._buffers[0])
        if buffer.block is not None:
            buffer.block.leave()
        if self._stream is None:
            self._fill(buffer, block)
        else:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            with torch.cuda.stream(self._stream):
                self._fill(buffer, block)
            buffer.ready = self._stream.record_event()
        buffer.block = block
        block.enter(buffer)

    def _fill(self, buffer: _Buffer, block: _Block) -> None:
        for piece, into in zip(block.host, _pieces(buffer.bytes[: block.size]), strict=True):
            into.copy_(piece, non_blocking=True)
