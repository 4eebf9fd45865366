"""The rows that benchmarks read and write: what a sample of SDXL and of Flux has, of random bits."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from prep.arrays import ArraySpec

Kind = Mapping[str, Sequence[ArraySpec]]  # the arrays of each field
SDXL: Kind = {  # 463 kB: 1024x1024 pixels
    "latent": [ArraySpec(name="latent", dtype="bfloat16", shape=(4, 128, 128))],
    "mask": [ArraySpec(name="mask", dtype="uint8", shape=(1, 128, 128))],
    "text": [ArraySpec(name="hidden", dtype="bfloat16", shape=(77, 2048))],
}
FLUX: Kind = {  # 4.7 MB: 1024x1024 pixels, T5 padded to 512 tokens
    "latent": [ArraySpec(name="latent", dtype="bfloat16", shape=(16, 128, 128))],
    "mask": [ArraySpec(name="mask", dtype="uint8", shape=(1, 128, 128))],
    "text": [ArraySpec(name="t5", dtype="bfloat16", shape=(512, 4096)),
             ArraySpec(name="pooled", dtype="bfloat16", shape=(768,))],
}


def arrays(kind: Kind) -> dict[str, ArraySpec]:
    """Every array of a row, by name."""
    return {spec.name: spec for specs in kind.values() for spec in specs}


def drawn(kind: Kind, count: int) -> dict[str, np.ndarray]:
    """Random bits of finite values, uint8 [count, row_bytes] for each array."""
    rng = np.random.default_rng(0)
    return {name: finite_bytes(rng, spec, count) for name, spec in arrays(kind).items()}


def finite_bytes(rng: np.random.Generator, spec: ArraySpec, count: int) -> np.ndarray:
    """Random bits, uint8 [count, row_bytes]; of bfloat16 without the exponent's first bit, which is in every NaN."""
    found = np.frombuffer(rng.bytes(count * spec.row_bytes), np.uint8).reshape(count, spec.row_bytes)
    return found if spec.dtype == "uint8" else (found.view("<u2") & 0xBFFF).view(np.uint8)


def keys_of(data: Mapping[str, np.ndarray]) -> list[str]:
    """A key for each row, sorted."""
    count = len(next(iter(data.values())))
    return sorted(hashlib.sha256(str(row).encode()).hexdigest() for row in range(count))
