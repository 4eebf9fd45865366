"""`train merge A B`: the weighted average of the results of several runs, as a file of its own.

All weights of a denoiser are averaged tensor by tensor (Wortsman et al. 2022, "Model soups", equation 1). Of LoRA files
the average is that of what they add to each layer. Averages of `up` and of `down` by themselves are not that: their
product would also have each file's `up` with the others' `down`. Instead the matrices stand side by side,

    sum_i w_i s_i up_i @ down_i = [r_1 up_1, r_2 up_2, ...] @ [r_1 down_1; r_2 down_2; ...],  r_i = sqrt(w_i s_i),

which is exact, and whose rank is the sum of theirs; `--rank` lowers that as `train resize` does. Tensors are read one
at a time, so the memory is that of the largest one; of LoRA files that of the result.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import copysign, sqrt
from pathlib import Path

import torch
from torch import Tensor

from prep.digest import digest_json
from prep.errors import ModelError
from prep.parse import Unparsed
from prep.runs.documents import refused
from prep.training.schema import Dtype
from train.merging.factored import Factored, open_factored
from train.merging.factors import DTYPES, check_place, matrices_of, write_factors
from train.merging.reduced import check_output, write_lora
from train.merging.resize import ResizeRequest, resize
from train.merging.streamed import cast, check_space, files_at, part_of, sha256_of, size_of, stored_at
from train.merging.trained import another, find_result, is_full, metadata_of
from train.metadata import table_in
from train.runs.checkpoint import recorded_digest
from train.runs.checkpoint_files import write_file
from train.runs.safetensors.header import SHARDING

Tick = Callable[[int], object]
_SAME = "name results of runs of the same kind and layers, on the same model"
_OWN = ("latentry.weights", "latentry.resized", "sshs_legacy_hash")  # metadata of one part, which its average is not


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The weights of one run, and their part of the average."""

    path: Path
    weight: float
    sha256: str  # of pieces that of the list of theirs
    metadata: Mapping[str, str]

    @property
    def full(self) -> bool:
        """Whether they are all weights of a denoiser, as a run writes them."""
        return is_full(self.metadata)


@dataclass(frozen=True, kw_only=True, slots=True)
class AverageRequest:
    """A request for an average."""

    sources: Sequence[Path]  # runs, checkpoints or files; at least two
    weights: Sequence[float]  # of each, above 0; they are divided by their sum
    output: Path
    rank: int | None = None  # of a LoRA the most of each layer; None: the sum of those of the parts
    dtype: Dtype | None = None  # None: each tensor keeps that of the first part


@dataclass(frozen=True, kw_only=True, slots=True)
class Averaged:
    """An average that was written."""

    output: Path
    parts: tuple[Part, ...]
    full: bool
    tensors: int  # layers of a LoRA, tensors of a full run
    size: int  # bytes
    kept: float = 1.0  # the part of what a LoRA adds that its rank holds, as a Frobenius norm
    notes: tuple[str, ...] = ()


def average(request: AverageRequest, tick: Tick = lambda count: None) -> Averaged:
    """Writes the file; of PEFT's directories a new directory. `tick`: called for each tensor or layer.

    Raises `PathError`, `UsageError`, `ModelError`, `CacheError`.
    """
    paths, total = [find_result(source) for source in request.sources], sum(request.weights)
    check_output(request.output, paths, force=None, what="file of weights")
    parts = tuple(part_at(path, weight / total) for path, weight in zip(paths, request.weights, strict=True))
    notes = tuple(_compared(parts))
    if parts[0].full:
        done = linear(parts, request.output, request.dtype, _metadata(parts), tick)
    else:
        done = _of_products(parts, request, tick)
    return replace(done, notes=notes)


def part_at(path: Path, weight: float) -> Part:
    """The part in this file, or in the pieces of this directory. Raises `CacheError`, also if it is damaged by its
    checkpoint's digest."""
    try:
        digests = {each: sha256_of(each) for each in files_at(path)}
        metadata = metadata_of(next(iter(digests)))
        if any(digest != (recorded_digest(each) or digest) for each, digest in digests.items()):
            raise Unparsed("its bytes do not match their digest")
    except (OSError, Unparsed) as error:
        raise refused(path, error, another(path)) from None
    first, *others = digests.values()
    return Part(path=path, weight=weight, sha256=digest_json([first, *others]) if others else first,
                metadata={name: value for name, value in metadata.items() if name != SHARDING})


