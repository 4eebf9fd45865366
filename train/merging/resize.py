"""`train resize`: a LoRA file of lower rank, which keeps of each layer as much as that rank can.

No model is needed: names, dtypes and formats stay those of the file. A layer's matrices are decomposed by themselves,
without their product (`directions_of_product`); only a whole difference is decomposed as what it is. Factors of 8 bits
become bfloat16. DoRA's lengths stay as they are: rows have these whatever their directions are.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from prep.errors import ModelError
from prep.models.fingerprint import digest_file
from prep.parse import Unparsed
from train.merging.factored import Factored, open_factored
from train.merging.factors import DTYPES, check_place, matrices_of, write_factors
from train.merging.reduced import Reduced, Written, whole
from train.merging.trained import find_lora
from train.models.principal import directions_of, directions_of_product

Tick = Callable[[int], object]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResizeRequest:
    """A request to lower the rank; at least one of `rank` and `keep` is given."""

    lora: Path  # a file, a run, or PEFT's directory
    output: Path
    rank: int | None = None  # the most of each layer
    keep: float | None = None  # the part of each layer's norm that is enough
    force: bool = False


def resize(request: ResizeRequest, tick: Tick = lambda count: None) -> Written:
    """Writes the file; of PEFT's directory a new directory. `tick`: called for each layer.

    The memory is that of the result and of one layer. Raises `PathError`, `UsageError`, `ModelError`, `CacheError`.
    """
    path = find_lora(request.lora)
    file = open_factored(path)
    check_place(request.output, file, [path], force=request.force)
    lowered, parts = list[Reduced](), dict[str, tuple[Tensor, Tensor]]()
    for stem, kinds in file.layers.items():
        if "down" in kinds or "up" in kinds or ("diff" in kinds and len(file.shapes[kinds["diff"]]) > 1):
            one, parts[stem] = _lowered(file, stem, request)
            lowered.append(one)
        tick(1)
    if not lowered:
        raise ModelError(f"{path} has no layer whose rank could be lowered",
                         hint="name a LoRA file, a run, or a directory of PEFT")
    facts = {"name": path.name, "sha256": digest_file(path), "rank": request.rank, "keep": request.keep,
             "kept": round(whole(lowered), 6)}
    size = write_factors(request.output, file, parts, {**file.metadata, "latentry.resized": json.dumps(facts)})
    return Written(output=request.output, layers=lowered, size=size)


def _lowered(file: Factored, stem: str, request: ResizeRequest) -> tuple[Reduced, tuple[Tensor, Tensor]]:
    """A layer's `down` and `up` of lower rank, for an alpha of that rank. Raises `ModelError`, `CacheError`."""
    kinds = file.layers[stem]
    try:
        if "diff" in kinds:
            value = file.read(kinds["diff"])
            found = directions_of(file.scale(stem) * value.float().flatten(1), request.rank, 0)
            before, sides, ones = min(value.flatten(1).shape), value.shape[1:], value.ndim - 2
        else:
            value, right = matrices_of(file, stem)
            found = directions_of_product(file.scale(stem) * value.double().flatten(1), right.flatten(1))
            before, sides, ones = len(right), right.shape[1:], value.ndim - 2
    except Unparsed as error:
        raise ModelError(f"{file.path} {str(error).removeprefix('it ')}", hint="name an undamaged LoRA file") from None
    rank, dtype = found.rank(request.rank, request.keep), value.dtype if value.dtype in DTYPES else torch.bfloat16
    up, down = found.factors(rank)
    one = Reduced(layer=stem, before=before, rank=rank, norm=found.norm, kept=found.kept(rank))
    return one, (down.reshape(rank, *sides).to(dtype), up.reshape(len(up), rank, *(1 for _ in range(ones))).to(dtype))
