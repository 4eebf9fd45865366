"""Weights that a new run begins with (`--init-from`): found, and compared with what the run trains. No torch."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path

from prep.digest import digest_json
from prep.errors import CacheError, ConfigError, ModelError, PathError
from prep.fs.mirror import shown
from prep.models.family import Family
from prep.models.fingerprint import FileDigest
from prep.models.weights import weight_files
from prep.parse import Unparsed, brief
from prep.runs.documents import open_plain, refused
from train.config.schema import Config, Lora
from train.models.naming import Naming, Place, ends_of, shape_of_lengths
from train.models.products import product_alpha, product_shapes
from train.models.targets import Presets, Shapes, adapter_of, is_named, layers_of, targeted
from train.runs.checkpoint import STATE, files_of, is_checkpoint, list_checkpoints, recorded_digest
from train.runs.safetensors.header import TensorInfo, first_rows, joined, read_header_and_metadata
from train.setup import Initial

_TEXT = ("lora_te_", "lora_te1_", "lora_te2_", "lora_te3_", "text_encoder.", "text_encoder_2.", "text_encoder_3.")
_CODES = {"F64": "<d", "F32": "<f", "F16": "<e", "BF16": "<f"}  # of `struct`
_MARKS = {"lokr": ".lokr_w", "loha": ".hada_w"}  # in the names of each kind's tensors
_TRAINED = ("F32", "F16", "BF16")
_PLACES = "expected a .safetensors file, a run, one of its checkpoints, or a diffusers directory"


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The header of a safetensors file, with the values of scalars."""

    path: Path
    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    scalars: Mapping[str, float]
    rows: Mapping[str, int]  # with which row of the whole tensor each begins


def inspect_weights(path: Path, config: Config, family: Family, weights: Shapes, presets: Presets, naming: Naming,
                    digest: FileDigest) -> Initial:
    """The weights at `path` for a run with these settings. `weights`: the shapes of the denoiser's.

    Raises `PathError`, `ModelError`, `ConfigError`, and `CacheError` if a checkpoint's file is another than was saved.
    """
    paths = find_weights(path, family, config.method)
    files = [_read(each) for each in paths]
    unused = 0
    if config.method == "lora":
        unused = _check_lora(files[0], config.lora, weights, presets, naming)
    else:
        _check_full(path, _joined(path, files), weights)
    digests = tuple(digest(each) for each in paths)
    for each, found in zip(paths, digests, strict=True):
        if recorded_digest(each) not in (None, found):
            raise CacheError(f"{each} is damaged: its bytes do not match the digest in {STATE} of its checkpoint",
                             hint="name undamaged weights, like those of another checkpoint of the run")
    return Initial(name=path.name, files=paths, digests=digests, unused=unused, metadata=files[0].metadata,
                   digest=digests[0] if len(digests) == 1 else digest_json(list(digests)))


def find_weights(path: Path, family: Family, method: str) -> tuple[Path, ...]:
    """The files of the weights at `path`. Of a run those of its newest checkpoint, or else its result; of a checkpoint
    the moving average, if there is one. Raises `PathError`, `ModelError`."""
    if path.is_file() and path.suffix == ".safetensors":
        return (path,)
    if not path.is_dir():
        seen = "is not a safetensors file" if path.exists() else "does not exist"
        raise PathError(f"--init-from {shown(path)} {seen}, {_PLACES}")
    checkpoints = list_checkpoints(path)
    folder = checkpoints[-1] if checkpoints else path
    adapters, inner = folder / "lora.safetensors", folder / family.denoiser
    if is_checkpoint(folder) and (average := _of_checkpoint(folder, "ema.safetensors")):
        return average
    if method == "lora" and not adapters.is_file():
        raise PathError(f"--init-from {path} has no lora.safetensors, {_PLACES}",
                        hint="for a LoRA on other weights of the denoiser, name their model with --model")
    if method == "lora":
        return (adapters,)
    if adapters.is_file() and not inner.is_dir():
        raise PathError(f"--init-from {shown(path)} is a LoRA, but method is 'full'",
                        hint="add it to its model with train merge, and name that with --model")
    pieces = _of_checkpoint(folder, f"{family.denoiser}/diffusion_pytorch_model.safetensors")
    return pieces or weight_files(inner if inner.is_dir() else folder, "diffusion_pytorch_model")


