"""The two matrices of each layer of a LoRA file, without a model: read, and written again with others of any rank,
which is then the alpha."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from prep.errors import PathError
from prep.parse import Unparsed
from train.merging.factored import Factored, metadata_for, write_directory
from train.merging.reduced import check_output, write_lora
from train.runs.lora_file import CONFIG, PEFT
from train.runs.safetensors.values import FLOATS

_LIKE_KOHYA = {"down": ".lora_down.weight", "up": ".lora_up.weight", "alpha": ".alpha"}
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # that hold factors
Factors = Mapping[str, tuple[Tensor, Tensor]]  # down and up, by the file's layer


def check_place(output: Path, file: Factored, sources: Sequence[Path], *, force: bool | None) -> None:
    """Raises `PathError`, `UsageError` unless what `write_factors` writes may lie there; `force` as in `check_output`.
    """
    if not file.config:
        check_output(output, sources, force=force)
    elif output.exists() or output.is_symlink():
        raise PathError(f"{output} exists, expected a new directory for {PEFT} and its {CONFIG}",
                        hint="name another with -o")


def matrices_of(file: Factored, stem: str) -> tuple[Tensor, Tensor]:
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


def write_factors(output: Path, file: Factored, parts: dict[str, tuple[Tensor, Tensor]], given: Mapping[str, str],
                  other: Callable[[str], Tensor] | None = None) -> int:
    """Writes the file again with these `down` and `up` of layers, and returns how many bytes it has; of PEFT's
    directory a new directory. `given`: its metadata, but for ranks. `other`: the value of each further tensor, if not
    the file's."""
    _level(parts, file.bare)
    tensors, ranks = dict(_tensors(file, parts, other or file.read)), {stem: len(down) for stem, (down, _) in
                                                                       parts.items()}
    large = {stem for stem, (down, _) in parts.items() if prod(down.shape[2:]) > 1}
    metadata = metadata_for(file, ranks, large, given)
    if file.config:
        write_directory(output, file, ranks, tensors, metadata)
    else:
        write_lora(output, tensors, metadata)
    return sum(each.stat().st_size for each in (output.iterdir() if file.config else [output]))


def _level(parts: dict[str, tuple[Tensor, Tensor]], bare: set[str]) -> None:
    """Gives these layers one rank, by rows and columns of zeros."""
    rank = max((len(down) for stem, (down, _) in parts.items() if stem in bare), default=0)
    for stem in bare & parts.keys():
        down, up = parts[stem]
        more = rank - len(down)
        parts[stem] = (torch.cat([down, down.new_zeros(more, *down.shape[1:])]),
                       torch.cat([up, up.new_zeros(len(up), more, *up.shape[2:])], dim=1))


def _tensors(file: Factored, parts: Factors, other: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
    """The tensors in the order of the file, under its names; `other` than these matrices by that function."""
    of = {name: (stem, kind) for stem, kinds in file.layers.items() for kind, name in kinds.items()}
    for name in file.infos:
        stem, kind = of.get(name, ("", ""))
        if stem not in parts or kind in ("magnitude", "diff_b"):
            yield name, other(name)
            continue
        down, up = parts[stem]
        if kind == "diff":
            yield stem + _LIKE_KOHYA["down"], down
            yield stem + _LIKE_KOHYA["up"], up
            yield stem + _LIKE_KOHYA["alpha"], torch.tensor(float(len(down)))
        elif kind == "alpha" and "diff" not in file.layers[stem]:
            value = file.read(name)
            yield name, torch.full(value.shape, float(len(down)), dtype=value.dtype if value.dtype in DTYPES else None)
        elif kind in ("down", "up"):
            yield name, down if kind == "down" else up
