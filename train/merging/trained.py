"""Finds what `train merge` adds: a LoRA file, or the weights of a run or of one of its checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from prep.errors import PathError, Problem
from prep.formatting import shell_name
from prep.fs.place import Local
from prep.manifest.document import read_manifest
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.parse import Unparsed
from prep.runs.document import NAME as RUN
from train.metadata import table_in
from train.runs.checkpoint import is_checkpoint, list_checkpoints, newest_other, open_weights
from train.runs.directory import run_of
from train.runs.lora_file import NAMES
from train.runs.safetensors.header import read_header_and_metadata


def family_of_run(path: Path) -> str:
    """The family of the run at `path`, or of the run of a checkpoint, by its copy of its manifest; "" if not known."""
    with suppress(Problem):
        return read_manifest(run_of(Local(path)).path / "manifest.json", fetch=False).family
    return ""


def is_full(metadata: Mapping[str, str]) -> bool:
    """Whether the metadata of a file say that it has all weights of a denoiser, as a full run writes them."""
    return table_in(metadata, "latentry.config").get("method") == "full"


def find_result(path: Path) -> Path:
    """The weights at `path`, of a LoRA or of a full run, as `find_lora` and `find_trained`. Raises `PathError`."""
    families = {family.denoiser: family for family in FAMILIES.values()}.values() if path.is_dir() else ()
    return next(filter(None, (find_trained(path, family) for family in families)), None) or find_lora(path)


def find_trained(path: Path, family: Family) -> Path | None:
    """The weights of the denoiser of the full run at `path`: a run's result, else those of its newest checkpoint; a
    checkpoint's moving average, if there is one; or a file of such weights. `None` if it is no full run. Raises
    `PathError` for pieces."""
    if path.is_file():
        with suppress(OSError, Unparsed):  # of a LoRA's file its own reader says so
            return path if is_full(metadata_of(path)) else None
    name = f"{family.denoiser}/diffusion_pytorch_model.safetensors"
    folders = [folder for folder in (path, *list_checkpoints(path)[-1:]) if is_checkpoint(folder)]
    if path not in folders and (path / name).is_file() and (path / RUN).is_file():  # else any model has such a file
        return path / name
    for folder in folders:
        for each in ("ema.safetensors", name):
            if (folder / each).is_file() and not (folder / "lora.safetensors").is_file():
                return folder / each
        if (folder / name).with_suffix("").is_dir():
            raise PathError(f"{folder} has the weights in pieces, as a divided model saves them, expected a whole file",
                            hint=f"let the run end, which writes its result, or continue it with --no-shard; then "
                            f"name the run: {shell_name(str(folder.parent.parent))}")
    return None


def find_lora(path: Path) -> Path:
    """The LoRA file at `path`; a run's result, else that of its newest checkpoint; a checkpoint's moving average, if
    there is one; the file of a directory that PEFT or diffusers wrote. Raises `PathError`."""
    if path.is_dir():
        folders = [folder for folder in (path, *list_checkpoints(path)[-1:]) if is_checkpoint(folder)]
        result = [path / "lora.safetensors"] if path not in folders else []
        for place in (*result, *(folder / name for folder in folders
                                 for name in ("ema.safetensors", "lora.safetensors"))):
            if place.is_file() and (place.parent / "lora.safetensors").is_file():
                return place
        if others := [path / name for name in NAMES[1:] if (path / name).is_file()]:
            return others[0]
        raise PathError(f"{path} has no trained weights, expected a run with a result or a checkpoint, or a LoRA file",
                        hint="name the directory that train run wrote (-o)")
    if not path.is_file():
        raise PathError(f"{path} does not exist, expected a LoRA file or a run")
    return path


def metadata_of(path: Path) -> dict[str, str]:
    """The metadata of a file of weights. Raises `OSError`, `Unparsed`."""
    with open_weights(path) as handle:
        return read_header_and_metadata(handle, os.fstat(handle.fileno()).st_size)[1]


def another(damaged: Path) -> str:
    """The hint for a damaged file."""
    folder = damaged.parent if damaged.parent.parent.name == "checkpoints" else damaged.parent.parent
    other = newest_other(folder) if folder.parent.name == "checkpoints" else None
    named = "" if other is None else f"name another checkpoint: {shell_name(str(other))}; or "
    return f"{named}name an undamaged LoRA file of float32, float16 or bfloat16"