def _of_checkpoint(folder: Path, name: str) -> tuple[Path, ...]:
    """The file `name` of a checkpoint, its pieces, or nothing. Raises `ModelError`."""
    there = [name] if (folder / name).is_file() else [
        each.relative_to(folder).as_posix() for each in (folder / name.removesuffix(".safetensors")).glob("*")]
    try:
        return tuple(folder / each for each in files_of(name, there))
    except Unparsed as error:
        raise refused(folder / name, error, "name an undamaged checkpoint") from None


def _joined(path: Path, files: list[_File]) -> Shapes:
    """The shapes of the tensors in all files. Raises `CacheError` if rows of one are missing."""
    try:
        whole = joined((file.tensors, file.rows) for file in files)
    except Unparsed as error:
        raise refused(path, error, "name undamaged weights") from None
    return {name: shape for name, (_, shape) in whole.items()}


def _read(path: Path) -> _File:
    try:
        with open_plain(path) as handle:
            tensors, metadata = read_header_and_metadata(handle, os.fstat(handle.fileno()).st_size)
            start, scalars, rows = handle.tell(), dict[str, float](), first_rows(tensors, metadata)
            for name, info in tensors.items():
                if info.dtype in _CODES and info.shape in ((), (1,)):
                    handle.seek(start + info.start)
                    data = handle.read(info.end - info.start)
                    data = b"\0\0" + data if info.dtype == "BF16" else data  # the upper half of a float32
                    (scalars[name],) = struct.unpack(_CODES[info.dtype], data)
                elif info.dtype not in _TRAINED:
                    raise Unparsed(f"'{name[:80]}' has dtype {info.dtype}, expected one of: {', '.join(_TRAINED)}")
    except (OSError, Unparsed, struct.error) as error:
        raise refused(path, error, "name an undamaged file of weights") from None
    return _File(path=path, tensors=tensors, metadata=metadata, scalars=scalars, rows=rows)


def _check_full(path: Path, there: Shapes, weights: Shapes) -> None:
    """Raises `ModelError` unless the tensors are those of the denoiser."""
    for name, shape in weights.items():
        if there.get(name) != shape:
            seen = f"has shape {list(there[name])}" if name in there else "is missing"
            raise ModelError(f"{path} does not fit the denoiser: '{name[:80]}' {seen}, expected shape {list(shape)}",
                             hint="name weights of the same architecture, or train a LoRA (--method lora)")
    if others := sorted(there.keys() - weights.keys()):
        raise ModelError(f"{path} does not fit the denoiser: the model has no '{others[0][:80]}'",
                         hint="name weights of the same architecture")


# ---- LoRA ------------------------------------------------------------------------------------------------------------


