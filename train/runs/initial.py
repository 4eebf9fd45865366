"""Weights that a new run begins with (`--init-from`): found, and compared with what the run trains. No torch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from prep.digest import digest_json
from prep.errors import CacheError, ModelError, PathError
from prep.fs.place import Local
from prep.models.family import Family
from prep.models.fingerprint import FileDigest
from prep.models.weights import weight_files
from prep.parse import Unparsed
from prep.runs.documents import refused
from prep.training.schema import Config
from train.models.naming import Naming
from train.models.targets import Presets, Shapes, layers_of
from train.runs.checkpoint import STATE, files_of, is_checkpoint, list_checkpoints, open_weights, recorded_digest
from train.runs.lora_file import NAMES, open_lora
from train.runs.lora_fits import check_lora
from train.runs.safetensors.header import TensorInfo, first_rows, joined, read_header_and_metadata
from train.setup import Initial

_TRAINED = ("F32", "F16", "BF16")
_PLACES = "expected a .safetensors file, a run, one of its checkpoints, or a diffusers directory"


@dataclass(frozen=True, kw_only=True, slots=True)
class _File:
    """The header of a safetensors file."""

    tensors: Mapping[str, TensorInfo]
    metadata: Mapping[str, str]
    rows: Mapping[str, int]  # with which row of the whole tensor each begins


def inspect_weights(start: Local, config: Config, family: Family, weights: Shapes, presets: Presets, naming: Naming,
                    digest: FileDigest) -> Initial:
    """The weights at `start` for a run with these settings. `weights`: the shapes of the denoiser's.

    Raises `PathError`, `ModelError`, `ConfigError`, and `CacheError` if a checkpoint's file is another than was saved.
    """
    path, paths = start.path, find_weights(start, family, config.method)
    notes: tuple[str, ...] = ()
    if config.method == "lora":
        layers = layers_of(weights)
        file = open_lora(paths[0], layers, naming, "name an undamaged file of weights")
        check_lora(file, config.lora, layers, presets, naming)
        notes, metadata = file.notes(path.name), file.metadata
    else:
        files = [_read(each) for each in paths]
        _check_full(path, _joined(path, files), weights)
        metadata = files[0].metadata
    digests = tuple(digest(each) for each in paths)
    for each, actual in zip(paths, digests, strict=True):
        if recorded_digest(each) not in (None, actual):
            raise CacheError(f"{each} is damaged: its bytes do not match the digest in {STATE} of its checkpoint",
                             hint="name undamaged weights, like those of another checkpoint of the run")
    return Initial(name=path.name, files=paths, digests=digests, notes=notes, metadata=metadata,
                   digest=digests[0] if len(digests) == 1 else digest_json(list(digests)))


def find_weights(start: Local, family: Family, method: str) -> tuple[Path, ...]:
    """The files of the weights at `start`. Of a run those of its newest checkpoint, or else its result; of a checkpoint
    the moving average, if there is one. Raises `PathError`, `ModelError`."""
    path = start.path
    if path.is_file() and path.suffix == ".safetensors":
        return (path,)
    if not path.is_dir():
        seen = "is not a safetensors file" if path.exists() else "does not exist"
        raise PathError(f"--init-from {start} {seen}, {_PLACES}")
    checkpoints = list_checkpoints(path)
    folder = checkpoints[-1] if checkpoints else path
    candidates = (folder / name for name in NAMES if (folder / name).is_file())
    adapters, inner = next(candidates, folder / "lora.safetensors"), folder / family.denoiser
    if is_checkpoint(folder) and (average := _of_checkpoint(folder, "ema.safetensors")):
        return average
    if method == "lora" and not adapters.is_file():
        raise PathError(f"--init-from {start} has no lora.safetensors, {_PLACES}",
                        hint="for a LoRA on other weights of the denoiser, name their model with --model")
    if method == "lora":
        return (adapters,)
    if adapters.is_file() and not inner.is_dir():
        raise PathError(f"--init-from {start} is a LoRA, but method is 'full'",
                        hint="add it to its model with train merge, and name that with --model")
    pieces = _of_checkpoint(folder, f"{family.denoiser}/diffusion_pytorch_model.safetensors")
    return pieces or weight_files(inner if inner.is_dir() else folder, "diffusion_pytorch_model")


def _of_checkpoint(folder: Path, name: str) -> tuple[Path, ...]:
    """The file `name` of a checkpoint, its pieces, or nothing. Raises `ModelError`."""
    names = [name] if (folder / name).is_file() else [
        each.relative_to(folder).as_posix() for each in (folder / name.removesuffix(".safetensors")).glob("*")]
    try:
        return tuple(folder / each for each in files_of(name, names))
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
        with open_weights(path) as handle:
            tensors, metadata = read_header_and_metadata(handle, os.fstat(handle.fileno()).st_size)
        for name, info in tensors.items():
            if info.dtype not in _TRAINED:
                raise Unparsed(f"'{name[:80]}' has dtype {info.dtype}, expected one of: {', '.join(_TRAINED)}")
        rows = first_rows(tensors, metadata)
    except (OSError, Unparsed) as error:
        raise refused(path, error, "name an undamaged file of weights") from None
    return _File(tensors=tensors, metadata=metadata, rows=rows)


def _check_full(path: Path, shapes: Shapes, weights: Shapes) -> None:
    """Raises `ModelError` unless the tensors are those of the denoiser."""
    for name, shape in weights.items():
        if shapes.get(name) != shape:
            seen = f"has shape {list(shapes[name])}" if name in shapes else "is missing"
            raise ModelError(f"{path} does not fit the denoiser: '{name[:80]}' {seen}, expected shape {list(shape)}",
                             hint="name weights of the same architecture, or train a LoRA (--method lora)")
    if others := sorted(shapes.keys() - weights.keys()):
        raise ModelError(f"{path} does not fit the denoiser: the model has no '{others[0][:80]}'",
                         hint="name weights of the same architecture")
