"""What ranks exchange, through torch.distributed (imported only here): gloo on the CPU, NCCL between GPUs."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta

import numpy as np
import torch
from torch import Tensor, nn
from torch import distributed as dist

Kind = tuple[torch.dtype, torch.device]  # of a tensor

BUCKET = 1 << 25  # bytes of gradients that are added at a time: 32 MiB, large enough for the network's full speed


def connect(local: int, patience: float) -> None:
    """Joins the other ranks, which torchrun's variables name, and waits for them at most so many seconds at a time.

    Raises `RuntimeError` and `ValueError`.
    """
    timeout = timedelta(seconds=patience)
    if torch.cuda.is_available():
        torch.cuda.set_device(local % torch.cuda.device_count())
        dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timeout)
    else:
        dist.init_process_group("gloo", timeout=timeout)


def wait_for(rank: int) -> None:
    """Returns when the connection to another rank ends, which sends nothing here."""
    with suppress(RuntimeError):
        dist.recv(torch.zeros(1), src=rank)


def disconnect() -> None:
    """Leaves the other ranks."""
    gc.collect()  # a divided model holds the connection, too, in cycles; at the end of the process it is late for that
    dist.destroy_process_group()


def exchange(numbers: Sequence[float]) -> list[list[float]]:
    """The numbers of all ranks, in their order. Each gives equally many.

    By way of the first rank if there are more than two: gloo's `all_gather` goes round all ranks, one after another. Of
    8 processes on two busy cores it takes 9 ms instead of 2.
    """
    own, world = torch.tensor(numbers, dtype=torch.float64), dist.get_world_size()
    all_numbers = torch.empty(world, len(own), dtype=torch.float64)
    if world == 2:
        dist.all_gather(list(all_numbers), own)
    else:
        dist.gather(own, list(all_numbers) if dist.get_rank() == 0 else None)
        dist.broadcast(all_numbers, 0)
    return [row.tolist() for row in all_numbers]


def gather(data: bytes, sizes: Sequence[int]) -> list[bytes]:
    """The data of all ranks, of which each has its size in `sizes`."""
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    if data:  # torch takes no empty buffer
        own[:len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    parts = [torch.empty_like(own) for _ in sizes]
    dist.all_gather(parts, own)
    return [part[:size].numpy().tobytes() for part, size in zip(parts, sizes, strict=True)]


def join_rows(own: Tensor, whole: Tensor) -> Tensor | None:
    """The whole tensor in host memory, on the first rank, from the rows of each: equal parts, but for the last ones."""
    world = dist.get_world_size()
    each = -(-len(whole) // world) * (whole.numel() // max(len(whole), 1)) * whole.element_size()
    mine = torch.zeros(each, dtype=torch.uint8)
    data = own.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)
    mine[:len(data)] = data
    parts = [torch.empty_like(mine) for _ in range(world)] if dist.get_rank() == 0 else None
    dist.gather(mine, parts)
    if parts is None:
        return None
    size = whole.numel() * whole.element_size()
    return torch.cat(parts)[:size].view(whole.dtype).view(whole.shape)


def is_lost(error: Exception) -> bool:
    """Whether the error is that of a connection to another rank."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def used_here(parameters: Sequence[nn.Parameter]) -> bytes:
    """Which parameters have a gradient on this rank: a byte for each."""
    return bytes(value.grad is not None for value in parameters)


def used(parameters: Sequence[nn.Parameter], marks: Sequence[bytes]) -> list[nn.Parameter]:
    """The parameters that have a gradient on any rank, and now on this one, too. `marks`: `used_here` of each rank.

    An optimizer leaves the others alone, as it does in one process.
    """
    anywhere = np.bitwise_or.reduce([np.frombuffer(each, np.uint8) for each in marks])
    used_anywhere = [value for value, count in zip(parameters, anywhere.tolist(), strict=True) if count]
    for value in used_anywhere:
        if value.grad is None:
            value.grad = torch.zeros_like(value)
    return used_anywhere


def buckets(parameters: Sequence[nn.Parameter], most: int = BUCKET) -> Iterator[list[nn.Parameter]]:
    """The parameters in groups of one dtype and device, each of at most `most` bytes or one parameter."""
    group: list[nn.Parameter] = []
    size = 0
    for value in parameters:
        other = bool(group) and (value.dtype, value.device) != (group[0].dtype, group[0].device)
        if group and (other or size + value.nbytes > most):
            yield group
            group, size = [], 0
        group.append(value)
        size += value.nbytes
    if group:
        yield group


def room_for(groups: Sequence[Sequence[nn.Parameter]]) -> dict[Kind, Tensor]:
    """A place for the gradients of the largest bucket of each dtype and device."""
    most: dict[Kind, int] = {}
    for group in groups:
        kind = group[0].dtype, group[0].device
        most[kind] = max(most.get(kind, 0), sum(value.numel() for value in group))
    return {(dtype, device): torch.empty(size, dtype=dtype, device=device) for (dtype, device), size in most.items()}


def add(groups: Sequence[Sequence[nn.Parameter]], room: Mapping[Kind, Tensor]) -> None:
    """Replaces each gradient by its sum over the ranks: a message for each bucket, made in `room`."""
    for group in groups:
        grads: list[Tensor] = [value.grad for value in group if value.grad is not None]
        sizes = [grad.numel() for grad in grads]
        flat = room[group[0].dtype, group[0].device][:sum(sizes)]
        torch.cat([grad.reshape(-1) for grad in grads], out=flat)
        dist.all_reduce(flat)
        parts = torch.split(flat, sizes)
        torch._foreach_copy_(grads, [part.view_as(grad) for part, grad in zip(parts, grads, strict=True)])