def _check_lora(file: _File, lora: Lora, weights: Shapes, presets: Presets, naming: Naming) -> int:
    """Compares layers, ranks and alphas with the settings; returns how many tensors adapt text encoders.

    Raises `ConfigError`, `ModelError`.
    """
    layers = layers_of(weights)
    if lora.kind != "lora":
        return _check_products(file, lora, layers, presets, naming)
    used = [name for name in file.tensors if not name.startswith(_TEXT)]
    tables = [_names(layers, layout, naming) for layout in ("diffusers", "kohya")[: 1 if naming.kohya is None else 2]]
    names = max(tables, key=lambda table: sum(name in table for name in used))
    if unknown := [name for name in used if name not in names]:
        kind = next((kind for kind, mark in _MARKS.items() if mark in unknown[0]), "")
        raise ModelError(f"{file.path} has the tensor '{unknown[0][:80]}', expected names of a LoRA of this model, "
                         f"like '{next(iter(names))}'", hint=f"--set lora.kind={kind}" if kind else
                         "name a LoRA of the same family of models")
    wanted = targeted(layers, lora, presets)
    there = {names[name]: name for name in used}
    adapted = _adapted({group for group, _ in there}, wanted)
    if set(adapted) != set(wanted):
        fitting = [preset for preset, ends in presets.items() if set(adapted) == set(_ending(layers, ends))]
        raise ConfigError(f"{file.path} adapts {len(adapted)} layers, like {adapted[0]}, which are not those of "
                          f"lora.targets {brief(lora.targets)}", hint=f"--set lora.targets={fitting[0]}" if fitting
                          else "list in lora.targets the layers that it adapts")
    for group in sorted({group for group, _ in there}):
        trained = [layer for layer in group.layers if layer in adapted]
        _check_adapter(file, group, trained, layers, {kind: there.get((group, kind)) for kind in _KINDS}, lora, naming)
    return len(file.tensors) - len(used)


_KINDS = ("down", "up", "alpha", "magnitude")


@dataclass(frozen=True, kw_only=True, slots=True, order=True)
class _Group:
    """Layers of the denoiser that are one layer in the file."""

    layers: tuple[str, ...]
    rows: int  # of the file's layer


