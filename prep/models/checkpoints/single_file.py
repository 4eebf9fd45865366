"""Converts a single-file checkpoint to a pipeline directory, offline, with diffusers' functions that rename weights.

A single file has weights only. Configs and tokenizers, and weights that the file lacks, come from a pipeline directory
of the same architecture; they are copied first, so that no library looks at anything else in it, and none downloads.
Each weight keeps its dtype. Those of 8 bits with a scale beside them cannot: they are multiplied, and become bfloat16.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
from torch import Tensor

from prep.errors import ModelError, PathError
from prep.models.checkpoints.contents import name_configs
from prep.models.checkpoints.converted import Converted as ConvertedWeights
from prep.models.checkpoints.converted import empty_model, weights_of
from prep.models.checkpoints.stored import DTYPES, Stored, write
from prep.models.components import class_of
from prep.models.configs import copied_index, index_file, is_modular, pipeline_index
from prep.models.families.registry import FAMILIES
from prep.models.family import Family
from prep.models.files import ComponentFiles, SingleFile
from prep.models.fingerprint import text_files
from prep.models.loading import quiet_libraries
from prep.models.pipeline import (
    APART,
    infer_family,
    part_of,
    schedule_in_code,
    scheduler_config,
    tokenizer_files,
    weighted_files,
)
from prep.models.text.pipeline import spoken
from prep.parse import brief


@dataclass(frozen=True, kw_only=True, slots=True)
class Converted:
    """What was written."""

    out: Path
    scaled: int  # weights that were multiplied by their scales


def convert(model: SingleFile, out: Path) -> Converted:
    """Writes `out`, a pipeline directory with the weights, configs and tokenizers of `model`.

    Raises `ModelError`, also for a tensor that nothing reads and for weights that are not finite; `PathError` if `out`
    exists and is not an empty directory.
    """
    check_target(out)
    family = FAMILIES[infer_family(model)]
    quiet_libraries()
    scaled = 0
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.absolute().parent) as folder:
        made = Path(folder) / out.name
        made.mkdir()
        for component in _copy_configs(model, family, made):
            scaled += _write_weights(weighted_files(model, component), made / component)
        weighted_files(made, family.denoiser)
        weighted_files(made, "vae")
        text_files(made)  # as every model directory is checked before it is used
        if out.is_dir():
            out.rmdir()
        made.rename(out)
    return Converted(out=out, scaled=scaled)


def check_target(out: Path) -> None:
    """Raises `PathError` unless `out` may become a directory."""
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise PathError(f"{out} exists, expected a new or empty directory", hint="name another with -o")
    if not out.absolute().parent.is_dir():
        raise PathError(f"{out} cannot be written: there is no directory {out.absolute().parent}",
                        hint="make the directory first")


def _copy_configs(model: SingleFile, family: Family, made: Path) -> list[str]:
    """Copies the configs and tokenizers of `model`, and nothing else of their directory.

    The new model_index.json names only components of the family; a modular index keeps others, which it may name in
    other repositories. Returns the components with weights. Raises `ModelError`.
    """
    index = pipeline_index(model)
    kept = {key: value for key, value in index.items() if not isinstance(value, list)}
    found = []
    for component, value in index.items():
        if component in family.components and value not in (None, [None, None]):
            kept[component] = list(class_of(index, component, model))
            if component.startswith("tokenizer") or component in APART:
                _write_small(made / component, tokenizer_files(model, component).small)
            else:
                found.append(component)
        elif isinstance(value, list):
            kept[component] = [None, None] if _is_component(value) else value
    if schedule_in_code(model) is None:
        _copy_scheduler(model, index, kept, made)
    written = copied_index(model, [name for name in found if part_of(model, name)]) if is_modular(model) else kept
    _write_small(made, {index_file(model).name: json.dumps(written, indent=2).encode() + b"\n"})
    return found


def _is_component(value: list[Any]) -> bool:
    """Whether a list of model_index.json names a component: others are options with several numbers."""
    return not value or not all(type(one) is int for one in value)


def _write_small(folder: Path, files: Mapping[str, bytes]) -> None:
    folder.mkdir(exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def _copy_scheduler(model: SingleFile, index: dict[str, Any], kept: dict[str, Any], made: Path) -> None:
    """The scheduler's config: plain values, of a class of diffusers."""
    given = index.get("scheduler")
    known = isinstance(given, list) and len(given) == 2 and given[0] == "diffusers"
    kind = str(given[1]) if isinstance(given, list) and len(given) == 2 else ""
    if not known or not kind.endswith("Scheduler") or not hasattr(diffusers, kind):
        raise ModelError(f"scheduler in {index_file(model)} is {brief(given)}, expected one of diffusers",
                         hint=name_configs(model.path))
    values = scheduler_config(model)
    _write_small(made / "scheduler", {"scheduler_config.json": json.dumps(values, indent=2).encode() + b"\n"})
    kept["scheduler"] = ["diffusers", kind]


def _write_weights(files: ComponentFiles, target: Path) -> int:
    """Writes a component's config and weights; returns how many were multiplied by scales. Raises `ModelError`."""
    _write_small(target, files.small)
    if not files.part:
        for path in files.weights:
            shutil.copyfile(path, target / files.weight_name(path))
        return 0
    stored = weights_of(files, empty_model(files))
    stem = "diffusion_pytorch_model" if files.kind[0] == "diffusers" else "model"
    layout = {name: (DTYPES[tensor.dtype], tensor.shape) for name, tensor in stored.tensors.items()}
    write(target / f"{stem}.safetensors", layout, (_finite(stored, name, files) for name in layout))
    return len(stored.source.scales.of) if isinstance(stored, ConvertedWeights) else 0


def _finite(stored: Stored, name: str, files: ComponentFiles) -> Tensor:
    value = stored.read(name)
    if value.is_floating_point() and not bool(value.float().isfinite().all()):
        raise ModelError(f"weights of the {spoken(files.folder.name)} are not finite, NaN or infinite: {name}",
                         hint="the file is damaged, or its training diverged: download it again, or name another")
    return value
