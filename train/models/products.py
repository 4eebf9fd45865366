"""LoHa and LoKr: adapters that are products of small matrices, and the shapes of their tensors. Imports no torch.

LoHa (Hyeon-Woo et al. 2022, proposition 1) adds the elementwise product of two products, (A1 B1) * (A2 B2). LoKr
(Yeh et al. 2024, section 3.3) adds the Kronecker product of a small matrix and a large one, and the large one may be a
product A B. Names and scales are those of LyCORIS.
"""

from __future__ import annotations

from math import isqrt, prod

from prep.training.schema import Lora

LOHA = ("hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b")
LOKR = ("lokr_w1", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
CORES = ("hada_t1", "hada_t2", "lokr_t2")  # of Tucker's decomposition, which is read, but not trained
PRODUCTS = (*LOHA, *LOKR)  # kinds of parameters, and suffixes of names in files


def product_shapes(layer: tuple[int, ...], rank: int, lora: Lora) -> dict[str, tuple[int, ...]]:
    """The shape of each parameter, by kind, for a layer's weight of shape `layer`."""
    if lora.kind == "loha":
        return {kind: (layer[0], rank) if kind.endswith("_a") else (rank, prod(layer[1:])) for kind in LOHA}
    (rows, row), (columns, column) = factors(layer[0], lora.factor), factors(layer[1], lora.factor)
    if 2 * rank >= max(row, column):  # a product of this rank would be no smaller
        return {"lokr_w1": (rows, columns), "lokr_w2": (row, column, *layer[2:])}
    return {"lokr_w1": (rows, columns), "lokr_w2_a": (row, rank), "lokr_w2_b": (rank, column * prod(layer[2:]))}


def product_alpha(layer: tuple[int, ...], rank: int, lora: Lora) -> float:
    """The alpha of a layer; LoKr's two whole matrices are not scaled, since readers do not scale them."""
    return float(rank) if "lokr_w2" in product_shapes(layer, rank, lora) else scaled_alpha(rank, lora)


def scaled_alpha(rank: int, lora: Lora) -> float:
    """The alpha of a layer of this rank: alpha / rank is the same in all layers."""
    return rank * lora.alpha / lora.rank


def factors(number: int, first: int) -> tuple[int, int]:
    """Two factors of `number`: `first`, or the largest below it, and the other; 0: as equal as they can be."""
    if first and number % first == 0:
        return first, number // first
    most = min(isqrt(number), first or number)
    small = next(divisor for divisor in range(most, 0, -1) if number % divisor == 0)
    return small, number // small