def _compared(parts: Sequence[Part]) -> Iterator[str]:
    """Notes on what differs between the parts. Raises `ModelError` for what cannot be averaged."""
    first = parts[0]
    for other in parts[1:]:
        if other.full != first.full:
            seen, expected = ("has all weights" if part.full else "is a LoRA" for part in (other, first))
            raise ModelError(f"{other.path} {seen}, but {first.path} {expected}", hint=_SAME)
        own, expected = (part.metadata.get("modelspec.architecture", "")[:80] for part in (other, first))
        if own and expected and own != expected:
            raise ModelError(f"{other.path} is of '{own}', but {first.path} of '{expected}'", hint=_SAME)
        bases = [table_in(part.metadata, "latentry.base").get("denoiser") for part in (first, other)]
        if all(bases) and bases[0] != bases[1]:
            yield f"{other.path.name} was trained on another model than {first.path.name}"


def _metadata(parts: Sequence[Part]) -> dict[str, str]:
    """The metadata of the first part, with all parts by digest."""
    listed = [{"name": part.path.name, "sha256": part.sha256, "weight": part.weight} for part in parts]
    kept = {name: value for name, value in parts[0].metadata.items() if name not in (*_OWN, "format")}
    return {**kept, "latentry.averaged": json.dumps(listed), "latentry.weights": "average of runs",
            "modelspec.merged_from": ", ".join(f"{part.path.name} x {part.weight:.6g}" for part in parts)}


# ---- tensor by tensor ------------------------------------------------------------------------------------------------


def linear(parts: Sequence[Part], output: Path, dtype: Dtype | None, metadata: Mapping[str, str], tick: Tick
           ) -> Averaged:
    """Writes the average of each tensor by itself, whatever these are. Raises `PathError`, `ModelError`, `CacheError`.
    """
    stored = [stored_at(part.path) for part in parts]
    infos = [each.infos for each in stored]
    for part, other in zip(parts[1:], infos[1:], strict=True):
        for name in {**infos[0], **other}:
            shapes = [list(of[name].shape) if name in of else None for of in (other, infos[0])]
            if shapes[0] != shapes[1]:
                seen, expected = ("no such tensor" if shape is None else f"shape {shape}" for shape in shapes)
                raise ModelError(f"{part.path} has '{name[:80]}' with {seen}, but {parts[0].path} with {expected}",
                                 hint=_SAME)
    check_space(output, size_of(infos[0], dtype), "average")

    def averaged(name: str, value: Tensor) -> Tensor:
        tick(1)
        reads = [partial(each.read, name) for each in stored[1:]]
        return cast(name, _mean(value, reads, [part.weight for part in parts]), dtype, value)

    file = part_of({parts[0].path: infos[0]}, dtype, averaged, metadata, stored[0].read)
    if parts[0].full:
        write_file(output, replace(file, name=output.name))
    else:  # whose digest stands before its tensors
        write_lora(output, {name: file.fetch(value) for name, value in (file.tensors or {}).items()},
                   file.metadata or {})
    return Averaged(output=output, parts=tuple(parts), full=parts[0].full, tensors=len(infos[0]),
                    size=output.stat().st_size)


def _mean(value: Tensor, others: Sequence[Callable[[], Tensor]], weights: Sequence[float]) -> Tensor:
    """The average in float32, of weights whose sum is 1. It is that of the differences to the first part, so that what
    is the same in all stays so to the bit."""
    first = value.float()
    mean = first.clone()
    for read, weight in zip(others, weights[1:], strict=True):
        mean += weight * (read().float() - first)
    return mean


# ---- products of two matrices ----------------------------------------------------------------------------------------


def _of_products(parts: Sequence[Part], request: AverageRequest, tick: Tick) -> Averaged:
    """Writes a LoRA of the average of what these add. Raises `PathError`, `ModelError`, `CacheError`."""
    files = [open_factored(part.path) for part in parts]
    check_place(request.output, files[0], [part.path for part in parts], force=None)
    _require_same_layers(files)
    weights, factors = [part.weight for part in parts], dict[str, tuple[Tensor, Tensor]]()
    for stem, kinds in files[0].layers.items():
        if "down" in kinds:
            factors[stem] = _side_by_side(files, weights, stem, request.dtype)
        tick(1)
    other = partial(_beside, files, weights, request.dtype)
    done = Averaged(output=request.output, parts=tuple(parts), full=False, tensors=len(files[0].layers), size=0)
    if request.rank is None:
        return replace(done, size=write_factors(request.output, files[0], factors, _metadata(parts), other))
    with tempfile.TemporaryDirectory(prefix=f".{request.output.name}.", dir=request.output.absolute().parent) as folder:
        whole = Path(folder) / request.output.name
        write_factors(whole, files[0], factors, _metadata(parts), other)
        lowered = resize(ResizeRequest(lora=whole, output=request.output, rank=request.rank))
    return replace(done, size=lowered.size, kept=lowered.kept)


