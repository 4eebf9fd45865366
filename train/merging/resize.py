"""`train resize`: a LoRA file of lower rank, which keeps of each layer as much as that rank can.

No model is needed: names, dtypes and formats stay those of the file. A layer's matrices are decomposed by themselves,
without their product (`directions_of_product`); only a whole difference is decomposed as what it is. Factors of 8 bits
become bfloat16. DoRA's lengths stay as they are: rows have these whatever their directions are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from prep.errors import ModelError, PathError
from prep.models.fingerprint import digest_file
from prep.parse import Unparsed
from train.merging.factored import Factored, metadata_for, open_factored, write_directory
from train.merging.reduced import Reduced, Written, check_output, whole, write_lora
from train.merging.trained import find_lora
from train.models.principal import directions_of, directions_of_product
from train.runs.lora_file import CONFIG, PEFT
from train.runs.safetensors.values import FLOATS

_LIKE_KOHYA = {"down": ".lora_down.weight", "up": ".lora_up.weight", "alpha": ".alpha"}
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # that hold factors
Tick = Callable[[int], object]
_Parts = Mapping[str, tuple[Tensor, Tensor]]  # down and up, by the file's layer


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
    file, output = open_factored(path), request.output
    if not file.config:
        check_output(output, [path], force=request.force)
    elif output.exists() or output.is_symlink():
        raise PathError(f"{output} exists, expected a new directory for {PEFT} and its {CONFIG}",
                        hint="name another with -o")
    lowered, parts = list[Reduced](), dict[str, tuple[Tensor, Tensor]]()
    for stem, kinds in file.layers.items():
        if "down" in kinds or "up" in kinds or ("diff" in kinds and len(file.shapes[kinds["diff"]]) > 1):
            one, parts[stem] = _lowered(file, stem, request)
            lowered.append(one)
        tick(1)
    if not lowered:
        raise ModelError(f"{path} has no layer whose rank could be lowered",
                         hint="name a LoRA file, a run, or a directory of PEFT")
    _level(parts, file.bare)
    tensors, ranks = dict(_tensors(file, parts)), {stem: len(down) for stem, (down, _) in parts.items()}
    facts = {"name": path.name, "sha256": digest_file(path), "rank": request.rank, "keep": request.keep,
             "kept": round(whole(lowered), 6)}
    metadata = metadata_for(file, ranks, {stem for stem, (down, _) in parts.items() if prod(down.shape[2:]) > 1}, facts)
    if file.config:
        write_directory(output, file, ranks, tensors, metadata)
    else:
        write_lora(output, tensors, metadata)
    files = output.iterdir() if file.config else [output]
    return Written(output=output, layers=lowered, size=sum(each.stat().st_size for each in files))


def _lowered(file: Factored, stem: str, request: ResizeRequest) -> tuple[Reduced, tuple[Tensor, Tensor]]:
    """A layer's `down` and `up` of lower rank, for an alpha of that rank. Raises `ModelError`, `CacheError`."""
    kinds = file.layers[stem]
    try:
        if "diff" in kinds:
            value = file.read(kinds["diff"])
            found = directions_of(file.scale(stem) * value.float().flatten(1), request.rank, 0)
            before, sides, ones = min(value.flatten(1).shape), value.shape[1:], value.ndim - 2
        else:
            value, right = _matrices(file, stem)
            found = directions_of_product(file.scale(stem) * value.double().flatten(1), right.flatten(1))
            before, sides, ones = len(right), right.shape[1:], value.ndim - 2
    except Unparsed as error:
        raise ModelError(f"{file.path} {str(error).removeprefix('it ')}", hint="name an undamaged LoRA file") from None
    rank, dtype = found.rank(request.rank, request.keep), value.dtype if value.dtype in _DTYPES else torch.bfloat16
    up, down = found.factors(rank)
    one = Reduced(layer=stem, before=before, rank=rank, norm=found.norm, kept=found.kept(rank))
    return one, (down.reshape(rank, *sides).to(dtype), up.reshape(len(up), rank, *(1 for _ in range(ones))).to(dtype))


def _matrices(file: Factored, stem: str) -> tuple[Tensor, Tensor]:
    """`up` as the file has it, and `down` in float64, with Tucker's core if there is one: it has a value for each two
    ranks and place of the kernel. Raises `Unparsed`, `CacheError`."""
    kinds = file.layers[stem]
    for kind in ("down", "up", *(["mid"] if "mid" in kinds else [])):
        if kind not in kinds:
            raise Unparsed(f"it has no tensor '{kind}' of {stem[:120]}")
        info = file.infos[kinds[kind]]
        if len(info.shape) < 2 or not prod(info.shape) or info.dtype not in FLOATS:
            raise Unparsed(f"it has '{kinds[kind][:120]}' of {info.dtype} with shape {list(info.shape)}, expected a "
                           "matrix of floats")
    up, down = file.read(kinds["up"]), file.read(kinds["down"]).double()
    ranks = [up.shape[1], len(down)]
    if ranks != (list(file.shapes[kinds["mid"]][:2]) if "mid" in kinds else [len(down), up.shape[1]]):
        raise Unparsed(f"it has '{kinds['up'][:120]}' with shape {list(up.shape)}, but '{kinds['down'][:120]}' with "
                       f"shape {list(down.shape)}: their ranks differ")
    if "mid" in kinds:
        down = torch.einsum("ij...,jq->iq...", file.read(kinds["mid"]).double(), down.flatten(1))
    return up, down


def _level(parts: dict[str, tuple[Tensor, Tensor]], bare: set[str]) -> None:
    """Gives these layers one rank, by rows and columns of zeros."""
    rank = max((len(down) for stem, (down, _) in parts.items() if stem in bare), default=0)
    for stem in bare & parts.keys():
        down, up = parts[stem]
        more = rank - len(down)
        parts[stem] = (torch.cat([down, down.new_zeros(more, *down.shape[1:])]),
                       torch.cat([up, up.new_zeros(len(up), more, *up.shape[2:])], dim=1))


def _tensors(file: Factored, parts: _Parts) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the order of the file, under its names."""
    of = {name: (stem, kind) for stem, kinds in file.layers.items() for kind, name in kinds.items()}
    for name in file.infos:
        stem, kind = of.get(name, ("", ""))
        if stem not in parts or kind in ("magnitude", "diff_b"):
            yield name, file.read(name)
            continue
        down, up = parts[stem]
        if kind == "diff":
            yield stem + _LIKE_KOHYA["down"], down
            yield stem + _LIKE_KOHYA["up"], up
            yield stem + _LIKE_KOHYA["alpha"], torch.tensor(float(len(down)))
        elif kind == "alpha" and "diff" not in file.layers[stem]:
            value = file.read(name)
            yield name, torch.full(value.shape, float(len(down)), dtype=value.dtype if value.dtype in _DTYPES else None)
        elif kind in ("down", "up"):
            yield name, down if kind == "down" else up
