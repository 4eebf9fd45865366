"""The principal parts of matrices: what of a weight PiSSA trains, and what of a change a LoRA of a rank can hold.

The best approximation of rank r keeps the largest r singular values (Eckart and Young 1936). PiSSA begins with that of
a weight (Meng et al. 2024, equations 2 and 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import Tensor

ITERATIONS = 16  # of the fast decomposition (Halko et al. 2011), as PiSSA's authors take them
# Of a change that a LoRA is made of: for singular values that fall as slowly as n^-1/4 the error is within 0.1 % of the
# smallest, in a third of the time (measured with 1024 x 2048 and rank 32).
FEWER = 4
MORE = 16  # directions than are kept, without which close ones would be mixed


@dataclass(frozen=True, slots=True)
class Directions:
    """The largest singular values of a matrix, in falling order, with their vectors."""

    left: Tensor  # [out, count]
    values: Tensor  # [count]
    right: Tensor  # [in, count]
    norm: float  # Frobenius norm of the whole matrix

    def rank(self, most: int | None, keep: float | None) -> int:
        """How many to keep, at least one: all of them, at most `most`, and as few as keep that part of the norm."""
        count = min(len(self.values), most or len(self.values))
        if keep is None or not self.norm:
            return count if keep is None else 1
        kept = self.values.square().cumsum(0).sqrt()
        return min(count, 1 + int((kept < keep * self.norm).sum()))

    def kept(self, rank: int) -> float:
        """The part of the norm that so many keep, 0 to 1: the error of the best approximation is sqrt(1 - kept^2)."""
        return min(1.0, float(self.values[:rank].norm()) / self.norm) if self.norm else 1.0

    def factors(self, rank: int, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """`up [out, rank]` and `down [rank, in]`, of which scale x up @ down is the approximation of this rank, each
        with the roots of the singular values; rows and columns beyond their number are 0."""
        count = min(rank, len(self.values))
        roots = self.values[:count].sqrt() / sqrt(scale)
        up, down = self.left.new_zeros(len(self.left), rank), self.left.new_zeros(rank, len(self.right))
        up[:, :count] = self.left[:, :count] * roots
        down[:count] = (self.right[:, :count] * roots).T
        return up, down


def directions_of(matrix: Tensor, rank: int | None, seed: int, iterations: int = FEWER) -> Directions:
    """The first `rank` and some more directions of a matrix `[out, in]` in float32, by randomized subspace iteration
    (Halko et al. 2011, algorithms 4.4 and 5.1); by a whole decomposition if that has no more, or for rank `None`.

    The same seed gives the same bits on the same machine.
    """
    count = min(matrix.shape) if rank is None else min(rank + MORE, *matrix.shape)
    if count == min(matrix.shape):
        left, values, across = torch.linalg.svd(matrix, full_matrices=False)
        return Directions(left, values, across.T, float(matrix.norm()))
    with torch.random.fork_rng(devices=[matrix.device] if matrix.is_cuda else []):
        torch.manual_seed(seed)
        return Directions(*torch.svd_lowrank(matrix, q=count, niter=iterations), float(matrix.norm()))


def directions_of_product(up: Tensor, down: Tensor) -> Directions:
    """All directions of `up [out, rank]` @ `down [rank, in]`, without that matrix: with up = Q R and down^T = P S, they
    are those of R S^T, of the rank's size, turned by Q and P. Exact up to rounding, in float64."""
    outer, up_rest = torch.linalg.qr(up.double())
    inner, down_rest = torch.linalg.qr(down.double().T)
    left, values, across = torch.linalg.svd(up_rest @ down_rest.T, full_matrices=False)
    return Directions(outer @ left, values, inner @ across.T, float(values.norm()))


def kept_of_all(norms: Sequence[float], kept: Sequence[float]) -> float:
    """The part of the norm of several matrices together that is kept, given each one's norm and part."""
    whole = sum(norm**2 for norm in norms)
    return sqrt(sum((norm * part) ** 2 for norm, part in zip(norms, kept, strict=True)) / whole) if whole else 1.0


def principal_part(weight: Tensor, rank: int, scale: float, seed: int) -> tuple[Tensor, Tensor]:
    """`up [out, rank]` and `down [rank, in]` in float32, on the CPU: scale x up @ down is the best approximation of
    `weight` of this rank, up to rounding. The same seed gives the same bits on the same machine."""
    matrix = weight.detach().cpu().float().flatten(1)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        left, values, right = torch.svd_lowrank(matrix, q=min(rank + MORE, *matrix.shape), niter=ITERATIONS)
    roots = values[:rank].sqrt() / sqrt(scale)
    return (left[:, :rank] * roots).contiguous(), (right[:, :rank] * roots).T.contiguous()