def _beside(files: Sequence[Factored], weights: Sequence[float], dtype: Dtype | None, name: str) -> Tensor:
    """The average of a tensor of the first file that is neither `down` nor `up`: a whole difference, the addition to a
    bias, the embedding of a word. Raises `ModelError`, `CacheError`."""
    places = {each: (stem, kind) for stem, kinds in files[0].layers.items() for kind, each in kinds.items()}
    (stem, kind), value = places.get(name, ("", "")), files[0].read(name)
    if kind == "alpha":
        return value
    names = [file.layers[stem][kind] if stem else name for file in files]
    scales = [_scale(file, stem) if kind == "diff" else 1.0 for file in files]
    reads = [partial(_scaled, file, each, scale / scales[0] if scales[0] else 1.0)
             for file, each, scale in zip(files[1:], names[1:], scales[1:], strict=True)]
    return cast(name, _mean(value, reads, weights), dtype, value)


def _scaled(file: Factored, name: str, scale: float) -> Tensor:
    return scale * file.read(name).float()


def _scale(file: Factored, stem: str) -> float:
    try:
        return file.scale(stem)
    except Unparsed as error:
        raise ModelError(f"{file.path} {str(error).removeprefix('it ')}", hint="name an undamaged LoRA file") from None


def _side_by_side(files: Sequence[Factored], weights: Sequence[float], stem: str, dtype: Dtype | None
                  ) -> tuple[Tensor, Tensor]:
    """`down` and `up` of a layer, of the ranks of all files, with what scales them. Raises `ModelError`, `CacheError`.
    """
    downs, ups, first = list[Tensor](), list[Tensor](), torch.zeros(0)
    for file, weight in zip(files, weights, strict=True):
        scale = weight * _scale(file, stem)
        try:
            up, down = matrices_of(file, stem)
        except Unparsed as error:
            raise ModelError(f"{file.path} {str(error).removeprefix('it ')}",
                             hint="name an undamaged LoRA file") from None
        first, root = first if downs else up, sqrt(abs(scale))
        downs.append(down * root)
        ups.append(up.double() * copysign(root, scale))
        shapes = [[*each.shape[:1], *each.shape[2:], *inner.shape[1:]] for each, inner in
                  ((ups[-1], downs[-1]), (ups[0], downs[0]))]
        if shapes[0] != shapes[1]:
            raise ModelError(f"{file.path} has '{stem[:120]}' of sides {shapes[0]}, but {files[0].path} of sides "
                             f"{shapes[1]}", hint=_SAME)
    like = first if first.dtype in DTYPES else torch.zeros(0, dtype=torch.bfloat16)
    name = f"{stem}.up"
    return cast(name, torch.cat(downs), dtype, like), cast(name, torch.cat(ups, dim=1), dtype, like)


def _require_same_layers(files: Sequence[Factored]) -> None:
    """Raises `ModelError` unless all files have the same layers and tensors, and none has DoRA's lengths."""
    first = files[0]
    for file in files:
        for stem, kinds in file.layers.items():
            if "magnitude" in kinds:
                raise ModelError(f"{file.path} has the lengths of DoRA of {stem[:120]}: the average of such files is "
                                 "none of their kind", hint="merge each into its model with train merge, make a LoRA "
                                 "of each with train extract, and average these")
        of_file, of_first = ({(stem, kind) for stem, kinds in each.layers.items() for kind in kinds
                              if kind not in ("alpha", "mid")} | {(name, "") for name in _unlayered(each)}
                             for each in (file, first))
        if of_file != of_first:
            stem = min(of_file ^ of_first)[0]
            lacking, other = (file, first) if any(stem == each for each, _ in of_first) else (first, file)
            if {kind for each, kind in of_file if each == stem} and {kind for each, kind in of_first if each == stem}:
                raise ModelError(f"{file.path} and {first.path} adapt {stem[:120]} in different ways", hint=_SAME)
            raise ModelError(f"{lacking.path} has no '{stem[:120]}', which {other.path} has", hint=_SAME)
        for name in _unlayered(file) | {kinds[kind] for kinds in file.layers.values() for kind in ("diff", "diff_b")
                                        if kind in kinds}:
            if name in first.shapes and file.shapes[name] != first.shapes[name]:
                raise ModelError(f"{file.path} has '{name[:80]}' with shape {list(file.shapes[name])}, but "
                                 f"{first.path} with shape {list(first.shapes[name])}", hint=_SAME)


def _unlayered(file: Factored) -> set[str]:
    """The tensors that are of no layer: embeddings of words."""
    return file.shapes.keys() - {name for kinds in file.layers.values() for name in kinds.values()}