def _names(layers: Shapes, layout: str, naming: Naming) -> dict[str, tuple[_Group, str]]:
    """Every name that a tensor of an adapter can have → (layers, kind)."""
    found: dict[str, list[tuple[Place, str]]] = {}
    for layer in layers:
        if (place := naming.place(layer, layout)) is not None:
            found.setdefault(place.name, []).append((place, layer))
    names: dict[str, tuple[_Group, str]] = {}
    for name, parts in found.items():
        place, layer = parts[0]
        group = _Group(layers=tuple(one for _, one in parts), rows=layers[layer][0] // place.count * place.of)
        names |= {name + end: (group, kind) for kind, end in ends_of(layout).items()}
    return names


def _adapted(groups: Iterable[_Group], wanted: Iterable[str]) -> list[str]:
    """The adapted layers. Of layers that are one in the file, those that are `wanted`: the others have rows of 0."""
    asked = set(wanted)
    return sorted(layer for group in groups for layer in (set(group.layers) & asked or group.layers))


def _ending(layers: Shapes, ends: tuple[str, ...]) -> list[str]:
    return [name for name in layers if any(is_named(name, end) for end in ends)]


def _check_adapter(file: _File, group: _Group, trained: list[str], layers: Shapes, names: Mapping[str, str | None],
                   lora: Lora, naming: Naming) -> None:
    """Raises `ConfigError` for another rank or alpha, `ModelError` for other shapes.

    The rank in the file is that of all trained layers together, or one that they share.
    """
    module, layer = ", ".join(trained), layers[trained[0]]
    shapes = {kind: file.tensors[name].shape if (name := names[kind]) else None for kind in ("down", "up")}
    down, adapter = shapes["down"], adapter_of(lora, trained[0], layer[2:])
    large = "conv_" if prod(layer[2:]) > 1 else ""
    own = adapter.rank * (2 if lora.init == "pissa" else 1)
    rank = own if down and down[0] == own else own * len(trained)
    if down and down[0] != rank:
        doubled = ", which lora.init 'pissa' doubles" if own > adapter.rank else ""
        hint = f"--set lora.conv_rank={down[0]}" if large else f"--rank {down[0]}"
        raise ConfigError(f"{file.path} has rank {down[0]} in {module}, but lora.{large}rank is {adapter.rank}"
                          f"{doubled}", hint=f"--set lora.init=kaiming {hint}" if doubled else hint)
    wanted = {"down": (rank, *layer[1:]), "up": (group.rows, rank, *(1 for _ in layer[2:]))}
    for kind, shape in wanted.items():
        if shapes[kind] != shape:
            seen = "no tensor" if shapes[kind] is None else f"shape {list(shapes[kind] or ())}"
            raise ModelError(f"{file.path} has {seen} '{kind}' of {module}, expected shape {list(shape)}",
                             hint="name a LoRA of the same family of models")
    _check_lengths(file, module, names["magnitude"], group.rows, layer, lora)
    stored = file.scalars.get(names["alpha"] or "")
    alpha = naming.alpha_of(file.metadata, trained[0], rank) if stored is None else stored
    alpha *= adapter.rank / rank
    if abs(alpha - adapter.alpha) > 1e-3 * adapter.alpha:  # a float16 has three digits
        asked = alpha / sqrt(adapter.rank) if lora.rslora else alpha
        raise ConfigError(f"{file.path} has alpha {alpha:g} in {module}, but lora.{large}alpha is {adapter.alpha:g}"
                          f"{' there, by lora.rslora' if lora.rslora else ''}",
                          hint=f"--set lora.{large}alpha={asked:g}")


def _check_lengths(file: _File, module: str, name: str | None, rows: int, layer: tuple[int, ...],
                   lora: Lora) -> None:
    """Raises `ConfigError` if only the file or only the run is of DoRA, `ModelError` for lengths of another shape."""
    if (name is not None) != lora.dora:
        told = "no lengths of rows, but lora.dora is on" if lora.dora else "lengths of rows, but lora.dora is off"
        raise ConfigError(f"{file.path} has {told}: {module}", hint=f"--set lora.dora={str(not lora.dora).lower()}")
    if name is not None and file.tensors[name].shape != (wanted := shape_of_lengths(name, rows, len(layer))):
        raise ModelError(f"{file.path} has lengths of {module} with shape {list(file.tensors[name].shape)}, expected "
                         f"{list(wanted)}", hint="name a LoRA whose lengths are those of rows (wd_on_output)")


# ---- LoHa and LoKr ---------------------------------------------------------------------------------------------------


def _check_products(file: _File, lora: Lora, layers: Shapes, presets: Presets, naming: Naming) -> int:
    """Like `_check_lora`: exactly the tensors that the settings give, under LyCORIS' names."""
    wanted: dict[str, tuple[int, ...]] = {}
    alphas: dict[str, float] = {}
    adapted = targeted(layers, lora, presets)
    naming.require(lora, adapted)
    for layer in adapted:
        place = naming.place(layer, "kohya")
        assert place is not None, "require has looked"
        rank = adapter_of(lora, layer, layers[layer][2:]).rank
        wanted |= {f"{place.name}.{kind}": shape for kind, shape in product_shapes(layers[layer], rank, lora).items()}
        alphas[f"{place.name}.alpha"] = product_alpha(layers[layer], rank, lora)
    used = {name for name in file.tensors if not name.startswith(_TEXT)}
    hint = "give it the lora.kind, factor, rank and targets that the file was trained with"
    if unknown := sorted(used - wanted.keys() - alphas.keys()):
        raise ModelError(f"{file.path} has the tensor '{unknown[0][:80]}', which is none of lora.kind '{lora.kind}' "
                         "with these settings", hint=hint)
    for name, shape in wanted.items():
        there = f"shape {list(file.tensors[name].shape)}" if name in file.tensors else "no such tensor"
        if there != f"shape {list(shape)}":
            raise ModelError(f"{file.path} has {there}: '{name[:80]}', expected shape {list(shape)}", hint=hint)
    for name, alpha in alphas.items():
        if abs(file.scalars.get(name, alpha) - alpha) > 1e-3 * alpha:
            raise ConfigError(f"{file.path} has '{name[:80]}' of {file.scalars[name]:g}, expected {alpha:g} by "
                              "lora.alpha", hint=f"--set lora.alpha={file.scalars[name] * lora.alpha / alpha:g}")
    return len(file.tensors) - len(used)
