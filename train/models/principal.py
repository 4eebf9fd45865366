"""The principal part of a weight, from which PiSSA trains a low-rank adapter (Meng et al. 2024, equations 2 and 3)."""

from __future__ import annotations

from math import sqrt

import torch
from torch import Tensor

ITERATIONS = 16  # of the fast decomposition (Halko et al. 2011), as PiSSA's authors take them

MORE = 16  # directions than are kept, without which close ones would be mixed


def principal_part(weight: Tensor, rank: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """`up [out, rank]` and `down [rank, in]` in float32, on the CPU: scale x up @ down is the best approximation of
    `weight` of this rank, up to rounding. The same seed gives the same bits on the same machine."""
    matrix = weight.detach().cpu().float().flatten(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, values, right = torch.svd_lowrank(matrix, q=min(rank + MORE, *matrix.shape), niter=ITERATIONS)
    roots = values[:rank].sqrt() / sqrt(scale)
    return (left[:, :rank] * roots).contiguous(), (right[:, :rank] * roots).T.contiguous()
