"""Finds what `train merge` adds: a LoRA file, or the weights of a run or of one of its checkpoints."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from prep.errors import PathError, Problem
from prep.formatting import shell_name
from prep.fs.place import Local
from prep.manifest.document import read_manifest
from prep.models.family import Family
from prep.runs.document import NAME as RUN
from train.runs.checkpoint import is_checkpoint, list_checkpoints, newest_other
from train.runs.directory import run_of
from train.runs.lora_file import NAMES


def family_of_run(path: Path) -> str:
    """The family of the run at `path`, or of the run of a checkpoint, by its copy of its manifest; "" if not known."""
    with suppress(Problem):
        return read_manifest(run_of(Local(path)).path / "manifest.json", fetch=False).family
    return ""


def find_trained(path: Path, family: Family) -> Path | None:
    """The weights of the denoiser of the full run at `path`: a run's result, else those of its newest checkpoint; a
    checkpoint's moving average, if there is one. `None` if it is no full run. Raises `PathError` for pieces."""
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


def another(damaged: Path) -> str:
    """The hint for a damaged file."""
    folder = damaged.parent if damaged.parent.parent.name == "checkpoints" else damaged.parent.parent
    other = newest_other(folder) if folder.parent.name == "checkpoints" else None
    named = "" if other is None else f"name another checkpoint: {shell_name(str(other))}; or "
    return f"{named}name an undamaged LoRA file of float32, float16 or bfloat16"
